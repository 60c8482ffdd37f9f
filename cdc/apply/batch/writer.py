"""Write a stream's batches to its sink, one after the other, and settle the quarantine's entries of
cured rows.
"""

from collections.abc import Callable, Mapping

from tenacity import Retrying

from cdc.apply.batch.cures import cures_of, last_steps
from cdc.apply.batch.redrive import Redrive, is_before
from cdc.apply.plan import Ends
from cdc.apply.progress import Account
from cdc.apply.stream_options import Executors
from cdc.apply.views import Views
from cdc.errors import SinkError
from cdc.model.outcome import Applied
from cdc.quarantine.log import QuarantineKey
from cdc.quarantine.rejection import ToQuarantine
from cdc.quarantine.store import SinkQuarantine
from cdc.sink.contract import Batch, Key, Outcome
from cdc.sink.rejection import Rejection, Stop


class BatchWriter:
    """The writer of one sink; one thread uses it.

    `total` counts records since the start, `batches` the batches; `account` has the details.
    """

    def __init__(
        self,
        executors: Executors,
        views: Views,
        writer: str,
        retry_batch: Callable[[], Retrying],
        *,
        shadow: bool = False,
    ) -> None:
        """With `shadow` readers don't see the views, and redrives aren't for them."""
        self._executors = executors
        self._pipeline = views.pipeline
        self._views = views
        self._writer = writer
        self._retry_batch = retry_batch
        self._shadow = shadow
        self._quarantine = SinkQuarantine(views.sink.name, views.pipeline, views.kafka, views.now)
        self._live_entries: frozenset[QuarantineKey] | None = None if shadow else frozenset()
        """Entries from before a build began, which belong to the live views; None: not known."""
        self._is_settled = False
        """Whether the last batch that the sink has is known to have left no cure unsettled."""
        self.total, self.batches, self.account = Applied(), 0, Account()

    def process_redrives(self) -> None:
        """Load the quarantine, settle what the last batch before the start has cured, and redrive
        the requested entries, before the first batch after a start.

        Raises:
            CdcError: what the broker and the sink raise.
        """
        self._quarantine.refresh()
        if not self._is_settled and not self._shadow:
            self._settle(
                cures_of(self._executors, self._views, self._quarantine, last_steps(self._views))
            )
            self._is_settled = True
        if not self._shadow and (requests := self._answerable_requests()):
            Redrive(
                self._executors, self._quarantine, self._views, self._writer, self._to_quarantine
            ).run(requests)

    def redrive_requested(self) -> bool:
        """Whether there are requests that a redrive of the sink can answer now."""
        if self._shadow or not self._quarantine.open:
            return False
        if self._quarantine.has_changed():
            self._quarantine.refresh()
        return bool(self._answerable_requests())

    def _answerable_requests(self) -> list[QuarantineKey]:
        """The requests for records that the live views have passed. Others stay open: their table
        waits, or its next batch has them.
        """
        live = self._views.plan.live
        return [
            request
            for request in self._quarantine.requests
            if (position := live.get(request.topic)) and is_before(request, position)
        ]

    def write(self, ends: Ends) -> None:
        """Make a batch durable in the sink: what the views lack up to these ends.

        Raises:
            CdcError: from the sink; from a record if the pipeline says `on_error: stop`.
        """
        steps = self._views.plan.steps(ends)
        if not steps:
            return
        if self._shadow and self._live_entries is None:
            self._quarantine.refresh()
            self._live_entries = frozenset(self._quarantine.open)
        self._is_settled = False
        for attempt in self._retry_batch():
            with attempt:
                # At each attempt: records that an earlier attempt has rejected aren't rejected
                # again.
                if (
                    self._quarantine.open or attempt.retry_state.attempt_number > 1
                ) and self._quarantine.has_changed():
                    self._quarantine.refresh()
                entries = self._quarantine.entries(step.table.topic for step in steps)
                batch = Batch(
                    self._writer,
                    tuple(steps),
                    self._executors.records(),
                    self._views.reading,
                    self._rejection,
                    entries,
                )
                with self.account.measured("apply"):
                    outcome = self._views.sink.apply(batch)
        with self.account.measured("settle"):
            self._account(outcome)
            if attempt.retry_state.attempt_number > 1:
                # What an earlier attempt has cured, its answer would have told.
                self._settle(cures_of(self._executors, self._views, self._quarantine, steps))
        self._is_settled = True
        self._views.advance(steps)

    @property
    def _rejection(self) -> Rejection:
        return Stop() if self._pipeline.on_error == "stop" else self._to_quarantine

    @property
    def _to_quarantine(self) -> ToQuarantine:
        return ToQuarantine(
            self._pipeline.kafka, self._pipeline.quarantine_topic, self._views.sink.name
        )

    def _account(self, outcome: Outcome) -> None:
        for table, applied in outcome.applied.items():
            if applied.read != applied.accounted:
                raise SinkError(
                    f"{self._views.sink.name} read {applied.read} records and accounts for {applied.accounted}.",
                    hint="this is a bug in the pipeline; the views may miss changes: cdc -p FILE verify",
                )
            self.total.add(applied)
            self.account.count(table, applied)
        self.batches += 1
        if outcome.rejected:
            self._quarantine.refresh()
        self._settle(outcome.cured)

    def _settle(self, cured: Mapping[Key, int]) -> None:
        if entries := self._quarantine.entries_cured_by(cured):
            self._quarantine.settle(
                [entry for entry in entries if entry not in (self._live_entries or ())]
            )
