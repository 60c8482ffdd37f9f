"""Force the broker to compact topics now, and wait until it has: for a maintenance window, and for tests.

The broker compacts what is not in a partition's active segment, and begins another segment only with an append. So
`segment.ms` is lowered and a transaction is aborted in every partition: no committed record, nothing that a
read_committed reader sees (the pipeline, its sinks), and compaction removes what is left of it.
**Nothing goes that a view still needs:** the new segment is then held open, so that all there is to compact lies below
the ends of that moment, and the views are waited for; only then the broker is told to clean, and before the next
segment begins it is told not to. Somebody who is killed in between leaves it so: what comes later is not touched.
What settings were is first written to the ledger; whoever comes next after a crash restores them from there. Settings
that other people change meanwhile, and that aren't lowered here, stay.
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
UNCLEANED = {"min.cleanable.dirty.ratio": "1.0", "segment.jitter.ms": "0"}
"""What the broker cleaned with a topic's own settings would keep its tombstones for as long as these say."""
ROLLING = {**UNCLEANED, "segment.ms": str(SEGMENT_MS)}
"""With the next append another segment begins."""
HELD = {**UNCLEANED, "segment.ms": str(365 * 24 * 3_600_000)}
"""None begins, but for one that is full."""
LOWERED = {**HELD, "min.cleanable.dirty.ratio": "0.0", "min.compaction.lag.ms": "0"}
RETENTION_MS = 1000
TOMBSTONES = {"delete.retention.ms": str(RETENTION_MS)}
TRANSACTION_MS = 10_000
"""How long a crash between two lines may hold up readers."""
BEAT_S = 1.0
Count = Callable[[Mapping[str, Position]], "Mapping[str, Sequence[PartitionCensus]]"]
"""What each partition holds below positions, by topic: `cdc.spark.kafka_source.census`."""
View = tuple[str, Table, Callable[[Table], ViewCheckpoint | None]]
"""What it is called, its table, where it stands."""


@dataclass(frozen=True)
class Compacted:
    """One topic: its records before and after, and the keys they are of."""

    topic: str
    before: int
    records: int
    keys: int
    tombstones: int


def compact(
    kafka: Topics,
    pipeline: Pipeline,
    tables: Sequence[Table],
    *,
    count: Count,
    sinks: Sequence[Sink],
    tombstones: bool = False,
    timeout_s: float,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Compacted]:
    """Wait until each key that the topics hold now has one record.

    A record that a newer one has superseded goes once every log of changes has it. With `tombstones` these go as well,
    once every view has seen them; those that an earlier compaction has met keep the time that they were given then.

    Raises:
        ConnectorError: not within timeout_s, or somebody else does the same; the settings are restored all the same.
    """
    _stay_alone(kafka, pipeline)
    restore(kafka, pipeline)
    kafka.check(pipeline)
    topics = [table.topic for table in tables]
    goal = kafka.ends(topics)
    before, deadline = count(goal), time.monotonic() + timeout_s
    registry = Registry(pipeline, kafka)
    with _Lowered(kafka, pipeline, topics, tombstones=tombstones) as lowered, _Roller(kafka, pipeline) as roller:
        while True:
            ends = lowered.roll(roller, goal)
            views = watched(tables, sinks, registry.read().for_sink, tombstones=tombstones)
            _await_views(kafka, views, ends, deadline, progress)
            lowered.clean(ends)
            now = _counted(count, goal)
            left = _left(now, tombstones=tombstones)
            if not left:
                break
            progress("; ".join(f"{topic}: {what}" for topic, what in left.items()))
            if time.monotonic() > deadline:
                raise _unfinished(left, timeout_s)
    return [_compacted(topic, before[topic], now[topic]) for topic in topics]


def restore(kafka: Topics, pipeline: Pipeline) -> list[str]:
    """Give topics back the settings that an interrupted compaction had lowered; their names."""
    ledger = Ledger(pipeline, kafka).read()
    return _restored(kafka, ledger) if ledger.is_interrupted() else []


def watched(
    tables: Sequence[Table], sinks: Sequence[Sink], generations: Callable[[str], Generations], *, tombstones: bool
) -> list[View]:
    """The views that a record has to be in before it may go.

    With `tombstones` all of them, also those that are built and kept beside what readers see: a build that nobody is
    at work on begins again when it has missed something.
    """
    if not tombstones:
        return [(sink.name, table, sink.position) for sink in sinks if sink.row_format == "events" for table in tables]
    views: list[View] = [(sink.name, table, sink.position) for sink in sinks for table in tables]
    for sink in sinks:
        for names, what in _beside(generations(sink.name)):
            beside = sink.for_generation(names)
            label = f"the generation of {sink.name} that is {what}"
            views += [(label, table, beside.position) for table in tables if table.qualified in names]
    return views


def _beside(generations: Generations) -> Iterator[tuple[Mapping[str, str], str]]:
    """The generations beside the live views that somebody keeps current, by table, and what becomes of each."""
    if standby := generations.standby_names:
        yield standby, "kept"
    if isinstance(generations.work, GenerationBuild) and generations.in_progress:
        yield generations.work.names, "being built"


@contextmanager
def ended_in_order() -> Iterator[None]:
    """SIGTERM ends what is done within by an exception, so that settings are restored; a second one doesn't."""

    def end(number: int, _: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _stay_alone(kafka: Topics, pipeline: Pipeline) -> None:
    ledger = Ledger(pipeline, kafka).read()
    if ledger.lowered and not ledger.is_interrupted():
        raise ConnectorError("Another `cdc topics compact` of this pipeline is at work.", hint="wait for it to end")


def _restored(kafka: Topics, ledger: Ledger) -> list[str]:
    alive, now = kafka.existing(ledger.lowered), time.time()
    kafka.override({topic: _own(ledger.lowered[topic]) for topic in alive})
    for compactions, tombstones in ((ledger.compacted, False), (ledger.tombstones_removed, True)):
        open_ = {topic: one for topic, one in compactions.items() if topic in ledger.lowered and not one.ended}
        ledger.add_compactions({topic: replace(one, ended=now) for topic, one in open_.items()}, tombstones=tombstones)
    ledger.forget_lowered(ledger.lowered)
    return sorted(alive)


def _own(settings: Mapping[str, str]) -> dict[str, str | None]:
    return {name: settings.get(name) for name in (*LOWERED, *TOMBSTONES)}


class _Lowered:
    """Settings of topics, lowered step by step and restored at the end. Says every second that somebody is at work."""

    def __init__(self, kafka: Topics, pipeline: Pipeline, topics: Sequence[str], *, tombstones: bool) -> None:
        self._kafka, self._topics, self._tombstones = kafka, topics, tombstones
        self._ledger = Ledger(pipeline, kafka)
        self._own = kafka.overrides(topics)
        self._ended = threading.Event()
        self._beating = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> "_Lowered":
        self._ledger.add_lowered(self._own)
        self._ledger.write_heartbeat(at_work=True)
        self._beating.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            _restored(self._kafka, self._ledger.read())
        finally:
            self._ended.set()
            self._beating.join()
            self._ledger.write_heartbeat(at_work=False)

    def roll(self, roller: "_Roller", places: Mapping[str, Position]) -> dict[str, Position]:
        """Begin a segment that is held open, while nothing is cleaned; the ends above all that there is to clean."""
        self._kafka.override({topic: {**_own(self._own[topic]), **ROLLING} for topic in self._topics})
        roller.roll(places)
        self._kafka.override(dict.fromkeys(self._topics, HELD))
        return self._kafka.ends(self._topics, decided=False)

    def clean(self, ends: Mapping[str, Position]) -> None:
        """Have what lies below the ends cleaned."""
        now = time.time()
        done = {topic: Compaction(end, now) for topic, end in ends.items()}
        self._ledger.add_compactions(done, tombstones=self._tombstones)
        settings = {**LOWERED, **(TOMBSTONES if self._tombstones else {})}
        self._kafka.override(dict.fromkeys(self._topics, settings))

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            # Whoever takes this one for dead only restores what it has lowered.
            with suppress(ConnectorError):
                self._ledger.write_heartbeat(at_work=True)


class _Roller:
    """Appends to partitions without a trace. There is one at a time: another that begins shuts this one out."""

    def __init__(self, topics: Topics, pipeline: Pipeline) -> None:
        self._bootstrap = topics.bootstrap
        with translated_errors(self._bootstrap):
            self._producer = kafka.KafkaProducer(
                bootstrap_servers=self._bootstrap,
                transactional_id=f"{pipeline.pipeline}-compaction",
                transaction_timeout_ms=TRANSACTION_MS,
            )
            self._producer.init_transactions()

    def __enter__(self) -> "_Roller":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._producer.close()

    def roll(self, places: Mapping[str, Position]) -> None:
        try:
            with translated_errors(self._bootstrap):
                self._producer.begin_transaction()
                sent = [
                    self._producer.send(topic, key=b"null", value=None, partition=partition)
                    for topic, end in places.items()
                    for partition in range(end.partition_count)
                ]
                for one in sent:
                    one.get(timeout=TIMEOUT_MS / 1000)
                self._producer.abort_transaction()
        except ConnectorError as error:
            if isinstance(error.__cause__, kafka.errors.ProducerFencedError | kafka.errors.InvalidProducerEpochError):
                raise ConnectorError(
                    "Another `cdc topics compact` of this pipeline has begun; this one stops.",
                    hint="wait for the other to end",
                ) from error
            raise


def _late(kafka: Topics, views: Sequence[View], ends: Mapping[str, Position]) -> list[str]:
    """Which views lack a record below the ends, in words. Raises Discontinued for one that never gets there."""
    decided = kafka.ends(list(ends)) if views else {}
    if undecided := [topic for topic, end in decided.items() if not distance(end, ends[topic]).reached]:
        return [f"a transaction in {topic} is open" for topic in undecided]
    behind = []
    for name, table, position in views:
        stored = position(table)
        refuse_incomparable(name, table, distance(stored, ends[table.topic]))
        behind.append((name, table, pending_records(table.topic, stored, ends[table.topic])))
    # What was aborted to begin segments, and markers, nobody has to apply.
    following = kafka.next_records({place for _, _, places in behind for place in places}, decided=True)
    return [
        f"{table.qualified} in {name} has not caught up"
        for name, table, places in behind
        if any((found := following[place]) and found[0] < ends[place[0]].offsets[place[1]] for place in places)
    ]


def _await_views(
    kafka: Topics,
    views: Sequence[View],
    ends: Mapping[str, Position],
    deadline: float,
    progress: Callable[[str], None],
) -> None:
    while behind := _late(kafka, views, ends):
        progress(behind[0])
        if time.monotonic() > deadline:
            raise ConnectorError(
                f"No record may go before every view that needs it has seen it: {behind[0]}.",
                hint="let `cdc run` catch up; cdc -p FILE status tells what holds it up",
                more=len(behind) - 1,
            )
        time.sleep(0.5)


def _counted(count: Count, goal: Mapping[str, Position]) -> "Mapping[str, Sequence[PartitionCensus]]":
    """What is there once the broker has had time to clean; what takes long to count takes it long as well."""
    time.sleep(2 * SEGMENT_MS / 1000)
    began = time.monotonic()
    now = count(goal)
    if any(_left(now, tombstones=False)):
        time.sleep(time.monotonic() - began)
    return now


def _left(now: "Mapping[str, Sequence[PartitionCensus]]", *, tombstones: bool) -> dict[str, str]:
    """What is still to be done, in words by topic."""
    left = {}
    for topic, partitions in now.items():
        records, keys = sum(one.records for one in partitions), sum(one.keys for one in partitions)
        buried = sum(one.tombstones for one in partitions) if tombstones else 0
        if records > keys or buried:
            left[topic] = f"{records:,} records of {keys:,} keys" + (f", {buried:,} tombstones" if buried else "")
    return left


def _unfinished(left: Mapping[str, str], timeout_s: float) -> ConnectorError:
    topic, what = next(iter(left.items()))
    return ConnectorError(
        f"{topic} still holds {what} after {timeout_s:.0f} s; its settings are restored.",
        hint="does the broker compact (log.cleaner.enable)? large topics take longer: --timeout",
        topic=topic,
        more=len(left) - 1,
    )


def _compacted(topic: str, before: "Sequence[PartitionCensus]", now: "Sequence[PartitionCensus]") -> Compacted:
    return Compacted(
        topic,
        sum(one.records for one in before),
        sum(one.records for one in now),
        sum(one.keys for one in now),
        sum(one.tombstones for one in now),
    )
