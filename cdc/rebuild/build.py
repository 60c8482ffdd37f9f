"""Make views again from offset zero beside those that readers see, and show them once they are proven right.

In:  a sink, its tables, the topics. Out: another generation of the views, promoted; the one before, kept for a while.
Phases: replay (one pass over the log as it is now), catch up (the stream goes on from there), verify, promote. The same
command goes on where it was ended, in whatever way; until the switch readers see what they saw.
"""

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from uuid import uuid4

import structlog
from pyspark.sql import SparkSession
from tenacity import Retrying, retry_if_exception_type, stop_after_delay
from tenacity.wait import wait_exponential

from cdc.apply.batch_writer import BatchWriter
from cdc.apply.stream import Stream
from cdc.apply.views import Describe, Views
from cdc.config.settings import Pipeline
from cdc.control.registrations import Registration
from cdc.errors import CdcError, DivergenceError, SinkError, SinkUnavailable
from cdc.generations.claim import claim
from cdc.generations.registry import GenerationBuild, Progress, Registry, RetainedView
from cdc.generations.rollback import previous_generations, retain
from cdc.kafka.log_continuity import Continuity, Discontinued, refuse_foreign
from cdc.kafka.topics import Topics
from cdc.model.generation import new_generation
from cdc.model.position import Position, distance
from cdc.model.table import Table
from cdc.postgres.schema_changes import Definition
from cdc.sink.contract import GenerationReplaced, SchemaMismatch, Sink, positions
from cdc.spark.kafka_source import read_until

POLL_S = 0.1
LAG_S = 1.0
"""Caught up: what was in the topics is in the view after so long."""
TRY_S = 120.0
Verify = Callable[[Sink, Sequence[Table]], None]
"""Raises DivergenceError when the views of a sink differ from their source, UndecidedError when nobody knows."""
log = structlog.get_logger()


class Rebuild:
    """One rebuild. `show` is told of every step; `kept_s` is how long the generation before is kept current."""

    def __init__(
        self,
        spark: SparkSession,
        sink: Sink,
        pipeline: Pipeline,
        tables: Sequence[Table],
        describe: Describe,
        placeholder: str,
        kafka: Topics,
        *,
        kept_s: float,
        verify: Verify,
        show: Callable[[GenerationBuild], object],
    ) -> None:
        self._spark, self._sink, self._pipeline, self._tables = spark, sink, pipeline, tuple(tables)
        self._describe, self._placeholder, self._kafka = describe, placeholder, kafka
        self._kept_s, self._verify, self._show = kept_s, verify, show
        self._registry, self._saying = Registry(pipeline, kafka), threading.Lock()

    def run(self) -> dict[str, RetainedView]:
        """Do what is left to do; what was seen before and is retained, by table.

        Raises:
            SettingsError: another one is at work on this sink. Discontinued: a view is another pipeline's.
            DivergenceError: the new generation isn't what the source holds; it is gone, readers see what they saw.
            UndecidedError: it couldn't be proved; it stays, and the same command compares it again.
            CdcError: what the sink or the broker raises; the same command goes on.
        """
        self._refuse_foreign()
        with claim(self._registry, self._sink.name) as self._claim:
            self._build = self._begun()
            if self._build.phase == "promote" and self._promoted():
                return self._end(previous_generations(self._sink, self._tables))
            self._say()
            self._claim.forget_retained(list(self._build.names))
            self._sink.drop_unreferenced(self._tables, self._build.names)
            self._began = time.monotonic()
            self._claim.progress = self._progress
            return self._end(self._made())

    def _refuse_foreign(self) -> None:
        """Raises Discontinued where readers of another pipeline's view would see this one's instead."""
        ends = self._kafka.ends([table.topic for table in self._tables])
        standing = positions(self._sink, self._tables)
        for table in self._tables:
            refuse_foreign(self._kafka, self._sink.name, table, standing[table.qualified], ends[table.topic])

    def _begun(self) -> GenerationBuild:
        """The build to go on with, or a new one."""
        work = self._claim.generations.work
        if isinstance(work, GenerationBuild) and work.names.keys() == {table.qualified for table in self._tables}:
            return work
        self._sink.check_capacity(self._tables)
        name = new_generation()
        return GenerationBuild(
            self._sink.name, "replay", {table.qualified: name for table in self._tables}, time.time()
        )

    def _gap(self, beside: Sink) -> CdcError | None:
        """Why the build that was begun can't be gone on with, if so: the log is gone, or it is made otherwise now."""
        continuity = Continuity(self._pipeline, self._kafka).read([table.topic for table in self._tables])
        try:
            for table in self._tables:
                continuity.refuse(self._sink.name, table, beside.position(table))
                beside.prepare(table)
        except (Discontinued, SchemaMismatch) as error:
            return error
        return None

    def _made(self) -> Mapping[str, str]:
        """Replay, catch up, verify, promote; what readers saw until then, by table."""
        beside = self._sink.for_generation(self._build.names)
        if self._build.phase != "replay" and (gap := self._gap(beside)):
            log.warning("build_begun_again", sink=self._sink.name, error=gap.message)
            self._say(phase="replay", done=0)
        if self._build.phase == "replay":
            self._replay(beside)
            self._say(phase="catch up", done=self._build.total)
        with following(
            self._spark, beside, self._build.names, self._pipeline, self._narrowed, self._placeholder
        ) as stream:
            self._catch_up(beside, stream)
            self._say(phase="verify")
            self._verified(beside)
            self._say(phase="promote")
            return self._sink.promote(self._tables, self._build.names)

    def _replay(self, beside: Sink) -> None:
        """One pass from offset zero to where the topics end now: the newest of each key, written once."""
        for table in self._tables:
            beside.clear(table)
        views = Views(beside, self._pipeline, self._kafka, self._narrowed, self._placeholder)
        shapes = views.load().shapes
        ends = {topic: dict(enumerate(shape.offsets)) for topic, shape in shapes.items()}
        self._build = replace(self._build, total=sum(sum(shape.offsets) for shape in shapes.values()))
        batches = BatchWriter(self._spark, self._pipeline, self._kafka, views, uuid4().hex, _patiently, shadow=True)
        tasks = int(self._spark.conf.get("spark.sql.shuffle.partitions") or 1)
        batches.write(read_until(self._spark, self._pipeline.kafka, shapes).coalesce(tasks), ends)

    def _catch_up(self, beside: Sink, stream: Stream) -> None:
        """Wait until what the topics hold at a moment is in the view within a second, or no sooner than before."""
        took = float("inf")
        while True:
            previous_generations, asked = took, time.monotonic()
            there = _reached(self._kafka, beside, self._tables)
            while not there():
                if stream.progress.state == "failed":
                    raise SinkError(
                        f"The new generation of {self._sink.name} can't go on: {stream.progress.error}",
                        hint=stream.progress.hint or "readers see what they saw; the same command goes on",
                        sink=self._sink.name,
                    )
                time.sleep(POLL_S)
            took = time.monotonic() - asked
            if took < LAG_S or took > previous_generations / 2:
                return

    def _verified(self, beside: Sink) -> None:
        try:
            self._verify(beside, self._tables)
        except DivergenceError:
            self._end({})
            raise

    def _promoted(self) -> bool:
        """Whether readers see it already: the rebuild was killed after the switch."""
        try:
            found = {table.qualified: self._sink.position(table) for table in self._tables}
        except SchemaMismatch:
            # What readers see is what has to be replaced.
            return False
        return all(at and at.generation == self._build.names[name] for name, at in found.items())

    def _end(self, seen: Mapping[str, str]) -> dict[str, RetainedView]:
        return retain(self._claim, self._sink, self._tables, seen, self._kept_s)

    def _narrowed(
        self, history: Sequence[Definition], registration: Registration
    ) -> tuple[Sequence[Table], Mapping[str, list[str]]]:
        return narrowed(self._describe, self._build.names)(history, registration)

    def _say(self, **news: Any) -> None:
        with self._saying:
            self._build = replace(self._build, **news)
        self._claim.announce(self._build)
        self._show(self._build)

    def _progress(self) -> Progress:
        """How far it is; asked every second."""
        with self._saying:
            if self._build.phase == "replay":
                done = max(self._build.done, _records(self._spark, self._build.total))
                speed = round(done / (time.monotonic() - self._began), 1)
                self._build = replace(self._build, done=done, rows_per_s=speed)
            build = self._build
        self._show(build)
        return Progress(time.time(), build.done, build.total, build.rows_per_s)


def narrowed(describe: Describe, names: Collection[str]) -> Describe:
    """The same description, of these tables only."""

    def some(
        history: Sequence[Definition], registration: Registration
    ) -> tuple[Sequence[Table], Mapping[str, list[str]]]:
        tables, aside = describe(history, registration)
        mine = [table for table in tables if table.qualified in names]
        return mine, {name: told for name, told in aside.items() if name in names}

    return some


@contextmanager
def following(
    spark: SparkSession,
    sink: Sink,
    names: Mapping[str, str],
    pipeline: Pipeline,
    describe: Describe,
    placeholder: str,
) -> Iterator[Stream]:
    """Apply changes to a generation that readers don't see, in a thread. A failure ends it: positions tell."""
    stream = Stream(spark, sink, pipeline, describe, placeholder, names=names)

    def run() -> None:
        try:
            stream.run()
        except GenerationReplaced:
            # Whoever did that goes on from here.
            log.info("standby_replaced", sink=sink.name)
        except CdcError as error:
            log.warning("standby_dropped", sink=sink.name, error=error.message)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield stream
    finally:
        stream.stop()
        thread.join()


def _reached(kafka: Topics, sink: Sink, tables: Sequence[Table]) -> Callable[[], bool]:
    """Whether a sink has all that was in the topics when this was first asked."""
    ends: dict[str, Position] = {}

    def there() -> bool:
        if not ends:
            ends.update(kafka.ends([table.topic for table in tables]))
        at = positions(sink, tables)
        return all(distance(at[table.qualified], ends[table.topic]).reached for table in tables)

    return there


def _patiently() -> Retrying:
    return Retrying(
        retry=retry_if_exception_type(SinkUnavailable),
        wait=wait_exponential(multiplier=0.25, max=10),
        stop=stop_after_delay(TRY_S),
        reraise=True,
    )


def _records(spark: SparkSession, total: int) -> int:
    """How many records the running stages have read."""
    active: Any = spark._jsc.sc().statusStore().activeStages()
    return min(total, sum(int(active.apply(at).inputRecords()) for at in range(active.size())))
