"""One sink's streaming query: read from where the sink stands, apply batch after batch, go on after a failure.

The sink's own position is the only one that counts. Spark's checkpoint is made new for every start and thrown away.
"""

import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from uuid import uuid4

import structlog
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from tenacity import RetryCallState, Retrying, retry_if_exception, sleep_using_event, stop_when_event_set
from tenacity.wait import wait_exponential

from cdc import decode, order
from cdc.change import Advance, Form, Position, Progress, Table
from cdc.continuity import refuse_gap
from cdc.errors import CdcError, SinkUnavailable
from cdc.explain import explain
from cdc.sink import Batch, Rewound, Sink
from cdc.topics import Topics

BATCH_OFFSETS = 100_000
FETCH_WAIT_MS = 10
"""How long the broker may hold an empty answer: paid for each partition whose last offsets are markers."""
RAM_DISK = "/dev/shm"  # noqa: S108 (mkdtemp makes a private folder in it)
"""Where a run's checkpoint goes if there is one: it need not outlive the run, and is written twice a batch."""
LIGHT = {
    "spark.sql.streaming.checkpointFileManagerClass": "org.apache.spark.sql.execution.streaming.checkpointing."
    "FileSystemBasedCheckpointFileManager",
    "fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem",
    "fs.file.impl.disable.cache": "true",
}
"""Session settings for sinks that keep nothing in files: checkpoints without checksum files, 60 ms less a batch."""
BACKOFF = wait_exponential(multiplier=0.25, max=10)
log = structlog.get_logger()


class Stream:
    """Applies all tables to one sink, in a thread of its own; `progress` may be read at any time."""

    def __init__(
        self,
        spark: SparkSession,
        sink: Sink,
        tables: Sequence[Table],
        kafka: str,
        trigger_s: float = 0.0,
    ) -> None:
        self.sink, self.progress = sink, Progress(sink.name)
        if sink.form == "documents":
            spark = spark.newSession()
            for name, value in LIGHT.items():
                spark.conf.set(name, value)
        self._spark, self._tables, self._kafka, self._trigger_s = spark, tuple(tables), kafka, trigger_s
        self._writer = uuid4().hex
        self._at: dict[str, Position | None] = {}
        self._turn = threading.Lock()
        self._stopping = threading.Event()
        self._failure: Exception | None = None
        self._query: StreamingQuery | None = None
        self._caught_up_at = time.time()
        self._window: list[tuple[float, int]] = []

    def run(self, *, until_caught_up: bool = False) -> None:
        """Apply until stopped, or until everything that was in the topics at the start is applied.

        Raises:
            CdcError: what can't be mended by trying again.
        """
        try:
            for attempt in self._patiently(_passing):
                with attempt:
                    self._run_query(until_caught_up)
            self.progress.state = "stopped" if self._stopping.is_set() else "caught up"
        except CdcError as error:
            if self._stopping.is_set() and _passing(error):
                self.progress.state = "stopped"
                return
            self.progress.state, self.progress.error, self.progress.hint = "failed", error.message, error.hint
            raise

    def stop(self) -> None:
        """Finish the batch at hand, begin no other."""
        self._stopping.set()
        with self._turn:
            if self._query is not None:
                self._query.stop()

    def measure(self) -> Progress:
        """Bring lag and rate up to date; lag_records is 0 only when nothing was left at the last look."""
        latest = _latest(self._query)
        behind = 0
        for table in self._tables:
            at, end = self._at.get(table.topic), latest.get(table.topic)
            if end:
                behind += sum(max(0, offset - (at.offsets[p] if at else 0)) for p, offset in end.items())
        now = time.time()
        if not behind:
            self._caught_up_at = now
        self._window = [(t, rows) for t, rows in self._window if t > now - 5] + [(now, self.progress.rows)]
        (first, before), (last, rows) = self._window[0], self._window[-1]
        self.progress.rows_per_s = (rows - before) / (last - first) if last > first else 0.0
        self.progress.lag_records = behind
        self.progress.lag_seconds = now - self._caught_up_at
        return self.progress

    def _run_query(self, until_caught_up: bool) -> None:
        self._failure = None
        self._resume()
        memory = RAM_DISK if os.access(RAM_DISK, os.W_OK) else None
        folder = tempfile.mkdtemp(prefix=f"cdc-{self.sink.name}-", dir=memory)
        try:
            with self._turn:
                if self._stopping.is_set():
                    return
                self._query = self._start(folder, until_caught_up)
                self.progress.state = "running"
            self._query.awaitTermination()
        except PySparkException as error:
            if not self._stopping.is_set():
                raise self._failure or explain(error, self.sink.name) from error
        finally:
            self._query = None
            shutil.rmtree(folder, ignore_errors=True)
        if self._failure:
            raise self._failure

    def _resume(self) -> None:
        """Ask the sink where it stands, and make sure that the log still reaches back to there."""
        for table in self._tables:
            self.sink.prepare(table)
        topics = [table.topic for table in self._tables]
        with Topics(self._kafka) as kafka:
            starts, ends = kafka.starts(topics), kafka.ends(topics)
        for table in self._tables:
            stored = self.sink.position(table)
            at = stored.position if stored else None
            refuse_gap(self.sink.name, table, at, starts[table.topic], ends[table.topic])
            self._at[table.topic] = at
        self._ids = {topic: end.topic_id for topic, end in ends.items()}
        self._counts = {topic: end.partition_count for topic, end in ends.items()}

    def _start(self, folder: str, until_caught_up: bool) -> StreamingQuery:
        offsets = {}
        for topic, at in self._at.items():
            known = at.offsets if at else (0,) * self._counts[topic]
            offsets[topic] = {str(partition): offset for partition, offset in enumerate(known)}
        records = (
            self._spark.readStream.format("kafka")
            .option("kafka.bootstrap.servers", self._kafka)
            .option("assign", json.dumps({topic: list(range(n)) for topic, n in self._counts.items()}))
            .option("startingOffsets", json.dumps(offsets))
            .option("kafka.isolation.level", "read_committed")
            .option("kafka.fetch.max.wait.ms", FETCH_WAIT_MS)
            .option("failOnDataLoss", "true")
            .option("maxOffsetsPerTrigger", BATCH_OFFSETS)
            .load()
        )
        # A pool each, so that a long warehouse job doesn't hold up the cache.
        self._spark.sparkContext.setLocalProperty("spark.scheduler.pool", self.sink.name)
        # Decoded in the stream's own plan, which Spark analyses once; a batch then adds only its fold.
        decoded = decode.decoded(records, self._tables, self.sink.form)
        writer = decoded.writeStream.queryName(self.sink.name).option("checkpointLocation", folder)
        if until_caught_up:
            writer = writer.trigger(availableNow=True)
        else:
            writer = writer.trigger(processingTime=f"{int(self._trigger_s * 1000)} milliseconds")
        return writer.foreachBatch(lambda frame, number: self._apply(frame, planned_ends(folder, number))).start()

    def _apply(self, decoded: DataFrame, ends: Mapping[str, Mapping[int, int]]) -> None:
        with self._turn:
            if self._stopping.is_set() or self._failure:
                return
            try:
                self._apply_batch(self._batch(decoded, ends))
            except (PySparkException, Py4JJavaError) as error:
                self._failure = explain(error, self.sink.name)
                raise
            except Exception as error:
                self._failure = error
                raise

    def _apply_batch(self, batch: Batch) -> None:
        if not batch.advances:
            return
        for attempt in self._patiently(lambda error: _passing(error) and not isinstance(error, Rewound)):
            with attempt:
                applied = self.sink.apply(batch)
        for advance in batch.advances:
            self._at[advance.table.topic] = advance.until
        self.progress.rows += sum(one.rows for one in applied.values())
        self.progress.batches += 1
        self.progress.state, self.progress.error, self.progress.hint = "running", None, None

    def _batch(self, decoded: DataFrame, ends: Mapping[str, Mapping[int, int]]) -> Batch:
        advances = []
        for table in self._tables:
            at, end = self._at[table.topic], ends.get(table.topic)
            if end is None:
                continue
            offsets = tuple(end[partition] for partition in range(self._counts[table.topic]))
            until = Position(self._ids[table.topic], offsets)
            if until.offsets != (at.offsets if at else (0,) * until.partition_count):
                advances.append(Advance(table, at, until))
        tasks = int(self._spark.conf.get("spark.sql.shuffle.partitions") or 1)
        return make_batch(self._writer, self.sink.form, advances, decoded, tasks)

    def _patiently(self, passing: Callable[[BaseException], bool]) -> Retrying:
        """Try again after a pause what may pass by itself, until told to stop."""
        return Retrying(
            retry=retry_if_exception(passing),
            wait=BACKOFF,
            sleep=sleep_using_event(self._stopping),
            stop=stop_when_event_set(self._stopping),
            before_sleep=self._wait,
            reraise=True,
        )

    def _wait(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        if isinstance(error, CdcError):
            self.progress.state, self.progress.error, self.progress.hint = (
                "waiting",
                error.message,
                error.hint,
            )
            log.warning("sink waits", sink=self.sink.name, error=error.message, attempt=state.attempt_number)


def make_batch(writer: str, form: Form, advances: Sequence[Advance], decoded: DataFrame, tasks: int) -> Batch:
    """The records of a step, decoded in a sink's form, with their fold; lazy."""
    folded = order.fold(decoded, form, sum(advance.offsets for advance in advances), tasks)
    return Batch(writer, tuple(advances), decoded, folded)


def planned_ends(folder: str, batch_id: int) -> dict[str, dict[int, int]]:
    """Where a micro-batch ends, per topic and partition: the offsets that Spark planned it with.

    Read from the query's offset log, whose last line holds the (only) source's end offsets. The records can't tell:
    transaction markers and compaction leave offsets without a record.
    """
    *_, last = Path(folder, "offsets", str(batch_id)).read_text(encoding="utf-8").splitlines()
    return {topic: {int(p): offset for p, offset in offsets.items()} for topic, offsets in json.loads(last).items()}


def _passing(error: BaseException) -> bool:
    return isinstance(error, SinkUnavailable)


def _latest(query: StreamingQuery | None) -> dict[str, dict[int, int]]:
    """Where the topics end as the query saw it last."""
    progress = query.lastProgress if query else None
    if not progress or not progress["sources"]:
        return {}
    latest = progress["sources"][0]["latestOffset"]
    parsed = json.loads(latest) if isinstance(latest, str) else latest or {}
    return {topic: {int(p): offset for p, offset in offsets.items()} for topic, offsets in parsed.items()}
