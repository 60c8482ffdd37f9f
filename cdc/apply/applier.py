"""Apply one micro-batch to one sink; if a record of it can't be, look closer and put that one into quarantine."""

from collections.abc import Callable, Sequence

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from tenacity import Retrying

from cdc import backlog
from cdc.apply.batch import large, make_batch, prepare
from cdc.apply.machine import Continue, Reason, Restart
from cdc.apply.plan import Ends
from cdc.apply.views import Views
from cdc.change import Advance, Applied
from cdc.errors import CdcError, SinkError
from cdc.explain import explain
from cdc.failures import Remedy, remedy
from cdc.order import LACKING
from cdc.quarantine import Quarantine, marked
from cdc.redrive import redrive
from cdc.settings import Pipeline
from cdc.sink import Batch, Key, Refused, Sink
from cdc.topics import Topics


class Applier:
    """Takes the batches of one sink in turn. `total` counts records since the start, `batches` the batches."""

    def __init__(
        self,
        spark: SparkSession,
        sink: Sink,
        pipeline: Pipeline,
        kafka: Topics,
        views: Views,
        writer: str,
        insist: Callable[[], Retrying],
        *,
        shadow: bool = False,
    ) -> None:
        """A `shadow` is of views that readers don't see: what is asked of the sink's quarantine isn't for it."""
        self._sink, self._pipeline, self._kafka, self._views = sink, pipeline, kafka, views
        self._writer, self._insist = writer, insist
        self.tasks = int(spark.conf.get("spark.sql.shuffle.partitions") or 1)
        self._quarantine = Quarantine(spark, sink.name, pipeline, kafka)
        self._spark, self._shadow = spark, shadow
        self._plain = sink.form == "documents"
        self.total, self.batches = Applied(), 0

    def begin(self) -> None:
        """Before the first batch after a start: look at the quarantine, and try again what somebody asked for.

        Raises:
            CdcError: what the sink raises.
        """
        self._quarantine.refresh()
        if self._quarantine.requests and not self._shadow:
            redrive(self._spark, self._pipeline.kafka, self._quarantine, self._views, self._sink.form, self._writer)
        if self._quarantine.open:
            self._views.look(careful=True)

    def asked(self) -> bool:
        """Whether somebody has done something to the quarantine of a sink that has entries there."""
        return not self._shadow and bool(self._quarantine.open) and self._quarantine.moved()

    def apply(self, decoded: DataFrame, ends: Ends) -> Continue | Restart:
        """Make a batch durable in the sink; Restart: it isn't, or the next one is to be read in the other way.

        Raises:
            CdcError: what the sink raises, and what a record causes when the pipeline says `on_error: stop`.
        """
        views = self._views
        steps = views.steps(ends)
        if not steps:
            return Continue()
        careful = views.reading.careful
        if careful and self._quarantine.moved():
            self._quarantine.refresh()
        try:
            if careful:
                self._carefully(steps, decoded)
            else:
                self._lightly(steps, decoded)
        except (CdcError, PySparkException, Py4JJavaError) as error:
            failure = explain(error, self._sink.name)
            quarantined = remedy(failure) is Remedy.QUARANTINE and self._pipeline.on_error != "stop"
            if careful or not quarantined:
                raise failure from error
            views.look(careful=True)
            return Restart(Reason.QUARANTINE)
        if careful and not self._quarantine.open:
            views.look(careful=False)
            return Restart(Reason.QUARANTINE)
        return Continue()

    def _lightly(self, steps: Sequence[Advance], decoded: DataFrame) -> None:
        """Fold the plain way, from the first change that lacks a value on in full: where one is, more will come."""
        if self._plain:
            try:
                return self._send(steps, self._batch(steps, decoded, plain=True))
            except (PySparkException, Py4JJavaError) as error:
                if LACKING not in str(error):
                    raise
                self._plain = False
        return self._send(steps, self._batch(steps, decoded))

    def _carefully(self, steps: Sequence[Advance], decoded: DataFrame) -> None:
        """Apply what can be, once the rest is safe in quarantine."""
        careful = decoded.persist()
        try:
            refused: dict[Key, str] = {}
            while True:
                records = marked(careful, refused)
                self._quarantine.put(records)
                tainted = self._quarantine.tainted(step.table for step in steps)
                whole = records.unionByName(tainted, allowMissingColumns=True) if tainted is not None else records
                batch = self._batch(steps, whole)
                try:
                    self._send(steps, batch)
                    break
                except Refused as error:
                    if error.rows.keys() <= refused.keys():
                        raise
                    refused |= error.rows
            if not self._shadow:
                self._quarantine.settle(self._quarantine.cured(batch.changes))
            self._quarantine.refresh()
        finally:
            careful.unpersist()

    def _batch(self, steps: Sequence[Advance], decoded: DataFrame, *, plain: bool = False) -> Batch:
        reading = self._views.reading
        prepare(decoded.sparkSession, steps)
        if plain and not reading.floored and large(steps):
            parts = backlog.read(decoded.sparkSession, self._pipeline.kafka, self._writer, steps, self.tasks)
            newest = backlog.newest(parts, self._views.plan.tables, reading)
            return Batch(self._writer, tuple(steps), decoded, newest, plain)
        batch = make_batch(self._writer, self._sink.form, steps, decoded, self.tasks, plain=plain)
        if "problem" not in decoded.columns:
            return batch
        return Batch(batch.writer, batch.advances, decoded.where(F.col("problem").isNull()), batch.changes)

    def _send(self, steps: Sequence[Advance], batch: Batch) -> None:
        for attempt in self._insist():
            with attempt:
                applied = self._sink.apply(batch)
        for one in applied.values():
            if one.read != one.accounted:
                raise SinkError(
                    f"{self._sink.name} read {one.read} records and accounts for {one.accounted}.",
                    hint="this is a bug in the pipeline; the views may miss changes: cdc -p FILE verify",
                )
            self.total.add(one)
        self.batches += 1
        self._views.advance(steps)
