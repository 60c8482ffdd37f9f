"""Compaction on demand: make the broker compact topics now, and wait for it.

For a maintenance window, and for tests.

The broker compacts what is not in a partition's active segment, and begins another segment only
with an append. So `segment.ms` is lowered and a transaction is aborted in every partition. It has
no committed record, so that no read_committed reader (the pipeline, its sinks) sees anything of it,
and compaction removes its remains.

**No record is removed that a view still needs.** The new segment is held open, so that everything
that can be compacted lies below the ends of that moment. Then `compact` waits for the views. Only
then the broker is allowed to clean, and before the next segment begins it is forbidden again. A
command that is killed in between leaves the topics so: later records are not touched.

The original settings are first written to the ledger; after a crash the next command restores them
from there. Settings that an operator changes meanwhile, and that aren't lowered here, stay.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

from cdc.config.settings import Pipeline
from cdc.errors import ConnectorError
from cdc.generations.registry import GenerationBuild, Generations, Registry
from cdc.kafka.ledger import Compaction, Ledger
from cdc.kafka.log_continuity import pending_records, refuse_incomparable
from cdc.kafka.records import TIMEOUT_MS, kafka, translated_errors
from cdc.kafka.topics import Topics
from cdc.model.position import Position, ViewCheckpoint, distance
from cdc.model.table import Table
from cdc.sink.contract import Sink

if TYPE_CHECKING:
    from cdc.spark.kafka_source import PartitionCensus

SEGMENT_MS = 1000
PAUSED = {"min.cleanable.dirty.ratio": "1.0", "segment.jitter.ms": "0"}
"""No cleaning: at a topic's original settings the broker would give tombstones the time that these
say."""
ROLLING = {**PAUSED, "segment.ms": str(SEGMENT_MS)}
"""Cleaning is off, and the next append begins another segment."""
OPEN_SEGMENT = {**PAUSED, "segment.ms": str(365 * 24 * 3_600_000)}
"""Cleaning is off, and no segment begins unless one is full."""
CLEANING = {**OPEN_SEGMENT, "min.cleanable.dirty.ratio": "0.0", "min.compaction.lag.ms": "0"}
"""The broker cleans everything below the open segment."""
RETENTION_MS = 1000
TOMBSTONES = {"delete.retention.ms": str(RETENTION_MS)}
TRANSACTION_MS = 10_000
"""Bounds the wait of readers for an open transaction after a crash: the broker aborts it then."""
HEARTBEAT_S = 1.0
Count = Callable[[Mapping[str, Position]], "Mapping[str, Sequence[PartitionCensus]]"]
"""Counts the records of each partition below positions, by topic (`kafka_source.census`)."""
View = tuple[str, Table, Callable[[Table], ViewCheckpoint | None]]
"""Its name in messages, its table, and the function that reads its checkpoint."""


@dataclass(frozen=True)
class CompactionResult:
    """The result for one topic: records before and after, their keys, remaining tombstones."""

    topic: str
    before: int
    records: int
    keys: int
    tombstones: int


@dataclass(frozen=True)
class CompactionOptions:
    """Options of a compaction.

    timeout_s    seconds after which it fails
    tombstones   remove tombstones as well, once every view has applied them
    progress     called in the thread of `compact` with sentences about waits and unfinished topics
    """

    timeout_s: float
    tombstones: bool = False
    progress: Callable[[str], None] = lambda _: None


def compact(
    kafka: Topics,
    pipeline: Pipeline,
    tables: Sequence[Table],
    sinks: Sequence[Sink],
    count: Count,
    options: CompactionOptions,
) -> list[CompactionResult]:
    """Compact the topics of tables, until each key that they hold now has one record.

    A superseded record is removed once every log of changes has it. A tombstone that an earlier
    compaction has met keeps the retention that it was given then.

    Raises:
        ConnectorError: not in time, or another compaction is at work. Settings are restored.
    """
    _refuse_concurrent(kafka, pipeline)
    restore(kafka, pipeline)
    kafka.check(pipeline)
    topics = [table.topic for table in tables]
    goal = kafka.ends(topics)
    before, deadline = count(goal), time.monotonic() + options.timeout_s
    registry, tombstones = Registry(pipeline, kafka), options.tombstones
    with (
        _LoweredSettings(kafka, pipeline, topics, tombstones=tombstones) as lowered,
        _SegmentRoller(kafka, pipeline) as roller,
    ):
        while True:
            ends = lowered.roll(roller, goal)
            views = required_views(tables, sinks, registry.read().for_sink, tombstones=tombstones)
            _await_views(kafka, views, ends, deadline, options.progress)
            lowered.clean(ends)
            counts = _count_after_cleaning(count, goal)
            unfinished = _unfinished_topics(counts, tombstones=tombstones)
            if not unfinished:
                break
            options.progress(_in_words(unfinished))
            if time.monotonic() > deadline:
                raise _timeout_error(unfinished, options.timeout_s)
    return [_result(topic, before[topic], counts[topic]) for topic in topics]


def restore(kafka: Topics, pipeline: Pipeline) -> list[str]:
    """Restore the settings of topics that an interrupted compaction has lowered.

    Returns the topics' names.
    """
    ledger = Ledger(pipeline, kafka).read()
    return _restore_settings(kafka, ledger) if ledger.is_interrupted() else []


def required_views(
    tables: Sequence[Table], sinks: Sequence[Sink], generations: Callable[[str], Generations], *, tombstones: bool
) -> list[View]:
    """Return the views that must have applied a record before it may be removed.

    Without `tombstones` these are the logs of changes. With them all views, including standbys and
    builds at work; a build that no command works on begins again when it has missed a tombstone.
    """
    if not tombstones:
        return [(sink.name, table, sink.position) for sink in sinks if sink.row_format == "events" for table in tables]
    views: list[View] = [(sink.name, table, sink.position) for sink in sinks for table in tables]
    for sink in sinks:
        for names, state in _standby_generations(generations(sink.name)):
            generation_sink = sink.for_generation(names)
            label = f"the generation of {sink.name} that is {state}"
            views += [(label, table, generation_sink.position) for table in tables if table.qualified in names]
    return views


def _standby_generations(generations: Generations) -> Iterator[tuple[Mapping[str, str], str]]:
    """Yield the generations beside the live views that a process keeps current.

    Each comes as its names by table, and its state in words.
    """
    if standby := generations.standby_names:
        yield standby, "kept"
    if isinstance(generations.work, GenerationBuild) and generations.in_progress:
        yield generations.work.names, "being built"


@contextmanager
def restored_on_sigterm() -> Iterator[None]:
    """Turn SIGTERM into an exception, so that settings are restored; ignore a second SIGTERM."""

    def exit_on_signal(number: int, _: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise SystemExit(128 + number)

    previous_handler = signal.signal(signal.SIGTERM, exit_on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous_handler)


def _refuse_concurrent(kafka: Topics, pipeline: Pipeline) -> None:
    ledger = Ledger(pipeline, kafka).read()
    if ledger.lowered and not ledger.is_interrupted():
        raise ConnectorError("Another `cdc topics compact` of this pipeline is at work.", hint="wait for it to end")


def _restore_settings(kafka: Topics, ledger: Ledger) -> list[str]:
    existing, now = kafka.existing(ledger.lowered), time.time()
    kafka.override({topic: _owned_settings(ledger.lowered[topic]) for topic in existing})
    for compactions, tombstones in ((ledger.compacted, False), (ledger.tombstones_removed, True)):
        unfinished = {topic: compactions[topic] for topic in compactions if topic in ledger.lowered}
        finished = {topic: replace(entry, ended=now) for topic, entry in unfinished.items() if not entry.ended}
        ledger.add_compactions(finished, tombstones=tombstones)
    ledger.forget_lowered(ledger.lowered)
    return sorted(existing)


def _owned_settings(settings: Mapping[str, str]) -> dict[str, str | None]:
    return {name: settings.get(name) for name in (*CLEANING, *TOMBSTONES)}


class _LoweredSettings:
    """Settings of topics, lowered step by step, restored at the end.

    Writes a heartbeat to the ledger every second.
    """

    def __init__(self, kafka: Topics, pipeline: Pipeline, topics: Sequence[str], *, tombstones: bool) -> None:
        self._kafka, self._topics, self._tombstones = kafka, topics, tombstones
        self._ledger = Ledger(pipeline, kafka)
        self._original = kafka.overrides(topics)
        self._stopped = threading.Event()
        self._heartbeat_thread = threading.Thread(target=self._write_heartbeats, daemon=True)

    def __enter__(self) -> "_LoweredSettings":
        self._ledger.add_lowered(self._original)
        self._ledger.write_heartbeat(at_work=True)
        self._heartbeat_thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            _restore_settings(self._kafka, self._ledger.read())
        finally:
            self._stopped.set()
            self._heartbeat_thread.join()
            self._ledger.write_heartbeat(at_work=False)

    def roll(self, roller: "_SegmentRoller", places: Mapping[str, Position]) -> dict[str, Position]:
        """Begin a segment and hold it open, with cleaning off.

        Returns ends above everything that can be cleaned.
        """
        self._kafka.override({topic: {**_owned_settings(self._original[topic]), **ROLLING} for topic in self._topics})
        roller.roll(places)
        self._kafka.override(dict.fromkeys(self._topics, OPEN_SEGMENT))
        return self._kafka.ends(self._topics, decided=False)

    def clean(self, ends: Mapping[str, Position]) -> None:
        """Let the broker clean what lies below the ends, and write that to the ledger first."""
        now = time.time()
        compactions = {topic: Compaction(end, now) for topic, end in ends.items()}
        self._ledger.add_compactions(compactions, tombstones=self._tombstones)
        settings = {**CLEANING, **(TOMBSTONES if self._tombstones else {})}
        self._kafka.override(dict.fromkeys(self._topics, settings))

    def _write_heartbeats(self) -> None:
        while not self._stopped.wait(HEARTBEAT_S):
            # A heartbeat may fail: another command that takes this one for dead only restores the
            # settings.
            with suppress(ConnectorError):
                self._ledger.write_heartbeat(at_work=True)


class _SegmentRoller:
    """Appends to partitions with aborted transactions.

    A second roller of the pipeline fences the first one.
    """

    def __init__(self, topics: Topics, pipeline: Pipeline) -> None:
        self._bootstrap = topics.bootstrap
        with translated_errors(self._bootstrap):
            self._producer = kafka.KafkaProducer(
                bootstrap_servers=self._bootstrap,
                transactional_id=f"{pipeline.pipeline}-compaction",
                transaction_timeout_ms=TRANSACTION_MS,
            )
            self._producer.init_transactions()

    def __enter__(self) -> "_SegmentRoller":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._producer.close()

    def roll(self, places: Mapping[str, Position]) -> None:
        """Append to every partition of these topics, and abort. Raises ConnectorError."""
        try:
            with translated_errors(self._bootstrap):
                self._producer.begin_transaction()
                futures = [
                    self._producer.send(topic, key=b"null", value=None, partition=partition)
                    for topic, end in places.items()
                    for partition in range(end.partition_count)
                ]
                for future in futures:
                    future.get(timeout=TIMEOUT_MS / 1000)
                self._producer.abort_transaction()
        except ConnectorError as error:
            if isinstance(error.__cause__, kafka.errors.ProducerFencedError | kafka.errors.InvalidProducerEpochError):
                raise ConnectorError(
                    "Another `cdc topics compact` of this pipeline has begun; this one stops.",
                    hint="wait for the other to end",
                ) from error
            raise


def _lagging_views(kafka: Topics, views: Sequence[View], ends: Mapping[str, Position]) -> list[str]:
    """Name the views that lack a record below the ends.

    Raises Discontinued for one that never gets there.
    """
    committed_ends = kafka.ends(list(ends)) if views else {}
    if open_topics := [topic for topic, end in committed_ends.items() if not distance(end, ends[topic]).reached]:
        return [f"a transaction in {topic} is open" for topic in open_topics]
    unread = []
    for name, table, position in views:
        checkpoint = position(table)
        refuse_incomparable(name, table, distance(checkpoint, ends[table.topic]))
        unread.append((name, table, pending_records(table.topic, checkpoint, ends[table.topic])))
    # Aborted records and transaction markers need not be applied: look for the next committed
    # record instead.
    next_records = kafka.next_records({place for _, _, places in unread for place in places}, decided=True)
    return [
        f"{table.qualified} in {name} has not caught up"
        for name, table, places in unread
        if any((record := next_records[place]) and record[0] < ends[place[0]].offsets[place[1]] for place in places)
    ]


def _await_views(
    kafka: Topics,
    views: Sequence[View],
    ends: Mapping[str, Position],
    deadline: float,
    progress: Callable[[str], None],
) -> None:
    while lagging := _lagging_views(kafka, views, ends):
        progress(lagging[0])
        if time.monotonic() > deadline:
            raise ConnectorError(
                f"No record may go before every view that needs it has seen it: {lagging[0]}.",
                hint="let `cdc run` catch up; cdc -p FILE status tells what holds it up",
                more=len(lagging) - 1,
            )
        time.sleep(0.5)


def _count_after_cleaning(count: Count, goal: Mapping[str, Position]) -> "Mapping[str, Sequence[PartitionCensus]]":
    """Count once the broker has had time to clean.

    It needs about as long as the counting, so wait that long, too.
    """
    time.sleep(2 * SEGMENT_MS / 1000)
    start = time.monotonic()
    counts = count(goal)
    if any(_unfinished_topics(counts, tombstones=False)):
        time.sleep(time.monotonic() - start)
    return counts


def _unfinished_topics(counts: "Mapping[str, Sequence[PartitionCensus]]", *, tombstones: bool) -> dict[str, str]:
    """Describe the topics that aren't compacted yet, in words by topic."""
    unfinished = {}
    for topic, partitions in counts.items():
        records = sum(partition.records for partition in partitions)
        keys = sum(partition.keys for partition in partitions)
        tombstone_count = sum(partition.tombstones for partition in partitions) if tombstones else 0
        if records > keys or tombstone_count:
            unfinished[topic] = f"{records:,} records of {keys:,} keys"
        if tombstone_count:
            unfinished[topic] += f", {tombstone_count:,} tombstones"
    return unfinished


def _in_words(unfinished: Mapping[str, str]) -> str:
    return "; ".join(f"{topic}: {counts}" for topic, counts in unfinished.items())


def _timeout_error(unfinished: Mapping[str, str], timeout_s: float) -> ConnectorError:
    topic, work = next(iter(unfinished.items()))
    return ConnectorError(
        f"{topic} still holds {work} after {timeout_s:.0f} s; its settings are restored.",
        hint="does the broker compact (log.cleaner.enable)? large topics take longer: --timeout",
        topic=topic,
        more=len(unfinished) - 1,
    )


def _result(topic: str, before: "Sequence[PartitionCensus]", counts: "Sequence[PartitionCensus]") -> CompactionResult:
    return CompactionResult(
        topic,
        sum(partition.records for partition in before),
        sum(partition.records for partition in counts),
        sum(partition.keys for partition in counts),
        sum(partition.tombstones for partition in counts),
    )
