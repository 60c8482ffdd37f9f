"""What only a cache meets: tasks tried again, failovers, users who may not do all, dumps, leftovers."""

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock
from urllib.parse import urlsplit

import pytest
import redis

import cdc.sinks.redis.positions
import cdc.sinks.redis.sink
from cdc.control.floors import Floors
from cdc.errors import CdcError, Fenced, SinkRejected, SinkUnavailable, ValueNotRepresentable
from cdc.kafka.log_continuity import Continuity
from cdc.kafka.log_refusals import Discontinued
from cdc.model.generation import new_generation
from cdc.model.outcome import Advance
from cdc.model.position import Position
from cdc.model.table import Column, Table, row_id
from cdc.redis.server import COMMANDS, client, position_key, view_key
from cdc.sink.contract import Outcome, PositionLost
from cdc.sink.lane import ChunkLimits
from cdc.sink.lane_run import run_in_process, run_on_executors
from cdc.sinks.redis.executor import PendingAdvance, RedisWriter
from cdc.sinks.redis.hashes import BROKEN_JSON
from cdc.sinks.redis.settings import Redis as RedisSettings
from cdc.sinks.redis.sink import Redis
from tests.contract import laws
from tests.contract.crashes import CutRedis
from tests.contract.laws import Harness, fill, fill_view, row
from tests.contract.switches import Moment
from tests.support.cache import cache
from tests.support.envelopes import table
from tests.support.pipelines import pipeline
from tests.support.proxy import Road
from tests.support.simulated import DAY_MS, MemoryLog, SimulatedClock
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="module")
def own_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server that a test may break, and has to leave whole."""
    with cache(tmp_path_factory.mktemp("cache")) as url:
        yield url


@pytest.fixture
def harness(spark: "SparkSession", unique: str, own_server: str) -> Iterator[Harness]:
    harness = harness_of(spark, unique, own_server)
    yield harness
    harness.sink.close()
    with server_at(own_server) as server:
        server.flushall()


def harness_of(spark: "SparkSession", unique: str, url: str, **settings: Any) -> Harness:
    return Harness(
        spark, lambda: Redis("cache", url, unique, **settings), table(f"{unique}.public.items")
    )


@contextmanager
def server_at(url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(url, decode_responses=True) as server:
        yield server


def assert_goes_on(harness: Harness, writer: str = "one") -> None:
    harness.topic.add("u", row("k0", 0, "later"))
    harness.apply(None, writer)
    assert harness.view() == harness.topic.model()
    assert harness.position() == Position(laws.TOPIC_ID, harness.topic.ends)


def test_who_closes_a_view_leaves_others_of_the_process_alone(
    harness: Harness, own_server: str
) -> None:
    """An application has views in several threads, on connections that they share."""
    pool = client(own_server).connection_pool
    connection = pool.get_connection()
    connection.send_command("PING")  # type: ignore[no-untyped-call]
    harness.sink.close()
    assert connection.read_response() == "PONG"
    pool.release(connection)
    connection.disconnect()  # type: ignore[no-untyped-call]


# A task that is tried again (finding 17)


@pytest.mark.parametrize(("calls", "late"), [(1, False), (1, True), (99, False)])
def test_a_task_that_is_tried_again_goes_on(harness: Harness, calls: int, late: bool) -> None:
    """It finds what its own first try has stored."""
    fill(harness)
    harness.topic.add("u", row("k0", 0), lacking=["v"])
    batch = harness.batch(None, harness.topic.ends, "one")
    writers: list[RedisWriter] = []

    def first_try(
        url: str, prefix: str, pending: Mapping[str, PendingAdvance], **_: Any
    ) -> RedisWriter:
        writers.append(RedisWriter(url, prefix, pending))
        return CutRedis(url, prefix, pending, calls=calls, late=late)

    with (
        contextlib.suppress(SinkUnavailable),
        mock.patch.object(cdc.sinks.redis.sink, "RedisWriter", first_try),
    ):
        harness.send(batch)
    applied = run_in_process(batch.lane(writers[0]), batch.records, "cache").applied[harness.name]
    assert applied.read == applied.accounted == len(harness.topic.records)
    assert harness.view() == harness.topic.model()
    assert_goes_on(harness)


def test_a_task_that_is_tried_again_rejects_nothing_for_a_later_delete(harness: Harness) -> None:
    """Its first try has stored the delete of a row that a change before it doesn't carry all of."""
    harness.topic.add("c", row("k0", 0, "first"))
    harness.apply()
    harness.topic.add("u", row("k0", 0, n=7), lacking=["v"])
    harness.topic.add("d", row("k0", 0))
    harness.topic.add("c", row("k0", 0, "again"))
    batch = harness.batch(harness.position(), harness.topic.ends, "one")
    writers: list[RedisWriter] = []

    def first_try(
        url: str, prefix: str, pending: Mapping[str, PendingAdvance], **_: Any
    ) -> RedisWriter:
        writers.append(RowByRow(url, prefix, pending))
        return CutRowByRow(url, prefix, pending, calls=2)

    with (
        pytest.raises(SinkUnavailable),
        mock.patch.object(cdc.sinks.redis.sink, "RedisWriter", first_try),
    ):
        harness.send(batch)
    assert harness.view() == {}
    outcome = run_in_process(batch.lane(writers[0]), batch.records, "cache").applied[harness.name]
    assert (outcome.quarantined, outcome.accounted) == (0, outcome.read)
    assert harness.view() == harness.topic.model()


class RowByRow(RedisWriter):
    """A writer whose calls have one row each."""

    limits = ChunkLimits(1, 10**6)


class CutRowByRow(CutRedis):
    """One that dies after some calls."""

    limits = RowByRow.limits


def test_a_repair_of_many_rows_moves_nothing(harness: Harness) -> None:
    """Nor does it where it ends between two chunks."""
    fill_view(harness)
    position = harness.position()
    for calls in (0, 1):
        cut = partial(CutRedis, calls=calls)
        with (
            pytest.raises(SinkUnavailable),
            mock.patch.object(cdc.sinks.redis.sink, "RedisWriter", cut),
        ):
            harness.send(harness.repair(position, "one"))
        assert harness.position() == position
    assert_goes_on(harness)


# Rows that expire

DAY = 86_400_000_000


@pytest.mark.parametrize("shared", [False, True])
def test_a_row_expires_a_while_after_its_last_change(
    spark: "SparkSession", unique: str, own_server: str, shared: bool
) -> None:
    """At the same time in every generation. A row that has expired isn't written, and its older state goes."""
    name = table("").qualified
    limited = harness_of(
        spark, unique, own_server, shared=shared, lifetimes_ms={name: 10 * DAY // 1000}
    )
    unlimited = harness_of(spark, unique, own_server)
    begin = view_key(unique, name)
    now_us = int(time.time() * 1_000_000)

    def ends(url: str = own_server) -> dict[str, int]:
        """When each row expires, in microseconds since 1970."""
        with server_at(url) as server:
            return {
                key.removeprefix(begin): int(server.pexpiretime(key)) * 1000
                for key in server.scan_iter(f"{begin}*")
            }

    def add(op: str, number: int, committed_us: int, *lacking: str) -> None:
        limited.topic.add(op, row("k", number), lacking, committed_us=committed_us)

    def id_of(number: int) -> str:
        return row_id(["k", number])

    unlimited.topic = limited.topic
    for number in (1, 2, 3):
        add("c", number, now_us - 11 * DAY)
    unlimited.apply(writer="before there was a ttl")
    assert set(ends().values()) == {-1000}
    add("u", 1, now_us - 3 * DAY, "v")
    add("u", 2, now_us - 10 * DAY - 1, "v")
    add("c", 4, now_us - 12 * DAY)
    for days in (9, 1):
        add("c" if days == 9 else "u", 5, now_us - days * DAY)
    applied = limited.apply()
    assert (applied.read, applied.written, applied.deleted, applied.folded) == (5, 2, 2, 1)
    assert applied.accounted == applied.read
    left = {id_of(1): now_us + 7 * DAY, id_of(5): now_us + 9 * DAY}
    assert ends() == {key: end // 1000 * 1000 for key, end in left.items()} | {id_of(3): -1000}
    add("d", 5, now_us)
    add("c", 6, now_us)
    limited.apply()
    expected = {id_of(1): now_us + 7 * DAY, id_of(6): now_us + 10 * DAY}
    in_time = {key: end // 1000 * 1000 for key, end in expected.items()}
    names, build = limited.begin_generation()
    limited.apply(writer="rebuild", sink=build)
    assert ends(own_server[:-1] + "1") == in_time
    former = limited.sink.promote([limited.table], names)
    assert ends() == in_time
    assert ends(own_server[:-1] + "1") == in_time | {id_of(3): -1000}
    limited.sink.promote([limited.table], former)
    assert ends() == in_time | {id_of(3): -1000}
    limited.sink.close()
    with server_at(own_server) as server:
        server.flushall()


# Rows as hashes

HASH_LAWS = [
    laws.every_key_has_a_row_of_its_own,
    laws.the_newest_of_a_batch_wins,
    laws.a_value_that_is_not_carried_stays,
    laws.an_unknown_value_is_refused,
    laws.a_repair_moves_nothing,
    laws.a_generation_is_built_unseen,
    laws.a_cleared_view_is_made_again,
    laws.a_removed_view_leaves_nothing_behind,
]
"""The laws in which rows are written, completed, read, removed and given to another generation."""


@pytest.mark.parametrize("law", HASH_LAWS, ids=lambda law: law.__name__)
def test_law_of_rows_as_hashes(
    own_server: str, harness: Harness, unique: str, law: Callable[[Harness], None]
) -> None:
    """By a user with the documented rights; generations change places row by row."""
    user(own_server, f"~{unique}:*", *(f"+{command}" for command in COMMANDS.split()))
    url = own_server.replace("redis://", "redis://cdc:hush-hush@")
    hashed = harness_of(harness.spark, unique, url, shared=True, hashes=frozenset({harness.name}))
    law(hashed)
    with server_at(own_server) as server:
        rows = list(server.scan_iter(f"{view_key(unique, harness.name)}*"))
        assert {server.type(key) for key in rows} <= {"hash"}
    hashed.sink.close()


def test_a_hash_that_somebody_has_overwritten_counts_as_missing(
    spark: "SparkSession", unique: str, own_server: str
) -> None:
    hashed = harness_of(spark, unique, own_server, hashes=frozenset({"public.items"}))
    fill_view(hashed)
    hashed.topic.add("u", row("k1", 1, None))
    hashed.apply()
    begin = view_key(unique, "public.items")
    key = begin + row_id(["k0", 0])
    with server_at(own_server) as server:
        assert server.hgetall(key) == {"a": "k0", "b": "0", "v": "first 0", "n": "1"}
        assert server.hgetall(begin + row_id(["k1", 1])) == {"a": "k1", "b": "1", "n": "1"}
        server.set(key, "text")
    rows = hashed.topic.model()
    assert hashed.view() == {name: value for name, value in rows.items() if value["a"] != "k0"}
    ids = [row["id"] for row in hashed.sink.scan(hashed.table, spark, list(rows)).collect()]
    assert len(ids) == len(rows) - 1
    assert isinstance(hashed.sink, Redis)
    grouped = hashed.sink.scan_group([hashed.table], spark)
    assert [(row["table"], row["id"]) for row in grouped.collect()] == [("public.items", None)]
    hashed.sink.close()
    with server_at(own_server) as server:
        server.flushall()


HALF = '"\\ud83d"'
"""Half of a character, which Postgres' json holds and no string does."""


@pytest.mark.parametrize("value", [HALF, "[" * 3000 + "]" * 3000], ids=["half", "deep"])
def test_json_that_no_hash_can_have_is_rejected_before_the_position_moves(
    spark: "SparkSession", unique: str, own_server: str, value: str
) -> None:
    """As a JSON object its row is kept."""
    columns = (Column("a", "text"), Column("b", "bigint"), Column("v", "json"))
    items = Table("public", "items", columns, ("a", "b"), f"{unique}.public.items")

    def applied(**settings: Any) -> Harness:
        harness = Harness(spark, lambda: Redis("cache", own_server, unique, **settings), items, 1)
        for number, text in enumerate(("1", value)):
            harness.topic.add("c", {"a": f"k{number}", "b": number, "v": text})
        harness.apply()
        return harness

    with pytest.raises(ValueNotRepresentable, match=f"offset 1: {BROKEN_JSON}"):
        applied(hashes=frozenset({"public.items"}))
    with server_at(own_server) as server:
        assert int(server.hget(position_key(unique, "public.items"), "0") or 0) < 2
        server.flushall()
    harness = applied()
    with server_at(own_server) as server:
        text = server.get(f"{view_key(unique, 'public.items')}{row_id(['k1', 1])}")
        assert text == f'{{"a":"k1","b":1,"v":{value}}}'
        server.flushall()
    harness.sink.close()


# A server that can't be written to for a while (finding 18)


@contextmanager
def short_of_replicas(server: redis.Redis) -> Iterator[None]:
    server.config_set("min-replicas-to-write", 1)
    try:
        yield
    finally:
        server.config_set("min-replicas-to-write", 0)


@contextmanager
def short_of_memory(server: redis.Redis) -> Iterator[None]:
    server.config_set("maxmemory", 1)
    try:
        yield
    finally:
        server.config_set("maxmemory", 0)


@contextmanager
def a_replica(server: redis.Redis) -> Iterator[None]:
    server.replicaof("127.0.0.1", "1")
    try:
        yield
    finally:
        server.replicaof("NO", "ONE")


@contextmanager
def a_stale_replica(server: redis.Redis) -> Iterator[None]:
    server.config_set("replica-serve-stale-data", "no")
    try:
        with a_replica(server):
            yield
    finally:
        server.config_set("replica-serve-stale-data", "yes")


TROUBLES = [short_of_replicas, short_of_memory, a_replica, a_stale_replica]


@pytest.mark.parametrize("trouble", TROUBLES, ids=lambda trouble: trouble.__name__)
def test_what_passes_is_waited_for(
    harness: Harness, own_server: str, trouble: Callable[[redis.Redis], Any]
) -> None:
    """On the driver, and where executors meet it first."""
    fill(harness)
    harness.apply((2, 0))
    other_table = table("other.public.items", "other")
    position, sink = harness.position(), harness.sink
    batch = harness.batch(position, harness.topic.ends, "one")
    with server_at(own_server) as server, ExitStack() as passing:
        moment = Moment(0, {run_on_executors.__name__})
        with (
            pytest.raises(SinkUnavailable),
            moment.during(lambda: passing.enter_context(trouble(server))),
        ):
            harness.send(batch)
        for act in (lambda: sink.prepare(other_table), lambda: harness.send(batch)):
            with pytest.raises(SinkUnavailable):
                act()
    harness.send(batch)
    assert harness.view() == harness.topic.model()
    assert_goes_on(harness)


def test_a_failover_is_followed(spark: "SparkSession", unique: str, tmp_path: Path) -> None:
    """The name leads to the new primary; open connections still to the old one, which is a replica by now."""
    with (
        cache(tmp_path / "a") as old_url,
        cache(tmp_path / "b") as new_url,
        server_at(old_url) as a,
        server_at(new_url) as b,
    ):
        ports = [int(urlsplit(url).port or 0) for url in (old_url, new_url)]
        road = Road(ports[0])
        harness = harness_of(spark, unique, f"redis://127.0.0.1:{road.port}/0")
        fill(harness)
        harness.apply((2, 0))
        b.replicaof("127.0.0.1", str(ports[0]))
        wait_until(
            lambda: b.info("replication").get("master_link_status") == "up", 20, "the replica"
        )
        b.replicaof("NO", "ONE")
        a.replicaof("127.0.0.1", str(ports[1]))
        road.target = ports[1]
        batch = harness.batch(harness.position(), harness.topic.ends, "one")
        for _ in range(3):
            try:
                harness.send(batch)
                break
            except SinkUnavailable:
                continue
        assert b.info("replication")["role"] == "master"
        assert_goes_on(harness)
        harness.sink.close()
        road.close()


@pytest.mark.parametrize("partitions", [(0, 1), (0,), (1,)])
def test_what_a_server_loses_before_a_batch_has_ended_is_applied_again(
    harness: Harness, own_server: str, unique: str, partitions: tuple[int, ...]
) -> None:
    """As at a failover, after executors have written rows and before the driver ends the batch."""
    fill(harness)
    harness.apply((2, 1))
    start = harness.position()
    assert start
    batch = harness.batch(start, harness.topic.ends, "one")
    with redis.Redis.from_url(own_server) as server:
        position = position_key(unique, harness.name)
        begin = view_key(unique, harness.name)
        before = {key.decode(): server.get(key) for key in server.scan_iter(f"{begin}*")}

        def lose(*arguments: Any) -> Outcome:
            outcome = run_on_executors(*arguments)
            for record in harness.topic.between(start.offsets, harness.topic.ends):
                if record.partition in partitions:
                    key = begin + row_id(list(record.key.values()))
                    server.set(key, before[key]) if key in before else server.delete(key)
            for partition in partitions:
                server.hset(position, str(partition), start.offsets[partition])
            return outcome

        with (
            pytest.raises(PositionLost),
            mock.patch.object(cdc.sinks.redis.positions, "run_on_executors", lose),
        ):
            harness.send(batch)
    assert harness.view() != harness.topic.model()
    harness.sink = harness.writer()
    assert_goes_on(harness)


def test_of_two_runs_that_take_over_from_each_other_one_is_fenced(harness: Harness) -> None:
    """The former one begins a batch, and is held up in it, while the newer one is in its first."""
    fill(harness)
    harness.apply((2, 1), "former")
    sinks = {"former": harness.sink, "newer": harness.writer()}
    fenced = []
    waiting = ["newer"]

    def run(writer: str) -> None:
        harness.topic.add("c", row(writer, len(harness.topic.records)))
        try:
            harness.apply(None, writer, sinks[writer])
        except Fenced:
            fenced.append(writer)
            del sinks[writer]
        except SinkUnavailable:
            pass

    def lane(*arguments: Any) -> Outcome:
        if waiting:
            waiting.pop()
            with mock.patch.object(cdc.sinks.redis.positions, "run_on_executors", unavailable):
                run("former")
        return run_on_executors(*arguments)

    with mock.patch.object(cdc.sinks.redis.positions, "run_on_executors", lane):
        for _ in range(3):
            for writer in ("newer", "former"):
                if writer in sinks:
                    run(writer)
    assert len(fenced) == 1
    (harness.sink,) = sinks.values()
    assert_goes_on(harness, *sinks)


def unavailable(*_: Any) -> Outcome:
    raise SinkUnavailable("It is away.", hint="wait", sink="cache")


# A user who may not do all (finding 13)


def user(own_server: str, *rules: str) -> str:
    """The URL of a user of a test's own."""
    with server_at(own_server) as server:
        server.execute_command("ACL", "SETUSER", "cdc", "reset", "on", ">hush-hush", *rules)  # type: ignore[no-untyped-call]
    return own_server.replace("redis://", "redis://cdc:hush-hush@")


@pytest.mark.parametrize("denied", [["-config"], ["-config", "-info"]])
def test_a_user_without_config_will_do(
    own_server: str, harness: Harness, unique: str, denied: list[str]
) -> None:
    limited = harness_of(harness.spark, unique, user(own_server, "~*", "+@all", *denied))
    fill(limited)
    limited.apply()
    assert limited.view() == limited.topic.model()
    limited.sink.close()


SHARED_LAWS = [
    laws.a_generation_is_built_unseen,
    laws.a_generation_that_is_behind_waits,
    laws.what_is_empty_exists,
    laws.a_removed_view_leaves_nothing_behind,
]
"""Those in which generations change places or are removed: what others have in the databases stays."""


@pytest.mark.parametrize(
    ("law", "shared"),
    [*((law, False) for law in laws.LAWS), *((law, True) for law in SHARED_LAWS)],
    ids=lambda value: getattr(value, "__name__", "shared" if value else "own"),
)
def test_law_of_a_user_with_the_documented_rights(
    own_server: str, harness: Harness, unique: str, law: Callable[[Harness], None], shared: bool
) -> None:
    """COMMANDS and the keys of the prefix, no more; by the settings `user` and `password`."""
    rights = [f"+{command}" for command in COMMANDS.split()]
    user(own_server, f"~{unique}:*", *rights)
    login = {"user": "cdc", "password": "hush-hush", "shared": shared}
    settings = RedisSettings.model_validate(
        {"type": "redis", "url": own_server, "prefix": unique, **login}
    )
    limited = Harness(
        harness.spark, lambda: settings.build("cache", unique), table(f"{unique}.public.items")
    )
    with server_at(own_server) as server, server_at(own_server[:-1] + "1") as spare:
        for database in (server, spare) if shared else ():
            database.set("session:1", "another application's")
        server.acl_log_reset()
        law(limited)
        limited.sink.close()
        assert server.acl_log() == []
        for database in (server, spare) if shared else ():
            assert database.get("session:1") == "another application's"


def test_what_evicts_is_refused_whoever_asks(
    own_server: str, harness: Harness, unique: str
) -> None:
    sink = Redis("cache", user(own_server, "~*", "+@all", "-config"), unique)
    with server_at(own_server) as server:
        server.config_set("maxmemory-policy", "allkeys-lru")
        try:
            with pytest.raises(SinkRejected, match="allkeys-lru") as caught:
                sink.prepare(harness.table)
            assert re.fullmatch(
                r"redis-cli -h 127\.0\.0\.1 -p \d+ --user cdc --askpass CONFIG SET maxmemory-policy noeviction",
                caught.value.hint,
            )
        finally:
            server.config_set("maxmemory-policy", "noeviction")
            sink.close()


def test_what_the_hint_names_is_enough(own_server: str, harness: Harness, unique: str) -> None:
    """On the driver and on executors; it names the permission, and no key, which may be personal."""
    sink = Redis("cache", user(own_server, f"~{unique}:*", "+@read"), unique)
    with pytest.raises(SinkRejected) as caught:
        sink.prepare(harness.table)
    sink.close()
    rules = caught.value.hint.split("ACL SETUSER ")[1].split("`")[0].split()[1:]
    limited = harness_of(harness.spark, unique, user(own_server, *rules))
    laws.a_generation_is_built_unseen(limited)
    batch = limited.batch(limited.position(), [end + 1 for end in limited.topic.ends], "one")
    limited.topic.add("c", row("mail@example.org", 1))
    limited.topic.add("c", row("mail@example.org", 2))
    batch = limited.batch(limited.position(), limited.topic.ends, "five")
    with (
        pytest.raises(SinkRejected) as caught,
        Moment(0, {run_on_executors.__name__}).during(lambda: user(own_server, *rules, "-mset")),
    ):
        limited.send(batch)
    assert "mset" in caught.value.message.lower()
    assert "example.org" not in f"{caught.value.message}{caught.value.hint}"
    assert "ACL SETUSER" in caught.value.hint
    limited.sink.close()


def test_a_wrong_password_is_refused(own_server: str, harness: Harness, unique: str) -> None:
    user(own_server, "~*", "+@all")
    sink = Redis("cache", own_server.replace("redis://", "redis://cdc:top-secret@"), unique)
    with pytest.raises(SinkRejected) as caught:
        sink.position(harness.table)
    assert "top-secret" not in f"{caught.value.message}{caught.value.hint}{caught.value.details}"
    sink.close()


# What others bring: a dump, another topic, tables of before


def test_a_restored_dump_goes_on_from_its_own_position(harness: Harness, own_server: str) -> None:
    """Rows and positions come back together, so what has happened since is applied again."""
    fill(harness)
    harness.apply((3, 0))
    with redis.Redis.from_url(own_server) as server:
        dumps = {key: server.dump(key) for key in server.scan_iter()}
        harness.topic.add("d", row("k4", 4))
        harness.topic.add("u", row("k0", 0, "later"))
        harness.apply()
        server.flushdb()
        for key, value in dumps.items():
            server.restore(key, 0, value)
    assert harness.position() == Position(laws.TOPIC_ID, (3, 0))
    assert harness.view() == harness.topic.model((3, 0))
    stale = harness.batch(
        Position(laws.TOPIC_ID, harness.topic.ends), [end + 1 for end in harness.topic.ends], "one"
    )
    with pytest.raises(PositionLost):
        harness.send(stale)
    harness.sink = harness.writer()
    assert_goes_on(harness, "two")


def test_a_server_that_has_lost_a_truncate_is_not_gone_on_with(
    harness: Harness, own_server: str
) -> None:
    """It has the rows from before again, with a position of the same run, which looks like a part of the batch."""
    fill(harness)
    harness.apply((3, 0))
    with redis.Redis.from_url(own_server) as server:
        dumps = {key: server.dump(key) for key in server.scan_iter()}
        harness.floors = Floors(0, {harness.name: 2})
        harness.sink.clear(harness.table)
        harness.sink.prepare(harness.table)
        batch = harness.batch(None, harness.topic.ends, "one")
        server.flushdb()
        for key, value in dumps.items():
            server.restore(key, 0, value)
    with pytest.raises(PositionLost):
        harness.send(batch)


def test_a_view_that_another_has_recreated_is_not_emptied(harness: Harness) -> None:
    """Of one that was stopped between its look at a position and what that led to."""
    fill_view(harness)
    zombie, heir = harness.writer(), harness.writer()
    zombie.position(harness.table)
    heir.clear(harness.table)
    heir.prepare(harness.table)
    harness.apply(None, "heir", heir)
    with pytest.raises(SinkUnavailable):
        zombie.clear(harness.table)
    assert harness.view() == harness.topic.model()


def test_a_colon_in_a_name_is_no_end_of_it(harness: Harness, unique: str) -> None:
    plain, odd = (
        Harness(harness.spark, harness.make, table(f"{unique}.{name}", name))
        for name in ("a", "a:b")
    )
    for prefix_harness in (plain, odd):
        fill(prefix_harness)
        prefix_harness.apply()
    assert plain.view() == plain.topic.model()
    plain.sink.clear(plain.table)
    assert odd.view() == odd.topic.model()


def other_topic(harness: Harness, end: tuple[int, ...], sink: Any) -> None:
    """The same records, from a topic that was recreated."""
    batch = harness.batch(None, end, "another")
    sink.apply(replace(batch, advances=(Advance(harness.table, None, Position("topic-2", end)),)))


def test_a_generation_of_a_new_topic_replaces_that_of_the_old(harness: Harness) -> None:
    """Its offsets are smaller, and mean nothing beside those of the old one (finding 11)."""
    fill_view(harness)
    names, build = harness.begin_generation()
    other_topic(harness, (2, 0), build)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cdc.sink.promotion.SWITCH_S", 0.5)
        harness.sink.promote([harness.table], names)
    assert harness.view() == harness.topic.model((2, 0))
    assert harness.position() == Position("topic-2", (2, 0))


def test_floors_are_compared_to_the_last_digit(harness: Harness) -> None:
    """A double doesn't tell these two apart."""
    fill(harness)
    harness.floors = Floors(1, {harness.name: 2**53 + 1})
    harness.apply()
    names, build = harness.begin_generation()
    harness.floors = Floors(1, {harness.name: 2**53})
    harness.apply(writer="another", sink=build)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cdc.sink.promotion.SWITCH_S", 0.5)
        with pytest.raises(SinkUnavailable):
            harness.sink.promote([harness.table], names)


def test_views_of_tables_that_were_removed_stay(
    harness: Harness, own_server: str, unique: str
) -> None:
    """Whichever generation readers see, and what was taken away from them doesn't come back (finding 25)."""
    fill_view(harness)
    removed = Harness(harness.spark, harness.make, table(f"{unique}.public.removed", "removed"))
    fill(removed)
    removed.apply()
    view = removed.view()
    assert view
    replaced_names = rebuilt(harness)
    assert removed.view() == view
    harness.sink.drop_unreferenced([harness.table], replaced_names)
    harness.sink.promote([harness.table], replaced_names)
    assert removed.view() == view
    with server_at(own_server) as server:
        server.delete(*server.keys(f"{unique}:public.removed:*"))
        rebuilt(harness)
        assert removed.view() == {}
        harness.sink.drop_unreferenced([harness.table], {})
        assert server.dbsize() > 0
    with server_at(own_server.removesuffix("0") + "1") as server:
        assert set(server.scan_iter()) <= {f"{unique}:_cdc", f"{unique}:_cdc:public.items"}


def test_a_table_that_is_put_back_too_late_is_refused_after_a_rebuild_too(
    harness: Harness, unique: str
) -> None:
    """A rebuild copies the views of tables that the cache doesn't list: their rows are as old as before."""
    removed = Harness(harness.spark, harness.make, table(f"{unique}.public.removed", "removed"))
    names = dict.fromkeys((harness.name, removed.name), "20200101t000000000000")
    build = harness.sink.for_generation(names)
    for each in (harness, removed):
        build.prepare(each.table)
        fill(each)
        each.apply(sink=build)
    harness.sink.promote([harness.table, removed.table], names)
    before = removed.sink.position(removed.table)
    rebuilt(harness)
    after = removed.sink.position(removed.table)
    assert before
    assert after
    assert before.position == after.position
    assert before.generation != after.generation

    topic = removed.table.topic
    shop = pipeline(unique, "postgresql://127.0.0.1:1/x", removed.name)
    clock = SimulatedClock()
    log = MemoryLog(clock)
    log.create(shop.settings_topic)
    log.create(topic, removed.topic.partitions)
    log.topics[topic].id = laws.TOPIC_ID
    removed.topic.add("d", row("k0", 0))
    clock.now = time.time() - 2 * DAY_MS / 1000
    for record in removed.topic.records:
        log.append(topic, record.partition, b"key", None)
    continuity = Continuity(shop, log).read([topic])
    for stored in (before, after):
        with pytest.raises(Discontinued, match="may have missed deletes"):
            continuity.refuse("cache", removed.table, stored)


def rebuilt(harness: Harness) -> dict[str, str]:
    names = {harness.table.qualified: new_generation()}
    harness.sink.drop_unreferenced([harness.table], names)
    build = harness.sink.for_generation(names)
    build.clear(harness.table)
    build.prepare(harness.table)
    harness.apply(writer="another", sink=build)
    return dict(harness.sink.promote([harness.table], names))


def test_a_promotion_that_is_repeated_keeps_the_empty_table_too(harness: Harness) -> None:
    """A table without records has no position that says of which generation it is."""
    sink, tables = harness.sink, [harness.table, table("other.public.empty", "empty")]
    names = dict.fromkeys((each.qualified for each in tables), new_generation())
    build = sink.for_generation(names)
    for view in (sink, build):
        for each in tables:
            view.prepare(each)
    fill_view(harness)
    harness.apply(writer="another", sink=build)
    replaced_names = sink.promote(tables, names)
    assert replaced_names.keys() == {harness.name}
    assert sink.promote(tables, names) == {}
    assert sink.generations(harness.table) == [names[harness.name], replaced_names[harness.name]]


def test_a_spare_that_the_server_lacks_is_refused(
    harness: Harness, own_server: str, unique: str
) -> None:
    sink = Redis("cache", own_server, unique, spare=99)
    for act in (
        lambda: sink.check_capacity([harness.table]),
        lambda: sink.generations(harness.table),
    ):
        with pytest.raises(SinkRejected, match="99") as caught:
            act()
        assert "spare" in caught.value.hint
    sink.close()
    misplaced = Redis("cache", own_server.rpartition("/")[0] + "/99", unique)
    with pytest.raises(SinkRejected, match="has no database 99") as caught:
        misplaced.position(harness.table)
    assert "another database in the sink's url" in caught.value.hint
    misplaced.close()


def test_a_server_behind_a_socket(spark: "SparkSession", unique: str, tmp_path: Path) -> None:
    path = tmp_path / "s"
    with cache(tmp_path, "--unixsocket", str(path)):
        harness = harness_of(spark, unique, f"unix://{path}?db=2")
        laws.a_generation_is_built_unseen(harness)
        with redis.Redis(unix_socket_path=str(path), db=2) as server:
            assert server.dbsize() > 0
        harness.sink.close()


@pytest.mark.parametrize(
    "url", ["redis://h/one", "unix:///s?db=x", "http://h:1/0", "redis://h/-1", "redis://h:port/0"]
)
def test_a_url_that_names_no_database_is_refused_with_words(url: str) -> None:
    with pytest.raises(CdcError, match="database"):
        Redis("cache", url, "prefix")
