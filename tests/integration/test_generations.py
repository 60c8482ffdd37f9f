"""The registry of generations on a real broker: one command at a time, and none forgets what isn't its own."""

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cdc.apply.stream import Environment
from cdc.config.settings import Pipeline
from cdc.errors import CdcError, SettingsError, SinkUnavailable
from cdc.generations.claim import Claim, claim
from cdc.generations.registry import (
    STALE_S,
    GenerationBuild,
    Progress,
    Registry,
    RetainedView,
    Rollback,
)
from cdc.generations.rollback import rollback, settle_rollback
from cdc.kafka.clients import kafka
from cdc.kafka.topics import Topics
from cdc.model.generation import new_generation
from cdc.model.position import Position, ViewCheckpoint
from cdc.model.table import Table
from cdc.rebuild.build import Rebuild
from cdc.sink.contract import SchemaMismatch
from cdc.sink.promotion import GenerationReplaced
from cdc.sinks.delta.sink import Delta
from cdc.sinks.memory import Memory
from tests.contract.laws import Harness, fill
from tests.support.envelopes import table
from tests.support.pipelines import with_topics
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SINK, HOUR_S = "memory", 3600.0
ITEMS = table("t.public.items")
FIRST, SECOND, THIRD = (f"20260101t00000000000{number}" for number in range(3))


@pytest.fixture
def served(stack: Any, unique: str) -> Iterator[tuple[Pipeline, Topics]]:
    tables = ("public.items", "public.orders")
    with with_topics(unique, stack.endpoints.kafka, *tables) as pipeline_and_topics:
        yield pipeline_and_topics


@pytest.fixture
def shop(served: tuple[Pipeline, Topics]) -> Pipeline:
    return served[0]


@pytest.fixture
def registry(served: tuple[Pipeline, Topics]) -> Registry:
    return Registry(*served)


def building(*names: str, phase: Any = "replay") -> GenerationBuild:
    return GenerationBuild(SINK, phase, dict.fromkeys(names, SECOND), time.time())


def retained(name: str = FIRST) -> RetainedView:
    now = time.time()
    return RetainedView(name, now + HOUR_S, now)


def won(shop: Pipeline, ready: threading.Barrier, finish: threading.Barrier) -> str:
    """Claim the sink at the same moment as others, and begin to build."""
    with Topics(shop.kafka) as topics:
        registry = Registry(shop, topics).read()
        ready.wait(120)
        try:
            with claim(registry, SINK) as lease:
                lease.announce(building("public.items"))
                finish.wait(120)
                return "won"
        except SettingsError as error:
            finish.wait(120)
            return error.message


def race(shop: Pipeline) -> list[str]:
    ready, finish = threading.Barrier(3), threading.Barrier(3)
    with ThreadPoolExecutor(3) as pool:
        return sorted(pool.map(lambda _: won(shop, ready, finish), range(3)))


def test_of_commands_begun_in_the_same_moment_one_wins(shop: Pipeline) -> None:
    lost = f"Another rebuild or rollback of {SINK} is at work."
    assert race(shop) == [lost, lost, "won"]


def test_one_that_was_killed_is_put_away(registry: Registry) -> None:
    killed_at = time.time() - STALE_S - 1
    registry.write(
        (("claim", SINK, "killed"), {"at": killed_at}),
        (("work", SINK), vars(building("public.items"))),
    )
    with claim(registry, SINK) as lease:
        assert lease.generations.claims.keys() != {"killed"}
        assert isinstance(lease.generations.work, GenerationBuild)
        wait_until(
            lambda: "killed" not in registry.read().for_sink(SINK).claims,
            30,
            "its claim to be gone",
        )


def test_one_that_was_stopped_learns_that_it_counts_as_dead(registry: Registry) -> None:
    with claim(registry, SINK) as stopped:
        (command,) = registry.read().for_sink(SINK).claims
        registry.write((("claim", SINK, command), None))
        with pytest.raises(SettingsError, match="took this one for dead"):
            stopped.announce(building("public.items", phase="promote"))


def test_a_tick_that_fails_is_not_the_last(registry: Registry) -> None:
    """A command whose ticks have ended would count as dead."""
    failures: list[str] = []

    def progress() -> Progress:
        if not failures:
            failures.append("unknown")
            raise ValueError
        return Progress(time.time(), done=7)

    def has_ticked() -> bool:
        work = registry.read().for_sink(SINK).work
        return isinstance(work, GenerationBuild) and work.done == 7

    with claim(registry, SINK) as lease:
        lease.announce(building("public.items"))
        lease.progress = progress
        wait_until(has_ticked, 15, "a tick after the one that failed")


def test_a_rebuild_of_one_table_leaves_the_way_back_of_others(registry: Registry) -> None:
    orders = retained()
    with claim(registry, SINK) as lease:
        lease.complete(
            {"public.items": retained(), "public.orders": orders}, ["public.items", "public.orders"]
        )
    with claim(registry, SINK) as lease:
        lease.announce(building("public.items"))
        lease.forget_retained(["public.items"])
        assert registry.read().for_sink(SINK).standby_names == {"public.orders": FIRST}
        lease.complete({"public.items": retained(SECOND)}, ["public.items"])
    generations = registry.read().for_sink(SINK)
    assert generations.retained["public.orders"] == orders
    assert generations.standby_names == {"public.items": SECOND, "public.orders": FIRST}
    assert generations.work is None
    assert not generations.in_progress


def test_what_is_said_every_second_is_small(shop: Pipeline, registry: Registry) -> None:
    names = [f"public.customer_order_{number:03}" for number in range(500)]
    with claim(registry, SINK) as lease, Topics(shop.kafka) as topics:
        lease.announce(building(*names))
        wait_until(
            lambda: any(
                b'"tick"' in (record.key or b"") for record in topics.read_all(registry.topic)
            ),
            30,
            "a tick",
        )
        records = topics.read_all(registry.topic)
    sizes = {json.loads(record.key or b"[]")[0]: len(record.value or b"") for record in records}
    assert sizes["work"] > 20_000
    assert sizes["tick"] < 200


class Killed(Memory):
    """Ends where a process would be killed: before readers are shown anything, or after."""

    when = "before"

    def promote(self, tables: Sequence[Table], names: Mapping[str, str]) -> Mapping[str, str]:
        if self.when == "after":
            super().promote(tables, names)
        if self.when in ("before", "after"):
            raise KeyboardInterrupt
        if self.when == "away":
            raise SinkUnavailable("It is away.", hint="wait")
        return super().promote(tables, names)


def kept_beside(registry: Registry, when: str) -> Killed:
    """A sink whose view of before is retained."""
    sink, position = Killed(SINK), Position("topic", (5,))
    previous_sink = sink.for_generation({ITEMS.qualified: FIRST})
    for view, name in ((sink, SECOND), (previous_sink, FIRST)):
        view.prepare(ITEMS)
        view.stored[ITEMS.qualified] = ViewCheckpoint(position, generation=name)
    with claim(registry, SINK) as lease:
        lease.complete({ITEMS.qualified: retained()}, [ITEMS.qualified])
    sink.when = when
    return sink


def shown_generation(sink: Memory) -> str:
    stored = sink.position(ITEMS)
    assert stored
    return stored.generation


@pytest.mark.parametrize(("when", "expected"), [("before", SECOND), ("after", FIRST)])
@pytest.mark.parametrize("retry", [settle_rollback, rollback])
def test_a_rollback_that_was_killed_is_no_rebuild(
    registry: Registry, when: str, expected: str, retry: Callable[..., object]
) -> None:
    """B9. What comes next takes back what nobody has seen yet, and ends what somebody may have seen."""
    sink = kept_beside(registry, when)
    with pytest.raises(KeyboardInterrupt):
        rollback(registry, sink, [ITEMS], HOUR_S)
    assert registry.read().for_sink(SINK).work == Rollback(SINK, {ITEMS.qualified: FIRST})
    sink.when = "never"
    retry(registry, sink, [ITEMS], HOUR_S)
    generations = registry.read().for_sink(SINK)
    assert shown_generation(sink) == (FIRST if retry is rollback else expected)
    assert generations.work is None
    # Whatever readers see now, there is a way back, and nothing else is left over.
    assert list(generations.standby_names.values()) == sink.generations(ITEMS)[1:]


def test_a_rollback_that_fails_changes_nothing(registry: Registry) -> None:
    sink = kept_beside(registry, "away")
    retained = registry.read().for_sink(SINK).retained
    with pytest.raises(CdcError):
        rollback(registry, sink, [ITEMS], HOUR_S)
    generations = registry.read().for_sink(SINK)
    assert (generations.work, generations.retained, shown_generation(sink)) == (
        None,
        retained,
        SECOND,
    )


def test_nothing_to_go_back_to(registry: Registry) -> None:
    with pytest.raises(SettingsError, match="nothing is kept") as caught:
        rollback(registry, Memory(SINK), [ITEMS], HOUR_S)
    assert caught.value.hint == f"make a new one: cdc -p FILE rebuild {SINK}"


class Warehouse:
    """A warehouse of two views, and a generation of each beside it, as current as they are."""

    def __init__(self, shop: Pipeline, spark: "SparkSession", unique: str, folder: Path) -> None:
        self.sink, self.name = Delta(SINK, str(folder), unique), new_generation()
        topics = [f"{unique}.public.{name}" for name in ("lines", "parcels")]
        with kafka.KafkaAdminClient(bootstrap_servers=shop.kafka) as admin:
            admin.create_topics(
                {topic: {"num_partitions": 2, "replication_factor": 1} for topic in topics},
                wait_for_metadata=True,
            )
        self.views = [
            Harness(spark, lambda: self.sink, table(topic, topic.rpartition(".")[2]))
            for topic in topics
        ]
        self.tables = [view.table for view in self.views]
        self.names = {view.name: self.name for view in self.views}
        build = self.sink.for_generation(self.names)
        with Topics(shop.kafka) as servers:
            ends = servers.ends(topics)
        for view in self.views:
            view.topic_id = ends[view.table.topic].topic_id
            fill(view)
            log_of(view, shop.kafka)
            view.apply()
            build.prepare(view.table)
            view.apply(writer="rebuild", sink=build)

    def folder(self, number: int, generation: str) -> Path:
        return Path(f"{self.sink.folder(self.tables[number], 'mirror')}@{generation}")

    def live_names(self) -> list[str]:
        stored = (self.sink.position(table) for table in self.tables)
        return [checkpoint.generation for checkpoint in stored if checkpoint]

    def assert_right(self, retained: Mapping[str, str]) -> None:
        standby = self.sink.for_generation(retained)
        for view in self.views:
            if view.name in retained:
                assert view.view(standby) == view.topic.model()
            assert view.view() == view.topic.model()


def log_of(view: Harness, brokers: str) -> None:
    """Have as many records in Kafka as in the harness's log: a view must not be beyond its topic's end."""
    producer = kafka.KafkaProducer(bootstrap_servers=brokers)
    for record in view.topic.records:
        producer.send(view.table.topic, key=b"k", value=b"v", partition=record.partition)
    producer.close()


@pytest.fixture
def warehouse(shop: Pipeline, spark: "SparkSession", unique: str, tmp_path: Path) -> Warehouse:
    return Warehouse(shop, spark, unique, tmp_path)


def test_a_rebuild_that_was_killed_after_its_switches_retains_what_it_replaced(
    shop: Pipeline, registry: Registry, spark: "SparkSession", warehouse: Warehouse, tmp_path: Path
) -> None:
    """Of the second view it had linked the files, and not made the table of them."""
    sink, tables = warehouse.sink, warehouse.tables
    half_made = sink.promote(tables, warehouse.names)[tables[1].qualified]
    (warehouse.folder(1, half_made) / "_delta_log").rename(tmp_path / "log")
    with claim(registry, SINK) as lease:
        lease.announce(replace(building(phase="promote"), names=warehouse.names))
    with Topics(shop.kafka) as servers:
        retained_views = Rebuild(
            partial(Environment.on_spark, spark, shop.kafka),
            shop,
            servers,
            sink,
            tables,
            describe=lambda *_: (tables, {}),
            placeholder="",
            retention_s=HOUR_S,
            verify=lambda *_: None,
            show=lambda _: None,
        ).run()
    names = {key: previous.name for key, previous in retained_views.items()}
    assert names.keys() == warehouse.names.keys()
    warehouse.assert_right(names)
    for captured in tables:
        assert sink.generations(captured) == [warehouse.name, names[captured.qualified]]


@pytest.mark.parametrize("retry", [settle_rollback, rollback])
def test_a_rollback_that_some_view_cannot_join_is_undone(
    registry: Registry,
    warehouse: Warehouse,
    monkeypatch: pytest.MonkeyPatch,
    retry: Callable[..., object],
) -> None:
    """It was killed between two switches, and the second view's standby is gone since."""
    sink, (lines, parcels) = warehouse.sink, warehouse.tables
    names = sink.promote(warehouse.tables, warehouse.names)
    retained_views = {key: retained(name) for key, name in names.items()}
    with claim(registry, SINK) as lease:
        lease.complete(retained_views, list(retained_views))
        lease.announce(Rollback(SINK, names))
    sink.promote([lines], names)
    shutil.rmtree(warehouse.folder(1, names[parcels.qualified]))
    monkeypatch.setattr("cdc.sink.promotion.SWITCH_S", 0)
    with (
        pytest.raises(SinkUnavailable, match=r"public\.parcels")
        if retry is rollback
        else nullcontext()
    ):
        retry(registry, sink, warehouse.tables, HOUR_S)
    generations = registry.read().for_sink(SINK)
    live_lines, live_parcels = warehouse.live_names()
    assert live_parcels == warehouse.name
    assert live_lines not in names.values()
    assert generations.work is None
    assert generations.retained[parcels.qualified] == retained_views[parcels.qualified]
    warehouse.assert_right({lines.qualified: generations.retained[lines.qualified].name})
    # So the rest can go back, once the second view has a generation to go back to.
    registry.forget_retained(SINK, [parcels.qualified])
    rollback(registry, sink, warehouse.tables, HOUR_S)
    assert warehouse.live_names() == [generations.retained[lines.qualified].name, warehouse.name]


class CommandStoppedError(Exception):
    """The rebuild is interrupted here."""


class Command:
    """A `cdc rebuild` of two tables, as far as it comes without Spark, and what it did."""

    def __init__(self, shop: Pipeline, unique: str, sink: Memory) -> None:
        self.tables = [table(f"{unique}.public.{name}", name) for name in ("items", "orders")]
        self.phases: list[str] = []
        """The phases that it has shown."""
        self._shop, self._sink = shop, sink

    def run(self, stop_at: str = "") -> dict[str, RetainedView]:
        """Run it, up to the beginning of a phase after the one that it finds."""

        def show(build: GenerationBuild) -> None:
            self.phases.append(build.phase)
            if self.phases[1:] == [stop_at]:
                raise CommandStoppedError

        def fail(*_: object) -> None:
            pytest.fail("It verifies.")

        no_environment: Any = None
        with Topics(self._shop.kafka) as topics:
            return Rebuild(
                no_environment,
                self._shop,
                topics,
                self._sink,
                self.tables,
                describe=lambda *_: (self.tables, {}),
                placeholder="",
                retention_s=HOUR_S,
                verify=fail,
                show=show,
            ).run()


@pytest.mark.parametrize("is_emptied", [False, True])
def test_a_rebuild_killed_once_readers_see_it_only_retains(
    shop: Pipeline, registry: Registry, unique: str, is_emptied: bool
) -> None:
    """Though a table without records has no position from which it could be seen, and a TRUNCATE gives
    a view another generation.
    """
    sink = Memory(SINK)
    command = Command(shop, unique, sink)
    items, orders = command.tables
    names = dict.fromkeys((items.qualified, orders.qualified), SECOND)
    build = sink.for_generation(names)
    for view, name in ((sink, FIRST), (build, SECOND)):
        view.prepare(items)
        view.prepare(orders)
        view.stored[items.qualified] = ViewCheckpoint(Position("topic", (5,)), generation=name)
    sink.promote(command.tables, names)
    if is_emptied:
        sink.clear(items)
        sink.stored[items.qualified] = ViewCheckpoint(Position("topic", (7,)), generation=THIRD)
    registry.write((("work", SINK), vars(building(*names, phase="promote"))))
    retained = command.run()
    assert command.phases == []
    assert {name: [view.name] for name, view in retained.items()} == {
        captured.qualified: sink.generations(captured)[1:] for captured in command.tables
    }
    assert registry.read().for_sink(SINK).work is None


class Exchanged(Memory):
    """A sink in whose place for another generation lies one of another name."""

    def position(self, table: Table) -> ViewCheckpoint | None:
        if self.generation:
            raise GenerationReplaced(table.qualified, self.generation, self.name)
        return super().position(table)

    def for_generation(self, names: Mapping[str, str]) -> Memory:
        return Exchanged(self.name, SECOND)


def test_a_rebuild_of_nothing_but_empty_tables_begins_again(
    shop: Pipeline, registry: Registry, unique: str
) -> None:
    """Nobody knows whether readers see it, and either generation is as empty."""
    command = Command(shop, unique, Exchanged(SINK))
    names = [captured.qualified for captured in command.tables]
    registry.write((("work", SINK), vars(building(*names, phase="promote"))))
    with pytest.raises(CommandStoppedError):
        command.run(stop_at="replay")


class Refusing(Memory):
    """A sink that can't hold orders."""

    def prepare(self, table: Table) -> None:
        if table.name == "orders":
            raise SchemaMismatch(table, self.name)
        super().prepare(table)

    def for_generation(self, names: Mapping[str, str]) -> Memory:
        return Refusing(self.name, SECOND)


def test_a_rebuild_ends_with_the_reason_why_a_table_is_refused(shop: Pipeline, unique: str) -> None:
    """A stream would go on with the other tables; this one waited for all."""
    command = Command(shop, unique, Refusing(SINK))
    with pytest.raises(SchemaMismatch, match=r"public\.orders"):
        command.run()
    assert set(command.phases) == {"replay"}


def test_planted_twin(shop: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry in which the last record wins: all of them go to work."""
    monkeypatch.setattr(Claim, "acquire", lambda self: None)
    monkeypatch.setattr(Claim, "check", lambda self: None)
    assert race(shop) == ["won"] * 3
