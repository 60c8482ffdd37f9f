"""One sink's streaming query: read from where the sink stands, apply batch after batch, go on after a failure.

The sink's own position is the only one that counts. Spark's checkpoint is made new for every start and thrown away.
So starting again is cheap, and is the answer to everything that changes under a running query: a TRUNCATE, another
definition of a table, a record that calls for a closer look.
"""

import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from uuid import uuid4

import structlog
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from tenacity import RetryCallState, Retrying, retry_if_exception, sleep_using_event, stop_when_event_set
from tenacity.wait import wait_exponential

from cdc import decode, pace
from cdc.apply import Applier
from cdc.change import Progress, distance
from cdc.errors import CdcError
from cdc.explain import explain
from cdc.failures import Patience, Remedy, given_up, remedy
from cdc.log import consumer
from cdc.settings import Pipeline
from cdc.sink import Sink
from cdc.stand import Again, Describe, Stand
from cdc.step import Ends, planned_ends
from cdc.topics import Topics

STALE_S = 30.0
"""How long it holds that nothing was left: an idle query reports every ten seconds that it has looked."""
LOOK_S = 1.0
"""How often an idle stream looks at the control topics; a busy one does before every batch."""
RAM_DISK = "/dev/shm"  # noqa: S108 (mkdtemp makes a private folder in it)
"""Where a run's checkpoint goes if there is one: it need not outlive the run, and is written twice a batch."""
LIGHT = {
    "spark.sql.streaming.checkpointFileManagerClass": "org.apache.spark.sql.execution.streaming.checkpointing."
    "FileSystemBasedCheckpointFileManager",
    "fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem",
    "fs.file.impl.disable.cache": "true",
}
"""Session settings for sinks that keep nothing in files: checkpoints without checksum files, 60 ms less a batch."""
FIRST_S, MOST_S = 0.25, 10.0
"""The first pause after a failure, and the longest."""
BACKOFF = wait_exponential(multiplier=FIRST_S, max=MOST_S)
log = structlog.get_logger()


class Stream:
    """Applies all tables to one sink, in a thread of its own; `progress` may be read at any time.

    describe gives the tables as they are now; it is asked at every start. placeholder is the connector's own.
    """

    def __init__(
        self,
        spark: SparkSession,
        sink: Sink,
        pipeline: Pipeline,
        describe: Describe,
        placeholder: str,
        *,
        names: Mapping[str, str] | None = None,
    ) -> None:
        """`names`: of the generation that it applies to, by table, where that is one that readers don't see."""
        self.sink, self.progress = sink, Progress(sink.name)
        if sink.form == "documents":
            spark = spark.newSession()
            for name, value in LIGHT.items():
                spark.conf.set(name, value)
        self._spark, self._pipeline, self._shadow = spark, pipeline, names is not None
        self._kafka = Topics(pipeline.kafka)
        self._stand = Stand(sink, pipeline, self._kafka, describe, placeholder, names)
        self._writer = uuid4().hex
        self._applier = Applier(
            spark, sink, pipeline, self._kafka, self._stand, self._writer, self._insist, shadow=self._shadow
        )
        self._turn = threading.Lock()
        self._stopping = threading.Event()
        self._failure: Exception | None = None
        self._patience = Patience()
        self._query: StreamingQuery | None = None
        self._caught_up_at = self._looked_at = time.time()
        self._ends: Ends = {}
        self._planned: Ends = {}
        self._ends_at = 0.0
        self._window: list[tuple[float, int]] = []
        self._limit = 0

    def run(self, *, until_caught_up: bool = False) -> None:
        """Apply until stopped, or until everything that was in the topics at the start is applied.

        Raises:
            CdcError: what can't be mended by trying again.
        """
        try:
            for attempt in self._patiently(self._passes, self._pause):
                with attempt:
                    while self._run_query(until_caught_up):
                        log.info(
                            "query_restarted",
                            sink=self.sink.name,
                            reason=str(self._failure),
                            careful=self._stand.reading.careful,
                            limit=self._limit,
                        )
            if self._stopping.is_set():
                self.progress.state = "stopped"
            elif self._stand.refused:
                raise self._stand.refused[0]
            else:
                self.progress.lag_records, self.progress.lag_seconds = 0, 0.0
                self.progress.state = "caught up"
        except Exception as error:
            failure = explain(error, self.sink.name)
            if self._stopping.is_set() and remedy(failure) in (Remedy.RETRY, Remedy.RESTART):
                self.progress.state = "stopped"
                return
            failure = given_up(failure)
            self.progress.error, self.progress.hint, self.progress.state = failure.message, failure.hint, "failed"
            if failure is error:
                raise
            raise failure from error
        finally:
            with self._turn:
                self._kafka.close()

    def stop(self) -> None:
        """Finish the batch at hand, begin no other."""
        self._stopping.set()
        with self._turn:
            query = self._query
        # Not within the turn: Spark waits for a batch that may be waiting for it. That one will do nothing.
        if query is not None:
            query.stop()

    def measure(self) -> Progress:
        """Bring lag and rate up to date; lag_records is 0 only when nothing was left at the last look."""
        now, done = time.time(), self._applier.total
        self.progress.lag_records = waiting = self._remaining(now)
        if waiting == 0:
            self._caught_up_at = now
        self.progress.lag_seconds = None if waiting is None else now - self._caught_up_at
        self._window = [(t, rows) for t, rows in self._window if t > now - 5] + [(now, done.rows)]
        (first, before), (last, rows) = self._window[0], self._window[-1]
        self.progress.rows_per_s = (rows - before) / (last - first) if last > first else 0.0
        self.progress.applied, self.progress.batches = done, self._applier.batches
        self.progress.careful, self.progress.aside = self._stand.reading.careful, self._stand.aside
        if now - self._looked_at > LOOK_S and self._turn.acquire(blocking=False):
            try:
                outdated = self._outdated()
            finally:
                self._looked_at = time.time()
                self._turn.release()
            if outdated is not None:
                outdated.stop()
        return self.progress

    def _remaining(self, now: float) -> int | None:
        """Offsets left of what was seen last: there may be more by now, so that nothing left holds for a while only."""
        if self.progress.state == "caught up":
            # It has ended, with all that was there at its start.
            return 0
        latest, looked_at = _latest(self._query)
        if looked_at > self._ends_at:
            self._ends, self._ends_at = latest, looked_at
        offsets = max(self._behind(self._ends), self._behind(self._planned))
        return offsets if offsets or now - self._ends_at < STALE_S else None

    def _outdated(self) -> StreamingQuery | None:
        """Between batches: the query, when something new calls for another."""
        if self._query is None or self._failure or self._stopping.is_set():
            return None
        try:
            if self._stand.moved() or self._applier.asked():
                self._failure = Again("moved")
                return self._query
            if self.progress.state == "waiting":
                self.progress.state, self.progress.error, self.progress.hint = "running", None, None
        except CdcError as error:
            if self.progress.error != error.message:
                log.warning("control_topics_not_read", sink=self.sink.name, error=error.message)
            self.progress.state, self.progress.error, self.progress.hint = "waiting", error.message, error.hint
        except Exception as error:
            # Not for whoever measures, but for `run`: it ends the stream, and tells.
            self._failure = error
            return self._query
        return None

    def _run_query(self, until_caught_up: bool) -> bool:
        """Run the query to its end; whether it has to be started again."""
        self._failure = None
        with self._turn:
            self._stand.take()
            self._ends = {topic: dict(enumerate(end.offsets)) for topic, end in self._stand.shapes.items()}
            self._planned, self._ends_at = {}, time.time()
            self._applier.begin()
        memory = RAM_DISK if os.access(RAM_DISK, os.W_OK) else None
        folder = tempfile.mkdtemp(prefix=f"cdc-{self.sink.name}-", dir=memory)
        try:
            with self._turn:
                if self._stopping.is_set():
                    return False
                self._query = self._start(folder, until_caught_up)
                self.progress.state = "running"
            self._query.awaitTermination()
        except PySparkException as error:
            if not self._stopping.is_set() and self._failure is None:
                raise explain(error, self.sink.name) from error
        finally:
            self._query = None
            shutil.rmtree(folder, ignore_errors=True)
        if isinstance(self._failure, Again):
            return not self._stopping.is_set()
        if self._failure:
            raise self._failure
        return False

    def _start(self, folder: str, until_caught_up: bool) -> StreamingQuery:
        shapes = self._stand.shapes
        self._limit = self._limit or self._first()
        records = (
            self._spark.readStream.format("kafka")
            .options(**consumer(self._pipeline.kafka, self._writer))
            .option("assign", json.dumps({topic: list(range(s.partition_count)) for topic, s in shapes.items()}))
            .option("startingOffsets", json.dumps(self._stand.offsets()))
            .option("failOnDataLoss", "true")
            .option("maxOffsetsPerTrigger", self._limit)
            .load()
        )
        # A pool each, so that a long warehouse job doesn't hold up the cache.
        self._spark.sparkContext.setLocalProperty("spark.scheduler.pool", self.sink.name)
        # As many tasks as fold: what decodes is prepared anew for each, which took most of a batch of many partitions.
        few = records.coalesce(self._applier.tasks)
        # Decoded in the stream's own plan, which Spark analyses once; a batch then adds only its fold.
        decoded = decode.decoded(few, self._stand.tables, self.sink.form, self._stand.reading)
        writer = decoded.writeStream.option("checkpointLocation", folder)
        if until_caught_up:
            writer = writer.trigger(availableNow=True)
        else:
            trigger_s = self._pipeline.sinks[self.sink.name].trigger_s
            writer = writer.trigger(processingTime=f"{int(trigger_s * 1000)} milliseconds")
        return writer.foreachBatch(lambda frame, number: self._apply(frame, folder, number)).start()

    def _apply(self, decoded: DataFrame, folder: str, number: int) -> None:
        with self._turn:
            if self._stopping.is_set() or self._failure:
                return
            try:
                ends = planned_ends(folder, number)
                # After the end of the batch is known: so it misses nothing that the batch could depend on.
                if self._stand.moved() or (not self._shadow and self._stand.outrun()):
                    raise Again("moved")
                offsets, began, self._planned = self._behind(ends), time.monotonic(), ends
                self._applier.apply(decoded, ends)
                self._pace(offsets, time.monotonic() - began)
            except (PySparkException, Py4JJavaError) as error:
                self._failure = explain(error, self.sink.name)
                raise
            except Exception as error:
                self._failure = error
                raise
            self.progress.state, self.progress.error, self.progress.hint = "running", None, None

    def _behind(self, ends: Ends) -> int:
        """How many offsets lie between here and there."""
        return sum(self._stand.behind(topic, end) for topic, end in ends.items())

    def _first(self) -> int:
        """A limit before it is known how long a batch takes: by how wide the records are."""
        ends = self._stand.shapes
        starts = self._kafka.starts(list(ends))
        held = sum(distance(start, ends[topic]).offsets for topic, start in starts.items())
        return pace.first(held, self._kafka.kept_bytes(list(ends)))

    def _pace(self, offsets: int, took_s: float) -> None:
        """After a full batch, begin again where another limit suits what is left; not by one that had to wait."""
        if offsets < self._limit / 2 or self.progress.state == "waiting":
            return
        ends = self._kafka.ends(list(self._stand.shapes))
        left = self._behind({topic: dict(enumerate(end.offsets)) for topic, end in ends.items()})
        limit = pace.fitting(self._limit, offsets, took_s, left)
        if limit != self._limit:
            self._limit = limit
            raise Again("limit")

    def _insist(self) -> Retrying:
        """Try a step again after a pause, until told to stop.

        Not when the log may have lost meanwhile what the views need: that is looked at where a query starts.
        """
        trying = self._patiently(lambda error: remedy(error) is Remedy.RETRY, BACKOFF)
        return trying.copy(stop=trying.stop | (lambda _: time.time() > self._stand.sure_until))  # type: ignore[operator]

    def _passes(self, error: BaseException) -> bool:
        """Whether the query may be started again after a failure."""
        reached = tuple(position.offsets if position else None for _, position in sorted(self._stand.at.items()))
        return self._patience.meet(error, reached)

    def _pause(self, _: RetryCallState) -> float:
        """Longer with each failure of the same kind, as long as nothing goes on in between."""
        return min(MOST_S, FIRST_S * 2.0 ** (self._patience.count - 1))

    def _patiently(self, passes: Callable[[BaseException], bool], pause: Callable[[RetryCallState], float]) -> Retrying:
        return Retrying(
            retry=retry_if_exception(passes),
            wait=pause,
            sleep=sleep_using_event(self._stopping),
            stop=stop_when_event_set(self._stopping),
            before_sleep=self._wait,
            reraise=True,
        )

    def _wait(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        if isinstance(error, CdcError):
            self.progress.error, self.progress.hint, self.progress.state = error.message, error.hint, "waiting"
            log.warning("sink_waiting", sink=self.sink.name, error=error.message, attempt=state.attempt_number)


def _latest(query: StreamingQuery | None) -> tuple[dict[str, dict[int, int]], float]:
    """Where the topics end as the query saw it last, and when that was, in Unix seconds; 0 when it hasn't looked."""
    progress = query.lastProgress if query else None
    latest = progress["sources"][0]["latestOffset"] if progress and progress["sources"] else None
    if not progress or not latest:
        return {}, 0.0
    parsed = json.loads(latest) if isinstance(latest, str) else latest
    ends = {topic: {int(p): offset for p, offset in offsets.items()} for topic, offsets in parsed.items()}
    return ends, datetime.fromisoformat(progress["timestamp"]).timestamp()
