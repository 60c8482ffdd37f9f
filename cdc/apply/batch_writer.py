"""Write a stream's batches to its sink, one after the other; rows in quarantine are settled when cured."""

from collections.abc import Callable

from pyspark.sql import DataFrame, SparkSession
from tenacity import Retrying

from cdc.apply.plan import Ends
from cdc.apply.redrive import Redrive
from cdc.apply.views import Views
from cdc.config.settings import Pipeline
from cdc.errors import SinkError
from cdc.kafka.topics import Topics
from cdc.model.outcome import Applied
from cdc.quarantine.log import QuarantineKey
from cdc.quarantine.rejection import ToQuarantine
from cdc.quarantine.store import SinkQuarantine
from cdc.sink.contract import Batch, Outcome
from cdc.sink.rejection import Rejection, Stop


class BatchWriter:
    """Of one sink; one thread uses it. `total` counts records since the start, `batches` the batches."""

    def __init__(
        self,
        spark: SparkSession,
        pipeline: Pipeline,
        kafka: Topics,
        views: Views,
        writer: str,
        insist: Callable[[], Retrying],
        *,
        shadow: bool = False,
    ) -> None:
        """A `shadow` is of views that readers don't see: what is asked of the sink's quarantine isn't for it."""
        self._spark, self._pipeline, self._views = spark, pipeline, views
        self._writer, self._retry_batch, self._shadow = writer, insist, shadow
        self._quarantine = SinkQuarantine(spark, views.sink.name, pipeline, kafka)
        self._others: frozenset[QuarantineKey] | None = None if shadow else frozenset()
        self.total, self.batches = Applied(), 0

    def process_redrives(self) -> None:
        """Before the first batch after a start: look at the quarantine, and try again what somebody asked for.

        Raises:
            CdcError: what the sink raises.
        """
        self._quarantine.refresh()
        if self._quarantine.requests and not self._shadow:
            kafka, views = self._pipeline.kafka, self._views
            Redrive(self._spark, kafka, self._quarantine, views, self._writer, self._to_quarantine).run()

    def redrive_requested(self) -> bool:
        """Whether somebody wants entries of the sink to be tried again."""
        if self._shadow or not self._quarantine.open:
            return False
        if self._quarantine.has_changed():
            self._quarantine.refresh()
        return bool(self._quarantine.requests)

    def write(self, records: DataFrame, ends: Ends) -> None:
        """Make a batch durable in the sink. In: the records as Spark's Kafka source has them, and where they end.

        Raises:
            CdcError: what the sink raises, and what a record causes when the pipeline says `on_error: stop`.
        """
        steps = self._views.steps(ends)
        if not steps:
            return
        if self._shadow and self._others is None:
            self._quarantine.refresh()
            self._others = frozenset(self._quarantine.open)
        for attempt in self._retry_batch():
            with attempt:
                # Each time: what an earlier try has rejected, and passed, isn't rejected again.
                if (self._quarantine.open or attempt.retry_state.attempt_number > 1) and self._quarantine.has_changed():
                    self._quarantine.refresh()
                entries = self._quarantine.entries(step.table.topic for step in steps)
                batch = Batch(self._writer, tuple(steps), records, self._views.reading, self._rejection, entries)
                outcome = self._views.sink.apply(batch)
        self._account(outcome)
        self._views.advance(steps)

    @property
    def _rejection(self) -> Rejection:
        return Stop() if self._pipeline.on_error == "stop" else self._to_quarantine

    @property
    def _to_quarantine(self) -> ToQuarantine:
        return ToQuarantine(self._pipeline.kafka, self._pipeline.quarantine_topic, self._views.sink.name)

    def _account(self, outcome: Outcome) -> None:
        for applied in outcome.applied.values():
            if applied.read != applied.accounted:
                raise SinkError(
                    f"{self._views.sink.name} read {applied.read} records and accounts for {applied.accounted}.",
                    hint="this is a bug in the pipeline; the views may miss changes: cdc -p FILE verify",
                )
            self.total.add(applied)
        self.batches += 1
        if outcome.rejected:
            self._quarantine.refresh()
        if cured := self._quarantine.entries_cured_by(outcome.cured):
            # Those that were there before a build began are the live views'.
            self._quarantine.settle([entry for entry in cured if entry not in (self._others or ())])
