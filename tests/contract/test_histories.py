"""Random lives of many rows, in random batches, through crashes and redelivery: the view ends as
its source.

A reader looks after every step and never sees a row's version go down, unless the view is made
again.
"""

import contextlib
import copy
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from cdc.apply.resume import prepare
from cdc.codec.decode_options import DecodeOptions
from cdc.errors import CdcError
from cdc.model.outcome import Advance, Applied
from cdc.model.position import Position
from cdc.sink.contract import Batch, Sink
from cdc.sinks.delta.sink import Delta
from cdc.sinks.memory import Memory
from cdc.spark.failures import explain
from tests.contract import crashes
from tests.contract.crashes import Crash
from tests.contract.laws import TOPIC_ID
from tests.contract.test_contract import maker
from tests.support.budget import SCALE, budget
from tests.support.envelopes import PLACEHOLDER, Row, listed
from tests.support.histories import Reader, World, table
from tests.support.warehouse import logged_events, mirror_documents

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass
class Consumer:
    """The way of one sink through a log, as `cdc.apply` goes it."""

    spark: "SparkSession"
    make: Callable[[], Sink]
    world: World
    reader: Reader = field(default_factory=Reader)
    runs: "itertools.count[int]" = field(default_factory=itertools.count)
    batches: list[Batch] = field(default_factory=list)
    versioned: bool = True
    """Whether rows that come again after a lost position leave newer ones alone."""
    ahead: tuple[int, ...] = ()
    """The offsets up to which the rows may be ahead of the position."""

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        """A new run: a new sink object and a new writer, which go on from where the sink says."""
        self.sink, self.writer = self.make(), f"run {next(self.runs)}"
        self.stand()

    def stand(self) -> None:
        table, floor = self.world.table, self.world.floor
        stored = prepare(self.sink, table, self.sink.position(table), floor, lambda _: None)
        self.place, self.floor = stored.position if stored else None, floor
        if stored is None and not self.view():
            self.reader.restart()
            self.ahead = ()

    @property
    def offsets(self) -> tuple[int, ...]:
        return self.place.offsets if self.place else (0,) * self.world.topic.partitions

    def batch(self, cut: Sequence[float]) -> Batch | None:
        """The next batch: up to a share of what there is in each partition; None when that is nothing."""
        if self.floor != self.world.floor:
            self.stand()
        ends = self.world.topic.ends
        reach = [
            offset + round(share * (end - offset))
            for offset, end, share in zip(self.offsets, ends, cut, strict=True)
        ]
        end = tuple(reach if tuple(reach) != self.offsets else ends)
        return None if end == self.offsets else self.between(self.place, end)

    def between(self, start: Position | None, ends: Sequence[int]) -> Batch:
        world = self.world
        advance = Advance(world.table, start, Position(TOPIC_ID, tuple(ends)), self.floor)
        records = [
            (world.table, record) for record in world.topic.between(advance.start_offsets, ends)
        ]
        reading = DecodeOptions(PLACEHOLDER, {world.table.topic: self.floor} if self.floor else {})
        return Batch(self.writer, (advance,), listed(self.spark, records), reading)

    def send(self, batch: Batch) -> Applied:
        try:
            outcome = self.sink.apply(batch)
        except CdcError:
            raise
        except Exception as error:
            raise explain(error, "sink") from error
        return outcome.applied.get(self.world.table.qualified, Applied())

    def deliver(self, batch: Batch) -> None:
        (advance,) = batch.advances
        applied = self.send(batch)
        expected = len(self.world.topic.between(advance.start_offsets, advance.end.offsets))
        assert (applied.read, applied.accounted) == (expected, expected)
        self.place = advance.end
        self.batches.append(batch)
        self.check()

    def check(self) -> None:
        """The view is what the log says, unless a crash has left rows that are newer than that."""
        view = self.check_view()
        assert self.behind or view == self.world.topic.model(self.offsets, self.floor)
        if isinstance(self.sink, Delta):
            self.check_events(self.sink)

    def check_events(self, sink: Delta) -> None:
        """The log of changes has every event up to where the view stands, and none of them twice."""
        places = logged_events(sink.folder(self.world.table, "changes"))
        assert len(places) == len(set(places)), "an event twice in the log of changes"
        records = [record for record in self.world.topic.records if record.value is not None]
        below = {
            (record.partition, record.offset)
            for record in records
            if record.offset < self.offsets[record.partition]
        }
        assert below <= set(places) <= {(record.partition, record.offset) for record in records}

    @property
    def behind(self) -> bool:
        return any(
            offset < ahead
            for offset, ahead in zip(self.offsets, self.ahead or self.offsets, strict=True)
        )

    def crashed(self, ends: Sequence[int]) -> None:
        self.ahead = tuple(map(max, self.ahead or ends, ends))

    def view(self) -> dict[str, Row]:
        if isinstance(self.sink, Memory):
            return {
                key: json.loads(text)
                for key, text in self.sink.views[self.world.table.qualified].items()
            }
        if isinstance(self.sink, Delta):
            rows = mirror_documents(self.sink, self.world.table)
        else:
            scanned = self.sink.scan(self.world.table, self.spark).collect()
            rows = [(row["id"], row["document"]) for row in scanned]
        view = {key: json.loads(document) for key, document in rows}
        assert len(view) == len(rows), "an id twice in the view"
        return view

    def check_view(self) -> dict[str, Row]:
        view = {
            key: {c.name: row[c.name] for c in self.world.table.columns}
            for key, row in self.view().items()
        }
        if self.behind and not self.versioned:
            self.reader.restart()
        else:
            self.reader.check(view)
        return view


SEEDS = st.integers(0, 2**32)
CUTS = st.tuples(*[st.sampled_from([0.0, 0.3, 0.7, 1.0])] * 2)


class Histories(RuleBasedStateMachine):
    """Rules that every sink is put through."""

    consumer: Consumer
    crashes: Sequence[Crash] = ()
    most = 1000
    covered: list[int]

    @rule(seed=SEEDS, cut=CUTS)
    def deliver(self, seed: int, cut: tuple[float, float]) -> None:
        self.consumer.world.write(seed, self.most)
        for share in (cut, cut[::-1])[: 1 + seed % 2]:
            if batch := self.consumer.batch(share):
                self.consumer.deliver(batch)

    @rule(cut=CUTS, seed=SEEDS)
    def crash(self, cut: tuple[float, float], seed: int) -> None:
        """Some of a batch may be there, its position perhaps too; the next run finds out, and batches differ."""
        self.consumer.world.write(seed, self.most)
        if (batch := self.consumer.batch(cut)) and self.crashes:
            self.crashes[seed % len(self.crashes)](self.consumer, batch, seed)
            self.consumer.crashed(batch.advances[0].end.offsets)
            self.consumer.start()
            self.consumer.check_view()

    @rule(seed=SEEDS, cut=CUTS)
    def lose_the_answer(self, seed: int, cut: tuple[float, float]) -> None:
        self.consumer.world.write(seed, self.most // 2)
        if batch := self.consumer.batch(cut):
            self.consumer.send(batch)
            self.consumer.check_view()
            if cut[0] < 0.5:
                self.consumer.start()
                assert self.consumer.place == batch.advances[0].end
            else:
                # The same run tries again.
                self.consumer.send(batch)
                self.consumer.place = batch.advances[0].end
            self.consumer.check()

    @rule(age=st.integers(1, 5))
    def send_an_old_batch_again(self, age: int) -> None:
        """Send an old batch of a zombie, or of the same run: it is refused or has no effect."""
        view, stored = (
            self.consumer.check_view(),
            self.consumer.sink.position(self.consumer.world.table),
        )
        position = stored.position if stored else None
        # One that starts where the view stands isn't old: of a view that was cleared, the first.
        old_batches = [
            batch for batch in self.consumer.batches if batch.advances[0].start != position
        ]
        if len(old_batches) < age:
            return
        with contextlib.suppress(CdcError):
            self.consumer.send(old_batches[-age])
        assert self.consumer.check_view() == view
        assert self.consumer.sink.position(self.consumer.world.table) == stored

    @rule(seed=SEEDS)
    def truncate(self, seed: int) -> None:
        """Rows vanish while the consumer is behind, some of a transaction's own before and some after."""
        if seed % 2:
            self.consumer.world.write(seed, self.most // 4)
            self.consumer.world.truncate()
            self.consumer.world.write(seed + 1, self.most // 4)

    @rule()
    def restart(self) -> None:
        self.consumer.start()

    def teardown(self) -> None:
        """Apply the rest of the log, which makes the view equal to the source, whatever has happened."""
        if batch := self.consumer.batch((1.0, 1.0)):
            self.consumer.deliver(batch)
        assert self.consumer.check_view() == self.consumer.world.rows
        self.covered.append(self.consumer.world.lives)
        self.consumer.sink.close()


class Remembered(Histories):
    """Besides: a destination that falls back to what it held earlier, and one that loses its position only."""

    def __init__(self) -> None:
        super().__init__()
        self.snapshots: list[tuple[Any, Any, tuple[int, ...]]] = []

    @rule()
    def snapshot(self) -> None:
        sink = self.consumer.sink
        assert isinstance(sink, Memory)
        self.snapshots.append((copy.deepcopy(sink.views), dict(sink.stored), self.consumer.ahead))

    @precondition(lambda self: self.snapshots)
    @rule()
    def fall_back(self) -> None:
        sink = self.consumer.sink
        assert isinstance(sink, Memory)
        views, stored, ahead = self.snapshots[-1]
        for target, now in ((sink.views, views), (sink.stored, stored)):
            target.clear()
            target.update(copy.deepcopy(now))
        self.consumer.reader.restart()
        self.consumer.ahead = ahead
        self.consumer.start()

    @rule()
    def lose_the_position(self) -> None:
        sink = self.consumer.sink
        assert isinstance(sink, Memory)
        self.consumer.crashed(self.consumer.offsets)
        sink.stored.clear()
        self.consumer.start()


def run_machine(
    machine: type[Histories],
    make: Callable[[], Consumer],
    examples: int,
    steps: int,
    least: int,
    **set_: Any,
) -> None:
    covered: list[int] = []

    def build() -> Histories:
        histories = machine()
        histories.covered, histories.consumer = covered, make()
        for name, value in set_.items():
            setattr(histories, name, value)
        # The first example is the emptiest one: it has something to look at as well.
        histories.consumer.world.write(len(covered), histories.most)
        return histories

    run_state_machine_as_test(build, settings=budget(examples, steps=steps))  # type: ignore[arg-type]
    assert sum(covered) >= least * SCALE, f"only {sum(covered)} lives of rows were looked at"


def test_memory(
    request: pytest.FixtureRequest, spark: "SparkSession", unique: str, tmp_path: Path
) -> None:
    def make() -> Consumer:
        world = World(table("h.public.lives"), keys=1000)
        return Consumer(spark, maker(request, "memory", unique, tmp_path), world, versioned=False)

    run_machine(Remembered, make, 4, 15, 2000, crashes=crashes.MEMORY)


@pytest.mark.parametrize(
    ("kind", "examples", "steps"),
    [
        ("redis", 3, 8),
        ("elasticsearch", 3, 8),
        ("delta", 2, 6),
        ("delta, unmarked", 2, 6),
        ("delta, in a bucket", 2, 6),
    ],
)
def test_servers(
    request: pytest.FixtureRequest,
    spark: "SparkSession",
    unique: str,
    tmp_path: Path,
    kind: str,
    examples: int,
    steps: int,
) -> None:
    numbers = itertools.count()

    def make() -> Consumer:
        name = f"{unique}_{next(numbers)}"
        return Consumer(
            spark,
            maker(request, kind, name, tmp_path / name),
            World(table(f"{name}.public.lives"), keys=150),
        )

    run_machine(
        Histories,
        make,
        examples,
        steps,
        250,
        crashes=crashes.SERVERS[kind.partition(",")[0]],
        most=150,
    )
