"""Apply one micro-batch to one sink; if a record of it can't be, look closer and put that one into quarantine."""

import itertools
from collections.abc import Callable

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from tenacity import Retrying

from cdc import backlog
from cdc.change import Applied
from cdc.errors import CdcError, Fenced, SinkError
from cdc.explain import explain
from cdc.failures import Remedy, remedy
from cdc.order import LACKING
from cdc.quarantine import Quarantine, marked
from cdc.redrive import redrive
from cdc.settings import Pipeline
from cdc.sink import Batch, Key, Refused, Sink
from cdc.stand import Again, Stand
from cdc.step import Ends, Steps, large, make_batch, prepare
from cdc.topics import Topics


class Applier:
    """Takes the batches of one sink in turn. `total` counts records since the start, `batches` the batches."""

    def __init__(
        self,
        spark: SparkSession,
        sink: Sink,
        pipeline: Pipeline,
        kafka: Topics,
        stand: Stand,
        writer: str,
        insist: Callable[[], Retrying],
        *,
        shadow: bool = False,
    ) -> None:
        """A `shadow` is of views that readers don't see: what is asked of the sink's quarantine isn't for it."""
        self._sink, self._pipeline, self._kafka, self._stand = sink, pipeline, kafka, stand
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
            redrive(
                self._spark,
                self._pipeline.kafka,
                self._quarantine,
                self._stand,
                self._sink.form,
                self._writer,
                self._sink.apply,
            )
        if self._quarantine.open:
            self._stand.look(careful=True)

    def asked(self) -> bool:
        """Whether somebody has done something to the quarantine of a sink that has entries there."""
        return not self._shadow and bool(self._quarantine.open) and self._quarantine.moved()

    def apply(self, decoded: DataFrame, ends: Ends) -> None:
        """Make a batch durable in the sink.

        Raises:
            Again: the query has to be started again, with the other way of reading records, or from another place.
            CdcError: what the sink raises, and what a record causes when the pipeline says `on_error: stop`.
        """
        stand = self._stand
        steps = stand.steps(ends)
        if not any(steps):
            return
        careful = stand.reading.careful
        if careful and self._quarantine.moved():
            self._quarantine.refresh()
        try:
            if careful:
                self._carefully(steps, decoded)
            else:
                self._lightly(steps, decoded)
        except Fenced as error:
            if stand.switching():
                raise Again("switching") from error
            raise
        except (CdcError, PySparkException, Py4JJavaError) as error:
            failure = explain(error, self._sink.name)
            quarantined = remedy(failure) is Remedy.QUARANTINE and self._pipeline.on_error != "stop"
            if careful or not quarantined:
                raise failure from error
            stand.look(careful=True)
            raise Again("careful") from error
        if careful and not self._quarantine.open:
            stand.look(careful=False)
            raise Again("careful no more")

    def _lightly(self, steps: Steps, decoded: DataFrame) -> None:
        """Fold the plain way, from the first change that lacks a value on in full: where one is, more will come."""
        if self._plain:
            try:
                return self._send(steps, self._batch(steps, decoded, plain=True))
            except (PySparkException, Py4JJavaError) as error:
                if LACKING not in str(error):
                    raise
                self._plain = False
        return self._send(steps, self._batch(steps, decoded))

    def _carefully(self, steps: Steps, decoded: DataFrame) -> None:
        """Apply what can be, once the rest is safe in quarantine."""
        careful = decoded.persist()
        try:
            refused: dict[Key, str] = {}
            while True:
                records = marked(careful, refused)
                self._quarantine.put(records)
                tainted = self._quarantine.tainted(step.table for step in itertools.chain(*steps))
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

    def _batch(self, steps: Steps, decoded: DataFrame, *, plain: bool = False) -> Batch:
        every, reading = steps.seen or steps.kept, self._stand.reading
        prepare(decoded.sparkSession, every)
        if plain and not reading.floored and large(every):
            both = itertools.chain(*steps)
            parts = backlog.read(decoded.sparkSession, self._pipeline.kafka, self._writer, both, self.tasks)
            newest = backlog.newest(parts, self._stand.tables, reading)
            return Batch(self._writer, tuple(every), decoded, newest, plain)
        batch = make_batch(self._writer, self._sink.form, every, decoded, self.tasks, plain=plain)
        if "problem" not in decoded.columns:
            return batch
        return Batch(batch.writer, batch.advances, decoded.where(F.col("problem").isNull()), batch.changes)

    def _send(self, steps: Steps, batch: Batch) -> None:
        for attempt in self._insist():
            with attempt:
                applied = self._stand.kept.apply(batch, steps) if steps.kept else self._sink.apply(batch)
        for one in applied.values():
            if one.read != one.accounted:
                raise SinkError(
                    f"{self._sink.name} read {one.read} records and accounts for {one.accounted}.",
                    hint="this is a bug in the pipeline; the views may miss changes: cdc -p FILE verify",
                )
            self.total.add(one)
        self.batches += 1
        self._stand.advance(steps)
