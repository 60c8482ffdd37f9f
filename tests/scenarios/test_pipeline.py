"""The whole path on real servers: what was committed is what every view shows, whatever happens on the way."""

import json
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import date
from typing import TYPE_CHECKING

import deltalake
import psycopg
import redis

from cdc.apply.supervisor import supervise
from cdc.errors import CdcError, Fenced
from cdc.runtime.context import Context
from cdc.runtime.streams import Streams
from cdc.sample.load import load
from cdc.sample.replay import replay
from tests.scenarios.test_documents import states
from tests.support import http
from tests.support.comparing import assert_as_the_twin, assert_view_as_the_twin
from tests.support.load import load as writing
from tests.support.shop import read_records
from tests.support.twin import Raw
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from tests.scenarios.conftest import World

SAMPLE = ("public.flights", "public.airlines", "public.airports", "public.planes", "public.weather")
DAY = date(2013, 1, 1)
NEXT = date(2013, 1, 2), date(2013, 1, 3)
LATER = date(2013, 1, 4), date(2013, 1, 5)
ITEMS = "CREATE TABLE items (a text, b bigint, v text, n numeric(10,2), PRIMARY KEY (a, b))"


def airport(world: "World", *tables: str) -> None:
    """The sample with one day of flights, its connector running."""
    world.write_file(*tables)
    world.cdc("migrate", "--sample")
    load(world.dsn, DAY, DAY)
    world.cdc("register")


def items(world: "World") -> None:
    world.sql(ITEMS)
    world.begin("public.items")


def delta_rows(world: "World", table: str, kind: str, query: str) -> list[dict[str, object]]:
    opened = deltalake.DeltaTable(str(world.warehouse / table / kind))
    result = deltalake.QueryBuilder().register("t", opened).execute(query).read_all()
    names = result.schema.names
    return [
        dict(zip(names, row, strict=True))
        for row in zip(*(result.column(n).to_pylist() for n in names), strict=True)
    ]


def test_snapshot_and_live_changes_reach_three_views(world: "World") -> None:
    """The index's server is away meanwhile. Then the run is killed, which loses and doubles nothing."""
    airport(world, *SAMPLE)
    with world.running():
        world.settle()
        with replaying(world, NEXT, 80):
            world.stack.servers.stop("elasticsearch")
            try:
                world.wait_for("warehouse", world.offsets("warehouse") + 200)
                wait_until(
                    lambda: states(world)["search"] == "waiting", 30, "the index's stream to wait"
                )
            finally:
                world.stack.servers.start("elasticsearch")
        world.settle()
        assert world.json("status")["connector"]["state"] == "RUNNING"
        wait_until(world.is_current, 30, "no view to be behind")
    comparisons = world.compare()
    assert all(comparison.equal for comparison in comparisons)
    assert len(comparisons) == 15
    assert sum(comparison.source_rows for comparison in comparisons) > 3 * 5000
    read_by_other_clients(world)
    outlive_a_kill(world)


def read_by_other_clients(world: "World") -> None:
    """Read the views by the names of docs/use/where-a-row-is.md, with clients that know nothing of this project."""
    with psycopg.connect(world.dsn) as connection:
        names: dict[str, str] = dict(
            connection.execute("SELECT carrier, name FROM airlines").fetchall()
        )
        flights = connection.execute("SELECT count(*) FROM flights").fetchone()
    rows = delta_rows(world, "public.airlines", "mirror", "SELECT carrier, name FROM t")
    assert {row["carrier"]: row["name"] for row in rows} == names
    cache = redis.Redis.from_url(world.cache, decode_responses=True)
    assert json.loads(str(cache.get(f"{world.name}:public.airlines:UA")))["name"] == names["UA"]
    url = f"{world.stack.endpoints.elasticsearch}/{world.name}-public"
    assert http.get(f"{url}.airlines/_doc/UA").json()["_source"]["name"] == names["UA"]
    http.post(f"{url}.flights/_refresh")
    assert (http.get(f"{url}.flights/_count").json()["count"],) == flights


@contextmanager
def replaying(world: "World", days: tuple[date, date], rate: float) -> Iterator[threading.Event]:
    """Days of flights as an application writes them, for as long as the context lasts; what it gives
    is set once they are over.
    """
    over = threading.Event()

    def write() -> None:
        replay(world.dsn, *days, rate=rate, stop=over)
        over.set()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield over
    finally:
        over.set()
        writer.join()


def outlive_a_kill(world: "World") -> None:
    with world.process() as first, ExitStack() as second:
        read = world.offsets("cache")
        world.sql("UPDATE airlines SET name = 'United' WHERE carrier = 'UA'")
        world.wait_for("cache", read + 1)
        with replaying(world, LATER, 100) as over:
            world.wait_for("cache", world.offsets("cache") + 300)
            first.send_signal(signal.SIGKILL)
            first.wait()
            assert not over.is_set(), "the replay was over before the kill"
            killed_at = world.offsets("cache")
            second.enter_context(world.running())
            world.wait_for("cache", killed_at + 100)
        world.settle()
    world.assert_equal()
    placeholder = Context(world.file, world.folder).placeholder
    written = {"public.flights", "public.weather"}
    for table in (table for table in world.described if table.qualified in written):
        query = "SELECT count(*) AS n, count(DISTINCT _cdc_partition || ':' || _cdc_offset) AS distinct_n FROM t"
        (counted,) = delta_rows(world, table.qualified, "changes", query)
        topic = records(world, table.topic)
        assert counted["n"] == counted["distinct_n"] == changes(topic)
        for form in ("events", "documents"):
            assert_as_the_twin(table, topic, form, placeholder)
        assert_view_as_the_twin(table, topic, 97, placeholder)


def records(world: "World", topic: str) -> list[Raw]:
    """The records of a topic as they are."""
    committed = read_records(world.stack.endpoints.kafka, topic)
    return [Raw(r.key, r.value, topic, r.partition, r.offset) for r in committed]


def changes(topic: Sequence[Raw]) -> int:
    """Every record but the tombstones."""
    return sum(record.value is not None for record in topic)


def test_all_changes_of_a_key_in_one_transaction_and_in_one_batch(world: "World") -> None:
    items(world)
    world.sql(
        "INSERT INTO items VALUES ('gone', 1, 'x', 1)",
        "UPDATE items SET v = 'y' WHERE a = 'gone'",
        "DELETE FROM items WHERE a = 'gone'",
        "INSERT INTO items VALUES ('back', 1, 'one', 1.50)",
        "DELETE FROM items WHERE a = 'back'",
        "INSERT INTO items VALUES ('back', 1, 'two', 2.25)",
    )
    for statement in (
        "INSERT INTO items VALUES ('a\"b', 9223372036854775807, 'é', NULL)",
        "UPDATE items SET v = '' WHERE a = 'a\"b'",
        "INSERT INTO items VALUES ('moved', 1, 'x', 1)",
        "UPDATE items SET a = 'there' WHERE a = 'moved'",
        "INSERT INTO items VALUES ('brief', 1, 'x', 1)",
        "DELETE FROM items WHERE a = 'brief'",
    ):
        world.sql(statement)
    wait_until(
        lambda: len(records(world, f"{world.name}.public.items")) >= 13 + 4,
        30,
        "the changes to be in the topic, and the tombstones of deletes",
    )
    ran = {sink["sink"]: sink for sink in world.json("run", "--until-caught-up")["sinks"]}
    assert {sink["state"] for sink in ran.values()} == {"caught up"}
    assert {name: sink["applied"]["read"] for name, sink in ran.items()} == dict.fromkeys(
        ran, 13 + 4
    )
    world.assert_equal()
    rows = delta_rows(world, "public.items", "mirror", "SELECT a, b, v FROM t ORDER BY a")
    assert [(row["a"], row["b"], row["v"]) for row in rows] == [
        ('a"b', 2**63 - 1, ""),
        ("back", 1, "two"),
        ("there", 1, "x"),
    ]
    query = "SELECT _cdc_op, count(*) AS n FROM t GROUP BY 1"
    ops = {row["_cdc_op"]: row["n"] for row in delta_rows(world, "public.items", "changes", query)}
    assert ops == {"c": 7, "u": 2, "d": 4}


def test_a_second_run_on_the_same_views_is_fenced(world: "World") -> None:
    """Either may be the one that moves a position first; the other stops, and it goes on."""
    items(world)
    context = Context(world.file, world.folder)
    stopping = threading.Event()

    def work() -> list[CdcError]:
        streams = Streams(context).of_sinks(world.spark, context.sinks(["cache"]))
        return supervise(streams, stopping)

    def is_current() -> bool:
        with psycopg.connect(world.dsn) as connection:
            (row,) = connection.execute("SELECT n::text FROM items").fetchone() or (None,)
        stored = cache.get(f'{world.name}:public.items:["one",1]')
        return stored is not None and bool(json.loads(str(stored))["n"] == row)

    world.sql("INSERT INTO items VALUES ('one', 1, 'x', 1)")
    with (
        redis.Redis.from_url(world.cache, decode_responses=True) as cache,
        ThreadPoolExecutor(2) as pool,
    ):
        runs = [pool.submit(work) for _ in range(2)]
        try:
            with writing(
                world.dsn, lambda conn, _: conn.execute("UPDATE items SET n = n + 1"), 0.2
            ):
                wait_until(lambda: any(run.done() for run in runs), 120, "one to end")
            wait_until(is_current, 60, "the other to go on")
            assert [run.done() for run in runs].count(True) == 1
        finally:
            stopping.set()
        errors = [error for run in runs for error in run.result()]
    assert [type(error) for error in errors] == [Fenced]
    assert "Another writer" in errors[0].message
