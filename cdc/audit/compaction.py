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
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING

from cdc.audit.lowered_settings import (
    SEGMENT_MS,
    LoweredSettings,
    SegmentRoller,
    refuse_concurrent,
    restore,
)
from cdc.config.settings import Pipeline
from cdc.errors import ConnectorError
from cdc.generations.registry import GenerationBuild, Generations, Registry
from cdc.kafka.log_refusals import refuse_incomparable
from cdc.kafka.topic_setup import check_topics
from cdc.kafka.topics import Topics
from cdc.kafka.unread_records import pending_records
from cdc.model.position import Position, ViewCheckpoint, distance
from cdc.model.table import Table
from cdc.sink.contract import Sink

if TYPE_CHECKING:
    from cdc.spark.kafka_source import PartitionCensus

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
    refuse_concurrent(kafka, pipeline)
    restore(kafka, pipeline)
    check_topics(kafka, pipeline)
    topics = [table.topic for table in tables]
    goal = kafka.ends(topics)
    first_counts, deadline = count(goal), time.monotonic() + options.timeout_s
    registry, tombstones = Registry(pipeline, kafka), options.tombstones
    with (
        LoweredSettings(kafka, pipeline, topics, tombstones=tombstones) as lowered,
        SegmentRoller(kafka, pipeline) as roller,
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
    return [_result(topic, first_counts[topic], counts[topic]) for topic in topics]


def required_views(
    tables: Sequence[Table],
    sinks: Sequence[Sink],
    generations: Callable[[str], Generations],
    *,
    tombstones: bool,
) -> list[View]:
    """Return the views that must have applied a record before it may be removed.

    Without `tombstones` these are the logs of changes. With them all views, including standbys and
    builds at work; a build that no command works on begins again when it has missed a tombstone.
    """
    if not tombstones:
        return [
            (sink.name, table, sink.position)
            for sink in sinks
            if sink.row_format == "events"
            for table in tables
        ]
    views: list[View] = [(sink.name, table, sink.position) for sink in sinks for table in tables]
    for sink in sinks:
        for names, state in _standby_generations(generations(sink.name)):
            generation_sink = sink.for_generation(names)
            label = f"the generation of {sink.name} that is {state}"
            views += [
                (label, table, generation_sink.position)
                for table in tables
                if table.qualified in names
            ]
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


def _lagging_views(kafka: Topics, views: Sequence[View], ends: Mapping[str, Position]) -> list[str]:
    """Name the views that lack a record below the ends.

    Raises Discontinued for one that never gets there.
    """
    committed_ends = kafka.ends(list(ends)) if views else {}
    if open_topics := [
        topic for topic, end in committed_ends.items() if not distance(end, ends[topic]).reached
    ]:
        return [f"a transaction in {topic} is open" for topic in open_topics]
    unread = []
    for name, table, position in views:
        checkpoint = position(table)
        refuse_incomparable(name, table, distance(checkpoint, ends[table.topic]))
        unread.append((name, table, pending_records(table.topic, checkpoint, ends[table.topic])))
    # Aborted records and transaction markers need not be applied: look for the next committed
    # record instead.
    next_records = kafka.next_committed_records(
        {place for _, _, places in unread for place in places}
    )
    return [
        f"{table.qualified} in {name} has not caught up"
        for name, table, places in unread
        if any(
            (record := next_records[place]) and record[0] < ends[place[0]].offsets[place[1]]
            for place in places
        )
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


def _count_after_cleaning(
    count: Count, goal: Mapping[str, Position]
) -> "Mapping[str, Sequence[PartitionCensus]]":
    """Count once the broker has had time to clean.

    It needs about as long as the counting, so wait that long, too.
    """
    time.sleep(2 * SEGMENT_MS / 1000)
    start = time.monotonic()
    counts = count(goal)
    if any(_unfinished_topics(counts, tombstones=False)):
        time.sleep(time.monotonic() - start)
    return counts


def _unfinished_topics(
    counts: "Mapping[str, Sequence[PartitionCensus]]", *, tombstones: bool
) -> dict[str, str]:
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


def _result(
    topic: str, first_counts: "Sequence[PartitionCensus]", counts: "Sequence[PartitionCensus]"
) -> CompactionResult:
    return CompactionResult(
        topic,
        sum(partition.records for partition in first_counts),
        sum(partition.records for partition in counts),
        sum(partition.keys for partition in counts),
        sum(partition.tombstones for partition in counts),
    )
