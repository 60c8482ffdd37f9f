"""A cache whose databases others use, too: rows change places one by one, whoever is killed or writes meanwhile."""

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from unittest import mock

import pytest
import redis

import cdc.sinks.redis.positions
from cdc.errors import SinkRejected, SinkUnavailable
from cdc.model.generation import new_generation
from cdc.model.position import Position
from cdc.model.table import row_id
from cdc.redis.server import COMMANDS, position_key, view_key
from cdc.sink.contract import PositionLost
from cdc.sink.lane_run import collect_outcome
from cdc.sinks.redis import scripts
from cdc.sinks.redis.sink import Redis
from tests.contract.laws import TOPIC_ID, Harness, fill, row
from tests.support.cache import CacheServer, cache
from tests.support.envelopes import Row, table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Rows = dict[str, Row]
RIGHTS = [f"+{command}" for command in COMMANDS.split()]
USER = ["--user", "cdc", "on", ">hush-hush", "~shop:*", "~depot:*", *RIGHTS]
OTHERS = {"session:1": "another application's", "shopx:public.items:1": "another pipeline's"}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with cache(tmp_path_factory.mktemp("cache"), *USER) as url:
        yield url


@pytest.fixture(autouse=True)
def in_this_process() -> Iterator[None]:
    """Batches run without Spark, and an exchange has many steps."""
    with (
        mock.patch(
            "cdc.sinks.redis.positions.run_on_executors",
            lambda lane, records, *rest: collect_outcome(lane, records.run_here(lane), *rest),
        ),
        mock.patch.multiple(cdc.sinks.redis.positions, FIRST_ROWS=1, SLICE_ROWS=1),
    ):
        yield


class World:
    """A live view with faults, and beside it a generation without them, which is further ahead."""

    def __init__(self, url: str, prefix: str = "shop") -> None:
        self.servers = [
            redis.Redis.from_url(url.removesuffix("0") + number, decode_responses=True)
            for number in "01"
        ]
        login = url.replace("redis://", "redis://cdc:hush-hush@")
        self.harness = Harness(
            cast("SparkSession", None),
            lambda: Redis("cache", login, prefix, shared=True),
            table(f"{prefix}.items"),
        )
        self.begin = view_key(prefix, self.harness.name)
        self.position = position_key(prefix, self.harness.name)
        self.live = cast("Redis", self.harness.sink)
        fill(self.harness)
        for number in range(40):
            self.harness.topic.add("c", row(f"same {number}", number))
        self.harness.apply(writer="run")
        self.started = self.harness.position()
        for server in self.servers:
            server.mset(OTHERS)
        for faulty in (row("k1", 1, "wrong"), row("ghost", 0)):
            self.servers[0].set(self.begin + key_of(faulty), json.dumps(faulty))
        self.servers[0].delete(self.begin + key_of(row("k3", 3)))
        self.faulty = self.rows(0)
        for change in ("between", "newer"):
            self.harness.topic.add("u", row("k0", 0, change))
        self.harness.topic.add("d", row("k4", 4))
        self.harness.topic.add("c", row("k9", 9))
        self.names, build = self.harness.begin_generation()
        self.harness.apply(writer="rebuild", sink=build)
        self.built = self.rows(1)
        assert self.built == self.harness.topic.model()

    def rows(self, number: int) -> Rows:
        server = self.servers[number]
        return {
            key.removeprefix(self.begin): json.loads(cast("str", server.get(key)))
            for key in cast("list[str]", server.keys(f"{self.begin}*"))
        }

    def promote(self) -> None:
        self.writer().promote([self.harness.table], self.names)

    def writer(self) -> Redis:
        return cast("Redis", self.harness.make())

    @property
    def live_names(self) -> dict[str, str]:
        return {self.harness.name: self.live.generations(self.harness.table)[0]}

    def is_begun(self) -> bool:
        stored = self.live.position(self.harness.table)
        return stored is not None and stored.generation in self.names.values()

    def assert_readable(self) -> None:
        """Each row is of one generation, none is missing, and the position holds for all of them."""
        rows = self.rows(0)
        for key in {*rows, *self.faulty, *self.built}:
            assert rows.get(key) in (self.faulty.get(key), self.built.get(key))
        position = self.harness.position()
        if position != self.started:
            assert rows == self.built
        # So clients in other languages read it.
        texts = self.servers[0].hmget(
            self.position, *map(str, range(self.harness.topic.partitions))
        )
        assert position is not None
        assert cast("list[str]", texts) == [str(offset) for offset in position.offsets]

    def go_on(self, former: dict[str, str]) -> Rows:
        """`cdc run` applies to both generations. Returns the rows that the former one has to have then."""
        harness = self.harness
        assert self.started is not None
        run = self.writer()
        with suppress(PositionLost):
            run.prepare(harness.table)
        standby = run.for_generation(former)
        for sink in (run, standby):
            sink.prepare(harness.table)
        harness.topic.add("u", row("k0", 0, n=7), lacking=["v"])
        harness.topic.add("u", row("k1", 1, "third"))
        harness.topic.add("d", row("k5", 5))
        harness.topic.add("c", row("ghost", 0, "real"))
        harness.topic.add("c", row("k10", 10))
        for sink in (standby, run):
            harness.apply(writer="run 2", sink=sink)
        model = harness.topic.model()
        changed = {
            key_of(record.key)
            for record in harness.topic.between(self.started.offsets, harness.topic.ends)
        }
        rows = self.rows(0)
        assert {key: rows.get(key) for key in changed} == {key: model.get(key) for key in changed}
        return {k: v for k, v in self.faulty.items() if k not in changed} | {
            k: v for k, v in model.items() if k in changed
        }

    def assert_complete(self, former_rows: Rows) -> None:
        assert self.rows(0) == self.harness.topic.model()
        assert self.rows(1) == former_rows
        assert self.harness.position() == Position(TOPIC_ID, self.harness.topic.ends)
        for server in self.servers:
            assert server.mget(list(OTHERS)) == list(OTHERS.values())
            assert not server.keys(f"{self.position}:exchanged")
            assert not server.hexists(self.position, "exchange")

    def close(self) -> None:
        self.live.close()
        for server in self.servers:
            server.flushdb()
            server.close()


def key_of(row: Row) -> str:
    return row_id([row["a"], row["b"]])


class Step:
    """Something that happens once, at the script of that number which the server is sent."""

    def __init__(self, number: int, act: Callable[[], object], *, late: bool) -> None:
        self._left = number
        self._act = act
        self._late = late
        self.came = False

    @contextmanager
    def during(self) -> Iterator[None]:
        execute: Any = redis.Redis.execute_command

        def counted(server: redis.Redis, *words: Any, **options: Any) -> Any:
            if words[0] not in ("EVAL", "EVALSHA") or self.came:
                return execute(server, *words, **options)
            if self._left == 0 and not self._late:
                self.came = True
                self._act()
            answer = execute(server, *words, **options)
            if self._left == 0 and not self.came:
                self.came = True
                self._act()
            self._left -= 1
            return answer

        with mock.patch.object(redis.Redis, "execute_command", counted):
            yield


def die() -> None:
    raise redis.exceptions.ConnectionError("cut")


@contextmanager
def world(url: str, prefix: str = "shop") -> Iterator[World]:
    world = World(url, prefix)
    try:
        yield world
    finally:
        world.close()


def killed_at(url: str, number: int, *, late: bool) -> bool:
    """Kill a promotion at a step, let a run go on, and repeat the promotion. Whether the step came."""
    with world(url) as one:
        former = one.live_names
        step = Step(number, die, late=late)
        with suppress(SinkUnavailable), step.during():
            one.promote()
        one.assert_readable()
        if not one.is_begun():
            one.promote()
        former_rows = one.go_on(former)
        one.assert_complete(former_rows)
        one.promote()
        one.assert_complete(former_rows)
        one.faulty = one.rows(0)
        one.names = former
        one.promote()
        assert one.rows(0) == former_rows
        assert one.rows(1) == one.harness.topic.model()
        return step.came


@pytest.mark.parametrize("late", [False, True])
def test_a_promotion_may_be_killed_at_every_step(url: str, late: bool) -> None:
    """A run ends what was begun, and goes on with both generations. A repeated promotion has nothing to do."""
    number = 0
    while killed_at(url, number, late=late):
        number += 1
    assert number > 8


def unmarked() -> AbstractContextManager[object]:
    """Nobody asks which rows have changed places."""
    guard = " and redis.call('SADD', KEYS[2], row) == 1"
    assert guard in scripts.EXCHANGE_SOME
    return mock.patch.object(
        cdc.sinks.redis.positions, "EXCHANGE_SOME", scripts.EXCHANGE_SOME.replace(guard, "")
    )


def unasked() -> AbstractContextManager[object]:
    """A writer writes rows while others are still the former generation's."""
    return mock.patch.multiple(
        "cdc.sinks.redis.positions",
        exchange_of=lambda _: None,
        complete=lambda *_: None,
    )


def early() -> AbstractContextManager[object]:
    """The position is the new generation's before its rows are in their places."""
    return mock.patch(
        "cdc.sinks.redis.sink.shown_offsets", lambda _, candidate: candidate.position.offsets
    )


@pytest.mark.parametrize("bug", [unmarked, unasked, early])
def test_planted(url: str, bug: Callable[[], AbstractContextManager[object]]) -> None:
    with bug(), pytest.raises(AssertionError):  # noqa: PT012  # at which step is left open
        for number in range(1, 9):
            killed_at(url, number, late=True)


def test_two_pipelines_promote_at_once(url: str) -> None:
    """The one rebuilds, promotes and goes on, from any step of the other's promotion."""
    came = True
    number = 0
    while came:
        with world(url) as one, world(url, "depot") as two:

            def other(two: World = two) -> None:
                former = two.live_names
                two.promote()
                two.assert_complete(two.go_on(former))

            step = Step(number, other, late=False)
            former = one.live_names
            with step.during():
                one.promote()
            one.assert_complete(one.go_on(former))
            if step.came:
                assert two.rows(0) == two.harness.topic.model()
            came = step.came
        number += 3


def test_two_commands_complete_an_exchange_at_once(url: str) -> None:
    """As when a command is taken for dead, and goes on."""
    for number in range(1, 8, 2):
        with world(url) as one:
            former = one.live_names
            step = Step(number, one.promote, late=False)
            with step.during():
                one.promote()
            assert step.came
            one.assert_complete(one.go_on(former))


def test_who_has_not_said_that_others_are_there_is_refused(url: str) -> None:
    """Before a build, and before databases change places: `rollback` builds nothing."""
    with world(url) as one:
        tables = [one.harness.table]
        one.live.check_capacity(tables)
        sink = Redis("cache", url, "shop")
        for act in (lambda: sink.check_capacity(tables), lambda: sink.promote(tables, one.names)):
            with pytest.raises(SinkRejected, match="keys of others") as caught:
                act()
            assert "`shared: true`" in caught.value.hint
        assert one.rows(0) == one.faulty
        assert one.servers[0].mget(list(OTHERS)) == list(OTHERS.values())


def test_a_repair_completes_an_exchange_that_was_begun(url: str) -> None:
    """Its records may be older than the rows that change places."""
    with world(url) as one:
        former = one.live_names
        with pytest.raises(SinkUnavailable), Step(1, die, late=False).during():
            one.promote()
        run = one.writer()
        batch = one.harness.repair(one.harness.position(), "run 2")
        with pytest.raises(PositionLost, match="have changed places"):
            one.harness.send(batch, run)
        assert one.rows(0) == one.built
        one.harness.send(one.harness.repair(one.harness.position(), "run 2"), run)
        one.assert_complete(one.go_on(former))


def test_a_run_completes_the_exchange_of_views_that_cannot_be_compared(url: str) -> None:
    """The former view is of another topic: its rows would stay for ever beside a position that says nothing of it."""
    with world(url) as one:
        harness = one.harness
        former = one.live_names
        one.live.drop_unreferenced([harness.table], {})
        harness.topic_id = "topic-2"
        one.names, build = harness.begin_generation()
        harness.apply(writer="rebuild", sink=build)
        with pytest.raises(SinkUnavailable), Step(1, die, late=False).during():
            one.promote()
        assert "ghost" in json.dumps(one.rows(0))
        run = one.writer()
        with pytest.raises(PositionLost, match="have changed places"):
            harness.apply(writer="run 2", sink=run)
        harness.apply(writer="run 2", sink=run)
        assert one.rows(0) == harness.topic.model()
        assert harness.position() == Position("topic-2", harness.topic.ends)
        assert one.rows(1) == one.faulty
        one.promote()
        assert one.live_names == one.names != former


def test_a_run_completes_the_exchange_of_all_tables_at_once(url: str) -> None:
    """Otherwise each table would restart the stream."""
    with world(url) as one:
        more = Harness(one.harness.spark, one.harness.make, table("shop.more", "more"))
        names = {**one.names, more.name: new_generation()}
        build = one.live.for_generation(names)
        build.prepare(more.table)
        for sink in (more.sink, build):
            fill(more)
            more.apply(sink=sink)
        tables = [one.harness.table, more.table]
        with pytest.raises(SinkUnavailable), Step(1, die, late=False).during():
            one.writer().promote(tables, names)
        with pytest.raises(PositionLost):
            one.writer().prepare(tables[0])
        for each in tables:
            one.writer().prepare(each)
        assert one.rows(0) == one.built
        stored = more.sink.position(more.table)
        assert stored is not None
        assert (stored.generation, stored.position.offsets) == (names[more.name], more.topic.ends)


@pytest.mark.parametrize(("saved", "lost"), [(0, 0), (0, 6), (4, 9)])
def test_a_promotion_that_the_server_loses_is_not_reported_as_done(
    tmp_path: Path, saved: int, lost: int
) -> None:
    """As after a failover to a replica that is behind: here it comes back with what it has saved."""
    server = CacheServer(tmp_path, *USER)
    try:
        with world(server.url) as one:
            former = one.live_names
            loss = Step(lost, server.go_back, late=True)
            save = Step(saved, server.save, late=False)
            with pytest.raises(SinkUnavailable), save.during(), loss.during():
                one.promote()
            assert loss.came
            one.promote()
            one.assert_complete(one.go_on(former))
    finally:
        server.kill()


def test_a_server_that_goes_back_before_the_last_script_has_rows_left(tmp_path: Path) -> None:
    server = CacheServer(tmp_path, *USER)
    try:
        with world(server.url) as one:
            former = one.live_names
            save = Step(4, server.save, late=False)
            register = redis.Redis.register_script

            def go_back_first(client: Any, source: Any) -> Any:
                if source == scripts.SETTLE:
                    server.go_back()
                return register(client, source)

            with (
                mock.patch.object(redis.Redis, "register_script", go_back_first),
                pytest.raises(SinkUnavailable, match="became another server"),
                save.during(),
            ):
                one.promote()
            one.promote()
            one.assert_complete(one.go_on(former))
    finally:
        server.kill()
