"""A stream's loop, with its log, its executors and its clock in memory: what it applies, and when."""

import json
import random
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import pairwise
from threading import Event
from typing import Any

import msgspec
import pytest

from cdc.apply import batch, stream
from cdc.apply.progress import RunState
from cdc.apply.schema_follower import Described
from cdc.apply.stream import Environment, Stream
from cdc.config.settings import Pipeline
from cdc.control.registrations import KEY, Captured, Registration
from cdc.documents.tables import with_views
from cdc.errors import KafkaForbidden, SinkUnavailable
from cdc.generations.registry import GenerationBuild, Registry, RetainedView
from cdc.kafka.log_refusals import Discontinued
from cdc.kafka.records import Record
from cdc.kafka.tail import ABSENT_S, Tail
from cdc.model.position import ViewCheckpoint
from cdc.model.table import Table
from cdc.sink.contract import Batch, Outcome, SchemaMismatch
from cdc.sinks.memory import Memory
from tests.support.envelopes import PLACEHOLDER, Topic, encoded, table
from tests.support.pipelines import NO_SOURCE, pipeline
from tests.support.simulated import DAY_MS, MemoryEnds, MemoryLog, SimulatedClock, in_process

ITEMS = table("shop.public.items")
TRIGGER_S = 0.2
START_S = 0.1
SHOP = pipeline("shop", "postgresql://127.0.0.1:1/x", ITEMS.qualified)


class Cache(Memory):
    """The reference sink; notes when each batch begins, and how many records it has."""

    def __init__(self, clock: SimulatedClock) -> None:
        super().__init__("cache")
        self._clock = clock
        self.batches: list[tuple[float, int]] = []
        self.away_until = 0.0
        self.record_s = 0.0
        self.on_apply: Callable[[], object] = lambda: None
        self.fits = True

    def position(self, table: Table) -> ViewCheckpoint | None:
        if not self.fits:
            raise SchemaMismatch(table, self.name)
        return super().position(table)

    def apply(self, batch: Batch) -> Outcome:
        self.batches.append((self._clock.now, 0))
        if self._clock.now < self.away_until:
            raise SinkUnavailable("The cache is away.", hint="wait", sink=self.name)
        self.on_apply()
        outcome = super().apply(batch)
        read = outcome.applied[ITEMS.qualified].read
        self.batches[-1] = self._clock.now, read
        self._clock.now += read * self.record_s
        return outcome


class Simulation:
    """A stream of one table, whose log grows while it waits."""

    def __init__(
        self,
        on_wait: Callable[["Simulation"], object],
        seconds: float,
        trigger_s: float = TRIGGER_S,
    ) -> None:
        self.clock = SimulatedClock(lambda: self._step(on_wait))
        self._end = self.clock.now + seconds
        self.began = self.clock.now
        self.log = MemoryLog(self.clock)
        self.topic = Topic(ITEMS)
        self.log.create(ITEMS.topic, self.topic.partitions)
        for name in _control_topics(SHOP):
            self.log.create(name)
        registration = Registration(tables={ITEMS.qualified: Captured()})
        self.log.write(SHOP.registered_topic, [(KEY, msgspec.json.encode(registration))])
        self.sink = Cache(self.clock)
        self.ends = MemoryEnds(self.log)
        self.listed: list[Any] = ["public.*"]
        self.stream = self._stream(trigger_s)
        self._written = 0

    def _stream(self, trigger_s: float) -> Stream:
        return Stream(
            Environment(self.log, self.ends, in_process(self.log), self.clock),
            self.sink,
            SHOP,
            self._describe,
            PLACEHOLDER,
            trigger_s,
        )

    def start_again(self, seconds: float) -> None:
        """Make the stream of another run, which ends after so many seconds."""
        self._end = self.clock.now + seconds
        self.stream = self._stream(TRIGGER_S)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the beginning."""
        return self.clock.now - self.began

    def change(self, op: str, number: int, value: str = "v") -> None:
        """Write the change of a row to the log, as the connector does."""
        self.topic.add(op, {"a": "x", "b": number, "v": value, "n": number})
        for record in self.topic.records[self._written :]:
            self.log.append(
                ITEMS.topic, record.partition, encoded(record.key), encoded(record.value)
            )
        self._written = len(self.topic.records)

    @property
    def view(self) -> dict[str, Any]:
        """The rows that the sink has."""
        return {
            key: json.loads(text) for key, text in self.sink.views.get(ITEMS.qualified, {}).items()
        }

    def _describe(self, *_: object) -> Described:
        """Every start does this, and takes time: one that starts again and again ends, too."""
        self.clock.wait(Event(), START_S)
        cache = {**SHOP.sinks["cache"].model_dump(), "tables": self.listed}
        shop = pipeline("shop", NO_SOURCE, "public.*", sinks={"cache": cache})
        captured = replace(
            ITEMS,
            unlisted_by=shop.unlisted_by(ITEMS.qualified),
            projections=shop.projections(ITEMS.qualified),
        )
        return with_views(shop, [captured], "cache")

    def _step(self, on_wait: Callable[["Simulation"], object]) -> None:
        if self.clock.now >= self._end:
            self.stream.stop()
        else:
            on_wait(self)


def _control_topics(shop: Pipeline) -> list[str]:
    names = ("cdc.truncation", "cdc.ddl")
    return [
        shop.registered_topic,
        shop.quarantine_topic,
        shop.generations_topic,
        shop.settings_topic,
        *map(shop.topic, names),
    ]


def test_a_stream_applies_what_is_written_while_it_runs() -> None:
    """Wherever batches are cut, the view equals a model that applies record by record."""
    rng = random.Random(7)
    rows: set[int] = set()

    def write(run: Simulation) -> None:
        if run.elapsed_s > 18:
            return
        for _ in range(rng.randrange(4)):
            number = rng.randrange(30)
            if number in rows and rng.random() < 0.3:
                run.change("d", number)
                rows.discard(number)
            else:
                run.change("u" if number in rows else "c", number, str(rng.random()))
                rows.add(number)

    run = Simulation(write, seconds=20)
    run.stream.run()
    assert run.stream.progress.state is RunState.STOPPED
    assert len(run.sink.batches) > 50
    assert run.stream.progress.applied.read == len(run.topic.records)
    assert run.stream.progress.lag_records == 0
    assert not run.stream.progress.restarts
    assert run.view == run.topic.model()


def test_small_batches_keep_the_interval() -> None:
    def write(run: Simulation) -> None:
        run.change("c", len(run.topic.records))

    run = Simulation(write, seconds=5)
    run.stream.run()
    starts = [began for began, _ in run.sink.batches]
    assert len(starts) > 10
    # From the second one on they start at multiples of it.
    assert min(later - earlier for earlier, later in pairwise(starts[1:])) >= TRIGGER_S - 1e-6


def test_what_arrives_during_a_large_batch_does_not_wait_for_the_interval(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only what is less than a large batch waits."""
    large = 200
    for module in (batch, stream):
        monkeypatch.setattr(module, "LEAST", large)

    def write_more(run: Simulation) -> None:
        if len(run.topic.records) < 3 * large:
            for _ in range(large):
                run.change("c", len(run.topic.records))

    run = Simulation(lambda _: None, seconds=5, trigger_s=3600)
    write_more(run)
    run.sink.on_apply = lambda: write_more(run)
    run.stream.run()
    assert [read for _, read in run.sink.batches] == [large] * 3
    assert len({began for began, _ in run.sink.batches}) == 1


@pytest.mark.parametrize(
    ("first", "first_bytes", "bounds", "target_s", "sizes"),
    [
        (50, 1 << 30, (50, 500), 60.0, [50, 500, 500, 500, 450]),
        (1000, 1 << 30, (100, 1000), 0.1, [1000, *[100] * 10]),
        (1000, 1, (50, 500), 60.0, [50, 500, 500, 500, 450]),
    ],
    ids=["quick", "slow", "wide"],
)
def test_a_backlog_is_applied_in_batches_as_large_as_the_sink_is_fast(
    monkeypatch: pytest.MonkeyPatch,
    first: int,
    first_bytes: int,
    bounds: tuple[int, int],
    target_s: float,
    sizes: list[int],
) -> None:
    """The first batch follows from the size of records, each later one from the time of the one
    before.
    """
    names = ("FIRST", "FIRST_BYTES", "LEAST", "MOST", "TARGET_S")
    for name, value in zip(names, (first, first_bytes, *bounds, target_s), strict=True):
        monkeypatch.setattr(batch, name, value)
    run = Simulation(lambda _: None, seconds=3600)
    run.sink.record_s = 0.001
    for number in range(2000):
        run.change("c", number)
    run.stream.run(until_caught_up=True)
    assert run.stream.progress.state is RunState.CAUGHT_UP
    # Each partition gives its share, rounded up.
    assert [read for _, read in run.sink.batches] == [
        pytest.approx(expected, abs=3) for expected in sizes
    ]
    assert run.view == run.topic.model()


def test_a_change_after_a_quiet_time_is_applied_within_the_interval() -> None:
    def write(run: Simulation) -> None:
        if run.elapsed_s > 30 and not run.topic.records:
            written_at.append(run.clock.now)
            run.change("c", 1)

    written_at: list[float] = []
    run = Simulation(write, seconds=32)
    run.stream.run()
    [(began, _)] = run.sink.batches
    assert began - written_at[0] <= TRIGGER_S
    assert run.view == run.topic.model()


def test_a_reader_that_was_absent_for_long_reads_everything_again() -> None:
    """By the clock that it is given: what it missed may have been removed meanwhile."""
    clock = SimulatedClock()
    log = MemoryLog(clock)
    log.create("topic")
    log.append("topic", 0, b"key", b"value")
    records: list[Record] = []
    tail = Tail(log, "topic", begin=records.clear, take=records.append, now=clock.time)
    begun = []
    for absent_s in (0, ABSENT_S - 1, ABSENT_S + 1):
        clock.now += absent_s
        begun.append(tail.has_changed())
        tail.read()
        assert [record.value for record in records] == [b"value"]
    assert begun == [True, False, True]


def test_a_retained_generation_expires_by_the_clock() -> None:
    clock = SimulatedClock()
    log = MemoryLog(clock)
    log.create(SHOP.generations_topic)
    registry = Registry(SHOP, log, clock)
    retained = RetainedView("20260101t000000000000", clock.now + 60, clock.now)
    registry.write((("kept", "cache", ITEMS.qualified), asdict(retained)))
    generations = registry.read().for_sink("cache")
    assert generations.standby_names == {ITEMS.qualified: retained.name}
    clock.now += 61
    assert not generations.standby_names


def test_a_sink_that_is_away_gets_everything_once_it_is_back() -> None:
    """Each pause is twice as long as the one before, up to ten seconds; nothing is lost."""

    def write(run: Simulation) -> None:
        if run.elapsed_s < 100:
            run.change("c", len(run.topic.records))

    run = Simulation(write, seconds=130)
    run.sink.away_until = run.clock.now + 60
    run.stream.run()
    assert run.view == run.topic.model()
    assert run.stream.progress.retries["SinkUnavailable"] < 15
    assert run.stream.progress.error is None
    assert max(run.clock.waited_s) == 10.0


@pytest.mark.parametrize(
    ("copies", "restarts"), [(1, {"topic": 1}), (3, {"failure": 1})], ids=["fewer", "more"]
)
def test_no_record_of_a_topic_that_was_created_again_is_applied(
    copies: int, restarts: dict[str, int]
) -> None:
    """Where it has more records than the former one by the time that the stream looks, no offset
    shows that it is another topic.
    """

    def act(run: Simulation) -> None:
        if run.elapsed_s < 1:
            run.change("c", len(run.topic.records), "of the first topic")
        elif run.elapsed_s > 2 and not recreated:
            recreated.append((run.clock.now, run.view))
            run.log.create(ITEMS.topic, run.topic.partitions)
            first, *others = run.topic.records
            for record in (first, *others * (copies - 1)):
                value = (encoded(record.value) or b"").replace(b"first", b"second")
                run.log.append(ITEMS.topic, record.partition, encoded(record.key), value)

    recreated: list[tuple[float, dict[str, Any]]] = []
    run = Simulation(act, seconds=60)
    with pytest.raises(Discontinued) as caught:
        run.stream.run()
    assert "rebuild" in caught.value.hint
    assert run.stream.progress.restarts == restarts
    [(recreated_at, view)] = recreated
    assert run.clock.now - recreated_at < 1
    assert run.view == view == run.topic.model()


def test_a_table_that_is_taken_out_of_a_sink_stands_still_and_goes_on_when_it_is_back() -> None:
    """What it lists counts whenever the stream starts; what it doesn't list is no lag of it."""

    def act(run: Simulation) -> None:
        if run.elapsed_s < end_s:
            run.change("d" if len(run.topic.records) % 5 == 4 else "u", len(run.topic.records) % 7)

    end_s = 3.0
    run = Simulation(act, seconds=4)
    run.stream.run()
    stood = run.view
    assert stood == run.topic.model()

    end_s = 7.0
    run.listed = ["public.other*"]
    run.start_again(seconds=4)
    run.stream.run()
    assert run.stream.progress.state is RunState.STOPPED
    assert (run.stream.progress.lag_records, run.stream.progress.aside) == (0, {})
    assert run.view == stood != run.topic.model()

    run.listed = ["public.items"]
    run.start_again(seconds=4)
    run.stream.run()
    assert run.view == run.topic.model()


@pytest.mark.parametrize("listed", ["public.*", "public.other*"])
def test_what_was_kept_for_a_rollback_goes_also_where_its_table_is_taken_out(listed: str) -> None:
    run = Simulation(lambda _: None, seconds=1)
    run.listed = [listed]
    dropped: list[tuple[list[str], dict[str, str]]] = []
    run.sink.drop_unreferenced = lambda tables, keep: dropped.append(  # type: ignore[method-assign]
        ([table.qualified for table in tables], dict(keep))
    )
    registry = Registry(SHOP, run.log, run.clock)
    for name, of_table, until_s in (("a", ITEMS.qualified, -1), ("b", "public.others", 60)):
        view = RetainedView(name, run.clock.now + until_s, run.clock.now)
        registry.write((("kept", "cache", of_table), asdict(view)))
    run.stream.run()
    assert dropped == [([ITEMS.qualified], {"public.others": "b"})]
    assert registry.read().for_sink("cache").retained.keys() == {"public.others"}


def test_what_is_built_stays_when_what_was_kept_of_another_table_goes() -> None:
    """Of a table that was taken out of the sink: no rebuild forgets what was kept of it."""
    run = Simulation(lambda _: None, seconds=1)
    dropped: list[tuple[list[str], dict[str, str]]] = []
    run.sink.drop_unreferenced = lambda tables, keep: dropped.append(  # type: ignore[method-assign]
        ([table.qualified for table in tables], dict(keep))
    )
    registry = Registry(SHOP, run.log, run.clock)
    expired = RetainedView("a", run.clock.now - 1, run.clock.now - 60)
    build = GenerationBuild("cache", "replay", {ITEMS.qualified: "b"}, run.clock.now)
    registry.write(
        (("kept", "cache", "public.others"), asdict(expired)), (("work", "cache"), asdict(build))
    )
    run.stream.run()
    assert dropped == [(["public.others"], {ITEMS.qualified: "b"})]
    assert registry.read().for_sink("cache").retained == {}


def test_a_view_of_other_columns_than_the_file_gives_is_refused() -> None:
    """Rows of two shapes would lie side by side. A view that is made again has the new one."""

    def act(run: Simulation) -> None:
        if run.elapsed_s < 4:
            run.change("u", len(run.topic.records) % 7)

    only_n = {"table": ITEMS.qualified, "exclude": ["v"]}
    run = Simulation(act, seconds=3)
    run.listed = [only_n]
    run.stream.run()
    stood = run.view
    assert stood == {
        key: {name: value for name, value in row.items() if name != "v"}
        for key, row in run.topic.model().items()
    }
    for other in (ITEMS.qualified, {"table": ITEMS.qualified, "columns": ["v"]}):
        run.listed = [other]
        run.start_again(seconds=3)
        with pytest.raises(SchemaMismatch, match="was made with other columns") as caught:
            run.stream.run()
        assert "rebuild cache --table public.items" in caught.value.hint
        assert run.view == stood
    run.sink.clear(ITEMS)
    run.start_again(seconds=3)
    run.stream.run()
    assert {tuple(row) for row in run.view.values()} == {("a", "b", "v")}
    run.start_again(seconds=3)
    run.stream.run()


def test_a_table_that_is_put_back_too_late_is_refused() -> None:
    """Compaction may have removed the tombstone of a row that the view has."""
    run = Simulation(lambda _: None, seconds=1)
    run.change("c", 1)
    run.stream.run()
    stood = run.view
    assert stood

    run.listed = ["public.other*"]
    run.change("d", 1)
    run.start_again(seconds=1)
    run.stream.run()
    assert run.view == stood

    run.clock.now += 2 * DAY_MS / 1000
    run.listed = ["public.items"]
    run.start_again(seconds=1)
    with pytest.raises(Discontinued, match="may have missed deletes") as caught:
        run.stream.run()
    assert "rebuild cache" in caught.value.hint
    assert run.view == stood


def test_a_view_that_no_longer_fits_is_named_by_its_table() -> None:
    """Somebody has put another view in its place. The stream loads its plan again, which refuses it."""

    def act(run: Simulation) -> None:
        if run.elapsed_s < 1:
            run.change("c", len(run.topic.records))
        run.sink.fits = run.elapsed_s < 2

    run = Simulation(act, seconds=60)
    with pytest.raises(SchemaMismatch):
        run.stream.run()
    assert run.stream.progress.restarted == f"view ({ITEMS.qualified})"


@pytest.mark.parametrize("topic", [ITEMS.topic, SHOP.generations_topic])
def test_a_topic_that_acls_forbid_ends_the_stream(topic: str) -> None:
    """Nobody waits for a right that only a person can give."""

    def act(run: Simulation) -> None:
        if run.elapsed_s < 2:
            run.change("c", len(run.topic.records))
        elif run.elapsed_s > 3:
            run.ends.forbidden.add(topic)

    run = Simulation(act, seconds=60)
    with pytest.raises(KafkaForbidden):
        run.stream.run()
    assert run.elapsed_s < 5
    assert run.stream.progress.state is RunState.FAILED
    assert run.stream.progress.error == f"Kafka's ACLs don't allow Describe on the topic {topic}."
    assert run.view == run.topic.model()


def test_a_topic_that_is_not_answered_stays_reported_while_the_others_are() -> None:
    """The control topics are answered all the time, which says nothing about the table's topic."""

    def act(run: Simulation) -> None:
        run.ends.away = {ITEMS.topic} if 3 < run.elapsed_s < 33 else set()
        if 4 < run.elapsed_s < 33:
            states.add((run.stream.progress.state, run.stream.progress.error))
        if run.elapsed_s < 38:
            run.change("c", len(run.topic.records))

    states: set[tuple[RunState, str | None]] = set()
    run = Simulation(act, seconds=40)
    run.stream.run()
    assert states == {(RunState.RETRYING, "Kafka doesn't answer.")}
    assert run.stream.progress.error is None
    assert run.view == run.topic.model()
