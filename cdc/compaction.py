"""Force the broker to compact topics now, and wait until it has: for a maintenance window, and for tests.

The broker compacts what is not in a partition's active segment, and begins another segment only with an append. So
`segment.ms` is lowered and a transaction is aborted in every partition: no committed record, nothing that a
read_committed reader sees (the pipeline, its sinks), and compaction removes what is left of it.
What settings were is first written to the topic `<pipeline>.settings` (key: topic, value: JSON of its own settings,
null once they are restored); whoever comes next after a crash restores them from there. Settings that other people
change meanwhile, and that aren't lowered here, stay.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from cdc.change import Position, Stored, Table, distance
from cdc.errors import ConnectorError
from cdc.records import TIMEOUT_MS, kafka, reaching
from cdc.settings import Pipeline
from cdc.topics import Topics

if TYPE_CHECKING:
    from cdc.log import Tally

SEGMENT_MS = 1000
"""A busy partition begins a segment a second while it is lowered, not one a batch."""
LOWERED = {
    "min.cleanable.dirty.ratio": "0.0",
    "min.compaction.lag.ms": "0",
    "segment.ms": str(SEGMENT_MS),
    "segment.jitter.ms": "0",
}
RETENTION_MS = 1000
TOMBSTONES = {"delete.retention.ms": str(RETENTION_MS)}
TRANSACTION_MS = 10_000
"""How long a crash between two lines may hold up readers."""
Count = Callable[[Mapping[str, Position]], "Mapping[str, Sequence[Tally]]"]
"""What each partition holds below positions, by topic: `cdc.log.tally`."""
Positions = Mapping[str, Callable[[Table], Stored | None]]
"""By sink: where its view of a table stands."""


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
    views: Positions | None = None,
    timeout_s: float,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Compacted]:
    """Wait until each key that the topics hold now has one record.

    With `views` tombstones go as well, which a view that hasn't seen them would miss for good: so never before every
    view stands at the end. Those that an earlier compaction has met keep the time that they were given then.

    Raises:
        ConnectorError: not within timeout_s, or somebody else began the same; the settings are restored all the same.
    """
    restore(kafka, pipeline)
    kafka.check(pipeline)
    topics = [table.topic for table in tables]
    goal = kafka.ends(topics)
    before, deadline = count(goal), time.monotonic() + timeout_s
    with _lowered(kafka, pipeline, topics, tombstones=views is not None), _Roller(kafka, pipeline) as roller:
        while True:
            _await_views(views or {}, tables, kafka.ends(topics), deadline, progress)
            roller.roll(goal)
            began = time.monotonic()
            time.sleep(2 * SEGMENT_MS / 1000)
            now = count(goal)
            left = _left(now, tombstones=views is not None)
            if not left:
                break
            progress("; ".join(f"{topic}: {what}" for topic, what in left.items()))
            if time.monotonic() > deadline:
                raise _unfinished(left, timeout_s)
            # What takes long to count takes the broker long to compact.
            time.sleep(time.monotonic() - began - 2 * SEGMENT_MS / 1000)
    return [_compacted(topic, before[topic], now[topic]) for topic in topics]


def restore(kafka: Topics, pipeline: Pipeline) -> list[str]:
    """Give topics back the settings that an interrupted compaction had lowered; their names."""
    if not kafka.existing([pipeline.settings_topic]):
        return []
    stored = {record.key.decode(): record.value for record in kafka.all(pipeline.settings_topic) if record.key}
    open_ = {topic: json.loads(value) for topic, value in stored.items() if value}
    alive = kafka.existing(open_)
    kafka.override({topic: _own(open_[topic]) for topic in alive})
    if open_:
        kafka.write(pipeline.settings_topic, [(topic.encode(), None) for topic in open_])
    return sorted(alive)


@contextmanager
def _lowered(kafka: Topics, pipeline: Pipeline, topics: Sequence[str], *, tombstones: bool) -> Iterator[None]:
    own = kafka.overrides(topics)
    kafka.write(pipeline.settings_topic, [(topic.encode(), json.dumps(own[topic]).encode()) for topic in topics])
    try:
        kafka.override({topic: {**LOWERED, **(TOMBSTONES if tombstones else {})} for topic in topics})
        yield
    finally:
        restore(kafka, pipeline)


def _own(settings: Mapping[str, str]) -> dict[str, str | None]:
    return {name: settings.get(name) for name in (*LOWERED, *TOMBSTONES)}


class _Roller:
    """Appends to partitions without a trace. There is one at a time: another that begins shuts this one out."""

    def __init__(self, topics: Topics, pipeline: Pipeline) -> None:
        self._bootstrap = topics.bootstrap
        with reaching(self._bootstrap):
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
            with reaching(self._bootstrap):
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


def _late(views: Positions, tables: Sequence[Table], ends: Mapping[str, Position]) -> list[str]:
    """Which views don't stand at the ends yet, in words."""
    late = []
    for name, position in views.items():
        for table in tables:
            if not distance(position(table), ends[table.topic]).reached:
                late.append(f"{table.qualified} in {name} has not caught up")
    return late


def _await_views(
    views: Positions,
    tables: Sequence[Table],
    ends: Mapping[str, Position],
    deadline: float,
    progress: Callable[[str], None],
) -> None:
    while behind := _late(views, tables, ends):
        progress(behind[0])
        if time.monotonic() > deadline:
            raise ConnectorError(
                f"No tombstone may go before every view has seen it: {behind[0]}.",
                hint="let `cdc run` catch up, or leave out --tombstones",
                more=len(behind) - 1,
            )
        time.sleep(0.5)


def _left(now: "Mapping[str, Sequence[Tally]]", *, tombstones: bool) -> dict[str, str]:
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


def _compacted(topic: str, before: "Sequence[Tally]", now: "Sequence[Tally]") -> Compacted:
    return Compacted(
        topic,
        sum(one.records for one in before),
        sum(one.records for one in now),
        sum(one.keys for one in now),
        sum(one.tombstones for one in now),
    )
