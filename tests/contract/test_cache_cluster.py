"""A cache on a cluster: the laws of a sink, and nothing is lost when nodes go back, fail or give slots away."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from unittest import mock

import pytest
import redis

from cdc.errors import Fenced, SinkRejected, SinkUnavailable
from cdc.model.outcome import Advance
from cdc.sink.contract import PositionLost
from cdc.sink.lane import ChunkLimits, Part, Verdicts
from cdc.sink.lane_run import collect_outcome
from cdc.sinks.redis import cluster_scripts
from cdc.sinks.redis.cluster_executor import ClusterWriter
from cdc.sinks.redis.cluster_sink import ClusterPositions, ClusterRedis
from cdc.sinks.redis.executor import PendingAdvance
from cdc.sinks.redis.slots import slot_of, tags
from tests.contract import laws
from tests.contract.laws import Harness, row
from tests.support.cache import CacheServer, ClusterServers, nodes
from tests.support.envelopes import Row, table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterServers]:
    with nodes(tmp_path_factory.mktemp("cluster")) as servers:
        yield servers


@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
def test_law(law: Callable[[Harness], None], servers: ClusterServers, unique: str) -> None:
    with in_this_process():
        law(
            Harness(
                cast("SparkSession", None),
                lambda: ClusterRedis("cache", servers.url, unique),
                table(f"{unique}.public.items"),
            )
        )


class Frame:
    """What a scan reads, without Spark."""

    def __init__(
        self, _: object, read: Callable[[Any], Iterator[Any]], items: Sequence[Any]
    ) -> None:
        self.read = read
        self.items = items

    def collect(self) -> list[dict[str, str]]:
        return [line for at in self.items for batch in self.read(at) for line in batch.to_pylist()]


@contextmanager
def in_this_process() -> Iterator[None]:
    """Batches and scans run without Spark, in chunks of a few rows."""
    with (
        mock.patch("cdc.sinks.redis.sink.scan_items", Frame),
        mock.patch(
            "cdc.sinks.redis.positions.run_on_executors",
            lambda lane, records, *rest: collect_outcome(lane, records.run_here(lane), *rest),
        ),
        mock.patch.object(ClusterWriter, "limits", ChunkLimits(20, 10**6)),
    ):
        yield


class World:
    """A view on a cluster, in one partition, so that one row of each slot comes after the other."""

    def __init__(self, servers: ClusterServers, prefix: str, **options: Any) -> None:
        self.servers = servers
        self.prefix = prefix
        self.harness = Harness(
            cast("SparkSession", None),
            lambda: ClusterRedis("cache", servers.url, prefix, **options),
            table(f"{prefix}.items"),
            partitions=1,
        )
        self.reader = redis.RedisCluster(
            "127.0.0.1", servers.primaries[1].port, decode_responses=True
        )

    @property
    def sink(self) -> ClusterRedis:
        return cast("ClusterRedis", self.harness.sink)

    def begin(self) -> str:
        """What keys begin with, as any reader learns it."""
        return str(self.reader.hget(f"{self.prefix}:_cdc:catalog", self.harness.name))

    def rows(self) -> dict[str, Row]:
        begin = self.begin()
        keys = list(self.reader.scan_iter(f"{begin}*", count=1000))
        return {key.removeprefix(begin): json.loads(str(self.reader.get(key))) for key in keys}

    def change(self, version: int) -> None:
        """Change rows of all nodes. In each of three slots, one of each node, lies a row of each chunk."""
        for number in range(20):
            for slot in slots_of(self.prefix):
                name = f"{{{tags()[slot]}}}{number}"
                if (number + version) % 7 == 0:
                    self.harness.topic.add("d", row(name, number))
                else:
                    self.harness.topic.add("u", row(name, number, f"version {version}"))

    def go_on(self) -> None:
        """Apply the rest, as a stream does: again, from the position, where the cluster asks for time."""
        deadline = time.monotonic() + 60
        is_over = False
        while not is_over:
            assert time.monotonic() < deadline
            try:
                self.harness.apply(writer="run")
                is_over = self.harness.position() == self.end
            except SinkUnavailable:
                time.sleep(0.05)

    @property
    def end(self) -> Any:
        return self.harness.batch(None, self.harness.topic.ends, "").advances[0].end

    def assert_right(self) -> None:
        assert self.rows() == self.harness.topic.model()


def slots_of(prefix: str) -> list[int]:
    """A slot of each primary, other ones for each test."""
    return [node * 5461 + 1 + slot_of(prefix) % 5000 for node in range(3)]


class Moment:
    """Does something once, before a writer's call of that number, or behind the last one."""

    def __init__(self, number: int, act: Callable[[], object]) -> None:
        self.number = number
        self.act = act
        self.came = False

    @contextmanager
    def during(self) -> Iterator[None]:
        calls = iter(range(10**6))
        write = ClusterWriter.write
        finish = ClusterPositions.finish

        def writing(writer: ClusterWriter, parts: Sequence[Part]) -> Sequence[Verdicts]:
            self._act(next(calls) == self.number)
            return write(writer, parts)

        def finishing(at: ClusterPositions, pending: PendingAdvance, moved: Any) -> None:
            self._act(is_due=True)
            finish(at, pending, moved)

        with (
            mock.patch.object(ClusterWriter, "write", writing),
            mock.patch.object(ClusterPositions, "finish", finishing),
        ):
            yield

    def _act(self, is_due: bool) -> None:
        if is_due and not self.came:
            self.came = True
            self.act()


def a_node_goes_back(world: World, number: int) -> None:
    """A primary loses what it got since the last batch, in the middle of the next one."""
    world.change(1)
    world.go_on()
    world.servers.primaries[0].save()
    world.change(2)
    moment = Moment(number, lambda: world.servers.go_back(0))
    with moment.during(), suppress(SinkUnavailable):
        world.harness.apply(writer="run")
    assert moment.came
    world.go_on()


@pytest.mark.parametrize("number", [1, 9])
def test_what_a_node_has_lost_is_applied_again(
    servers: ClusterServers, number: int, unique: str
) -> None:
    with in_this_process():
        world = World(servers, unique)
        a_node_goes_back(world, number)
        world.assert_right()
        world.change(3)
        world.go_on()
    world.assert_right()


@pytest.mark.parametrize("is_idle", [False, True])
def test_a_position_that_a_node_has_lost_is_read(
    servers: ClusterServers, is_idle: bool, unique: str
) -> None:
    """A whole batch is lost on one node. The next run finds it, whether it has changes or not."""
    with in_this_process():
        world = World(servers, unique)
        world.change(1)
        world.go_on()
        servers.primaries[2].save()
        world.change(2)
        world.go_on()
        position = world.harness.position()
        servers.go_back(2)
        assert world.harness.position() != position
        if not is_idle:
            world.change(3)
        world.harness.sink = world.harness.writer()
        world.go_on()
    world.assert_right()


PLANTED = [
    ("TAKE", "if at('history') == history() then trusted = at('trusted') end", "trusted = '0'"),
    ("MOVE", "at[3] ~= history()", "false"),
]


@pytest.mark.parametrize(("script", "guard", "instead"), PLANTED)
def test_planted_a_node_that_goes_back_unnoticed(
    servers: ClusterServers, script: str, guard: str, instead: str, unique: str
) -> None:
    source: str = getattr(cluster_scripts, script)
    assert guard in source
    loose = source.replace(guard, instead)
    with in_this_process(), mock.patch(f"cdc.sinks.redis.cluster_sink.{script}", loose):
        world = World(servers, unique)
        a_node_goes_back(world, 1)
    with pytest.raises(AssertionError):
        world.assert_right()


def test_a_catalog_that_is_lost_is_made_again(servers: ClusterServers, unique: str) -> None:
    """The view is made from the log then. What lay on other nodes is removed."""
    with in_this_process():
        world = World(servers, unique)
        world.change(1)
        world.go_on()
        former = world.begin()
        world.reader.delete(f"{unique}:_cdc:catalog")
        with pytest.raises(PositionLost):
            world.harness.apply(writer="run")
        world.sink.clear(world.harness.table)
        world.go_on()
        world.assert_right()
    assert world.begin() != former
    assert list(world.reader.scan_iter(f"{former}*")) == []


class Hasty(ClusterPositions):
    """Moves the position before the rows of all slots are written."""

    def take(self, advance: Advance, writer: str) -> PendingAdvance | None:
        pending = super().take(advance, writer)
        if pending:
            self.finish(pending, ())
        return pending


def die(*_: object) -> None:
    raise SinkUnavailable("cut", hint="", sink="cache")


@pytest.mark.parametrize("positions", [ClusterPositions, Hasty])
def test_a_position_comes_after_the_rows_of_all_slots(
    servers: ClusterServers, positions: type[ClusterPositions], unique: str
) -> None:
    with in_this_process():
        world = World(servers, unique)
        world.change(1)
        world.go_on()
        world.change(2)
        with (
            mock.patch("cdc.sinks.redis.cluster_sink.ClusterPositions", positions),
            mock.patch.object(ClusterWriter, "write", die),
        ):
            world.harness.sink = world.harness.writer()
            with pytest.raises(SinkUnavailable):
                world.harness.apply(writer="run")
        world.harness.sink = world.harness.writer()
        world.go_on()
    if positions is Hasty:
        with pytest.raises(AssertionError):
            world.assert_right()
    else:
        world.assert_right()


def test_a_slot_that_moves_under_load(servers: ClusterServers, unique: str) -> None:
    slot = slots_of(unique)[0]
    with in_this_process():
        world = World(servers, unique)
        version = 1
        for source, target in ((0, 1), (1, 0)):
            world.change(version)
            world.go_on()
            for _ in servers.move_slot(slot, source, target):
                version += 1
                world.change(version)
                # A script waits until the slot has all of its keys on one node.
                with suppress(SinkUnavailable):
                    world.harness.apply(writer="run")
            world.go_on()
            world.assert_right()


def test_readers_never_miss_a_row(servers: ClusterServers, unique: str) -> None:
    """Through a rebuild, the switch, the way back and the removal of what was replaced."""
    with in_this_process():
        world = World(servers, unique)
        for number in range(30):
            world.harness.topic.add("c", row(f"k{number}", number))
        world.go_on()
        ids = list(world.harness.topic.model())
        over = threading.Event()
        found: list[object] = []

        def read() -> None:
            while not over.is_set():
                for row_id in ids:
                    value: object = None
                    begin = ""
                    while value is None and begin != (begin := world.begin()):
                        value = world.reader.get(begin + row_id)
                    found.append(value)

        thread = threading.Thread(target=read)
        thread.start()
        try:
            names, build = world.harness.begin_generation()
            world.harness.apply(writer="rebuild", sink=build)
            captured = world.harness.table
            before = world.sink.promote([captured], names)
            world.harness.topic.add("u", row("k1", 1, "second"))
            for sink in (world.sink.for_generation(before), world.sink):
                world.harness.apply(writer="run", sink=sink)
            world.sink.promote([captured], before)
            world.sink.drop_unreferenced([captured], {})
            world.assert_right()
        finally:
            over.set()
            thread.join()
    assert len(found) > len(ids)
    assert None not in found
    assert world.sink.generations(captured) == list(before.values())


def test_pipelines_share_a_cluster(servers: ClusterServers, unique: str) -> None:
    with in_this_process():
        worlds = [World(servers, f"{unique}{letter}") for letter in "ab"]
        for number, world in enumerate(worlds):
            world.change(number + 1)
            world.go_on()
        worlds[0].sink.remove([worlds[0].harness.table])
        assert worlds[0].sink.remains([worlds[0].harness.table]) == []
        worlds[1].assert_right()


def test_forms_of_rows(servers: ClusterServers, unique: str) -> None:
    name = "public.items"
    with in_this_process():
        world = World(servers, unique, hashes=frozenset([name]), lifetimes_ms={name: 3_600_000})
        world.harness.topic.add("c", row("k", 1, "v", None), committed_us=time.time_ns() // 1000)
        world.go_on()
    key = world.begin() + '["k",1]'
    assert world.reader.hgetall(key) == {"a": "k", "b": "1", "v": "v"}
    assert 0 < world.reader.pttl(key) <= 3_600_000


def test_a_replica_that_takes_over_without_the_last_writes(tmp_path: Path, unique: str) -> None:
    with nodes(tmp_path, replicas=True) as servers, in_this_process():
        world = World(servers, unique)
        world.change(1)
        world.go_on()
        primary = servers.primaries[0]
        replica = servers.replicas[0]
        until_equal(primary, replica)
        # It can't follow its primary any more.
        config(replica, "masterauth", "wrong")
        with redis.Redis.from_url(primary.url) as server:
            server.execute_command("CLIENT", "KILL", "TYPE", "replica")
        world.change(2)
        world.go_on()
        world.assert_right()
        primary.kill()
        servers.promote(0)
        world.change(3)
        world.go_on()
        world.assert_right()


def until_equal(primary: CacheServer, replica: CacheServer) -> None:
    with redis.Redis.from_url(primary.url) as server:
        server.wait(1, 10_000)


def config(server: CacheServer, name: str, value: str) -> None:
    with redis.Redis.from_url(server.url) as node:
        node.config_set(name, value)


def test_what_is_no_cluster_is_refused_by_name(tmp_path: Path, unique: str) -> None:
    server = CacheServer(tmp_path)
    try:
        sink = ClusterRedis("cache", f"{server.url}?cluster=true", unique)
        with pytest.raises(SinkRejected, match="is no node of a cluster"):
            sink.position(table(f"{unique}.items"))
    finally:
        server.kill()


def test_a_late_writer_takes_nothing_back(servers: ClusterServers, unique: str) -> None:
    """It goes on with its batch when another has taken its place, and has applied more."""
    with in_this_process():
        world = World(servers, unique)
        heir = world.harness.writer()

        def go_on() -> None:
            world.change(2)
            world.harness.apply(writer="heir", sink=heir)

        world.change(1)
        late = Moment(1, go_on)
        with pytest.raises(Fenced), late.during():
            world.harness.apply(writer="zombie")
    world.assert_right()
