"""What goes where: each sink has the tables and columns that it lists, and a list that changes is followed."""

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import deltalake
import psycopg
import pyarrow as pa
import pytest
import redis
from psycopg import sql
from psycopg.rows import dict_row

from cdc import client
from cdc.errors import SettingsError
from cdc.model.table import Table
from cdc.postgres.row_query import row_query
from cdc.sink.contract import SchemaMismatch
from cdc.verify import source_rows
from cdc.verify.comparison import Comparison, Options
from cdc.verify.repair import repair
from cdc.verify.verification import verify
from tests.support import http
from tests.support.bad_records import produce
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from tests.scenarios.conftest import World

ITEMS = "public.items"
ORDERS = "public.orders"
ROWS = 50


def list_tables(world: "World", cache: str) -> None:
    """Write the file: search has all tables, the cache what is listed."""
    world.write_file("'public.*'", sinks=("search", "cache"))
    text = world.file.read_text()
    world.file.write_text(text.replace("{type: redis,", f"{{type: redis, tables: {cache},"))


def cached(world: "World", table: str, column: str = "n") -> dict[int, Any]:
    """Return what readers of the cache see of a table: a column by `id`."""
    with redis.Redis.from_url(world.cache) as cache:
        keys = list(cache.scan_iter(f"{world.name}:{table}:*"))
        values: list[Any] = cache.mget(keys) if keys else []
    # A key may have expired since it was listed.
    rows: list[dict[str, Any]] = [json.loads(text) for text in values if text is not None]
    return {row["id"]: row[column] for row in rows}


def measured(world: "World") -> dict[str, list[str]]:
    """Return the views that `status` measures, by sink. All of them are current."""
    sinks = world.json("status")["sinks"]
    assert {view["lag_records"] for sink in sinks for view in sink["views"]} == {0}
    return {sink["name"]: [view["table"] for view in sink["views"]] for sink in sinks}


def compared(world: "World") -> set[tuple[str, str]]:
    """Return the views that `cdc verify` proves equal."""
    return {(result.sink, result.table) for result in world.verified()}


EVERYWHERE = {(sink, table) for sink in ("search", "cache") for table in (ITEMS, ORDERS)}
KEPT = f"note      {ORDERS} in cache is no longer in the file: nobody updates it"


def test_each_sink_has_the_tables_that_it_lists(world: "World") -> None:
    for table in ("items", "orders"):
        world.sql(
            f"CREATE TABLE {table} (id int PRIMARY KEY, n int)",
            f"INSERT INTO {table} SELECT i, 0 FROM generate_series(1, {ROWS}) i",
        )
    list_tables(world, "[public.items]")
    world.cdc("migrate")
    world.cdc("register")
    with world.running():
        world.settle()
        for table in ("items", "orders"):
            world.sql(
                f"UPDATE {table} SET n = 1 WHERE id > 20", f"DELETE FROM {table} WHERE id = 1"
            )
        world.settle()
        assert measured(world) == {"search": [ITEMS, ORDERS], "cache": [ITEMS]}
        assert compared(world) == EVERYWHERE - {("cache", ORDERS)}
        world.rebuild("cache")
        assert world.json("status")["findings"] == []
    assert (len(cached(world, ITEMS)), cached(world, ORDERS)) == (ROWS - 1, {})
    assert unfolded(world).startswith("nothing to do sink table columns rows change")
    refused = world.cdc("verify", "--sink", "cache", "--table", ORDERS, code=2).stderr
    assert f"{ORDERS} isn't in cache." in refused
    with pytest.raises(SettingsError, match=f"{ORDERS} isn't in cache"):
        client.view(world.file, "cache", ORDERS)

    list_tables(world, "['public.*']")
    assert f"run       make {ORDERS} in cache, from its first record on" in world.cdc("plan").stdout
    with world.running():
        world.settle()
        assert measured(world)["cache"] == [ITEMS, ORDERS]
        assert compared(world) == EVERYWHERE
    stood = cached(world, ORDERS)
    assert len(stood) == ROWS - 1

    list_tables(world, "[public.items]")
    with world.running():
        world.sql("UPDATE orders SET n = 2", "DELETE FROM orders WHERE id = 2")
        world.settle()
        assert measured(world)["cache"] == [ITEMS]
        # Readers of the table keep what they had, also when the cache is made again.
        world.rebuild("cache")
        assert compared(world) == EVERYWHERE - {("cache", ORDERS)}
    assert cached(world, ORDERS) == stood
    assert world.cdc("plan").stdout.splitlines()[:3] == [KEPT, "nothing to do", ""]

    list_tables(world, "[public.items, {table: public.orders, ttl: 1 hour}]")
    assert unfolded(world).startswith("nothing to do sink table columns rows change")
    with world.running():
        world.settle()
        assert compared(world) == EVERYWHERE
    assert cached(world, ORDERS) == dict.fromkeys(range(3, ROWS + 1), 2)
    missing_rows_have_expired_or_not(world)


def missing_rows_have_expired_or_not(world: "World") -> None:
    """By the time of their last change, which a rebuild goes by, too."""
    begin = f"{world.name}:{ORDERS}:"
    # As if the log had lost that the row was inserted again.
    deleted = [(b'{"id":6}', None)]
    with world.running():
        produce(world.stack.endpoints.kafka, f"{world.name}.{ORDERS}", deleted, partition=None)
        wait_until(lambda: 6 not in cached(world, ORDERS), 60, "the row is in the cache")
    with redis.Redis.from_url(world.cache) as cache:
        assert 0 < cache.ttl(f"{begin}3") <= 3600
        cache.delete(f"{begin}3", f"{begin}4")
        cache.set(f"{begin}1000", json.dumps({"id": 1000, "n": 1}))
        cache.set(f"{begin}5", json.dumps({"id": 5, "n": 9}))

    def found(*, lifetime: str) -> Comparison:
        list_tables(world, f"[public.items, {{table: public.orders, ttl: {lifetime}}}]")
        sinks = [sink for sink in world.sinks if sink.name == "cache"]
        tables = [table for table in world.described if table.qualified == ORDERS]
        (comparison,) = verify(world.spark, world.pipeline, tables, sinks)
        return comparison

    young = found(lifetime="1 hour")
    assert {(row.id, row.kind) for row in young.differences} == {
        ("3", "missing"),
        ("4", "missing"),
        ("5", "different"),
        ("6", "missing"),
        ("1000", "extra"),
    }
    assert young.expired == 0
    old = found(lifetime="1 second")
    assert {(row.id, row.kind) for row in old.differences} == {
        ("5", "different"),
        ("6", "missing"),
        ("1000", "extra"),
    }
    assert old.expired == 2
    world.sql("UPDATE items SET n = 3", "UPDATE orders SET n = 2 WHERE id = 6")
    with world.running():
        world.rebuild("cache")
        world.settle()
        assert compared(world) == EVERYWHERE
        assert f"{ORDERS} in cache: {ROWS - 2} rows have expired" in world.cdc("verify").stdout
    wait_until(lambda: not cached(world, ORDERS), 60, "rows of the cache have not expired")
    a_row_is_a_hash_once_its_view_is_made_again(world)


def a_row_is_a_hash_once_its_view_is_made_again(world: "World") -> None:
    list_tables(world, "[public.items, {table: public.orders, form: hash}]")
    assert goes(world)["cache", ORDERS] == ("all", "all", "rebuild")
    with world.running():
        world.rebuild("cache")
        world.sql("UPDATE orders SET n = NULL WHERE id = 3", "UPDATE orders SET n = 7 WHERE id = 4")
        world.settle()
        assert compared(world) == EVERYWHERE
        begin = f"{world.name}:{ORDERS}:"
        with redis.Redis.from_url(world.cache, decode_responses=True) as cache:
            assert [cache.hgetall(f"{begin}{number}") for number in (3, 4, 5)] == [
                {"id": "3"},
                {"id": "4", "n": "7"},
                {"id": "5", "n": "2"},
            ]
            cache.hset(f"{begin}6", "n", "8")
            cache.delete(f"{begin}7")
        wrong = json.loads(world.cdc("verify", "--sink", "cache", "--json", code=8).stdout)
        found = {row["id"]: row["kind"] for view in wrong["views"] for row in view["sample"]}
        assert found == {"6": "different", "7": "missing"}


LISTS = {
    "search": "rename: {id: key, note: text}",
    "cache": "exclude: [note], where: \"n > 5 AND note <> 'hidden'\"",
    "warehouse": "columns: [n], rename: {n: amount}, where: n <= 40",
}
KINDS = {"search": "elasticsearch", "cache": "redis", "warehouse": "delta"}
STOPPED = "was made with other columns, names, rows or form"


def write_lists(world: "World", lists: dict[str, str]) -> None:
    """Write the file: each sink has all tables, and of items this."""
    world.write_file("'public.*'")
    text = world.file.read_text()
    for sink, kind in KINDS.items():
        entry = f"{{table: public.items, {lists[sink]}}}"
        text = text.replace(f"{{type: {kind},", f"{{type: {kind}, tables: ['public.*', {entry}],")
    world.file.write_text(text)


def shown(world: "World") -> dict[str, list[dict[str, Any]]]:
    """Return the rows of items that readers see, without the pipeline's own columns, by sink."""
    with redis.Redis.from_url(world.cache) as cache:
        keys = list(cache.scan_iter(f"{world.name}:{ITEMS}:*"))
        cached_rows = [json.loads(text) for text in cache.mget(keys)] if keys else []
    index = f"{world.stack.endpoints.elasticsearch}/{world.name}-{ITEMS}"
    http.post(f"{index}/_refresh").raise_for_status()
    hits = http.get(f"{index}/_search", params={"size": 100}).raise_for_status().json()["hits"]
    mirror = deltalake.DeltaTable(str(world.warehouse / ITEMS / "mirror"))
    rows = deltalake.QueryBuilder().register("t", mirror).execute("SELECT * FROM t").read_all()
    views = {
        "search": [hit["_source"] for hit in hits["hits"]],
        "cache": cached_rows,
        "warehouse": pa.table(rows).to_pylist(),
    }
    return {
        sink: [
            {name: value for name, value in row.items() if not name.startswith("_cdc")}
            for row in view
        ]
        for sink, view in views.items()
    }


def assert_shown(world: "World", *queries: str) -> None:
    """Fail unless readers of each sink see the rows that Postgres selects for it."""
    views = shown(world)
    with psycopg.connect(world.dsn) as connection:
        cursor = connection.cursor(row_factory=dict_row)
        for sink, query in zip(KINDS, queries, strict=True):
            wanted = cursor.execute(query.encode()).fetchall()
            assert ordered(views[sink]) == ordered(wanted), sink


def ordered(rows: list[dict[str, Any]]) -> list[str]:
    return sorted(json.dumps(row, sort_keys=True) for row in rows)


def goes(world: "World") -> dict[tuple[str, str], tuple[str, str, str]]:
    """Return what `plan` says of columns, rows and the change, by sink and table."""
    return {
        (view["sink"], view["table"]): (view["columns"], view["rows"], view["effect"])
        for view in world.json("plan")["listed"]
    }


def test_each_sink_has_the_columns_names_and_rows_that_it_lists(
    world: "World", monkeypatch: pytest.MonkeyPatch
) -> None:
    world.sql(
        "CREATE TABLE items (id int PRIMARY KEY, n int, note text)",
        f"INSERT INTO items SELECT i, i, 'first' FROM generate_series(1, {ROWS}) i",
        "CREATE TABLE orders (id int PRIMARY KEY, n int)",
    )
    write_lists(world, LISTS)
    world.cdc("migrate")
    world.cdc("register")
    everything = {(sink, table) for sink in KINDS for table in (ITEMS, ORDERS)}
    as_listed = (
        "SELECT id AS key, n, note AS text FROM items",
        "SELECT id, n FROM items WHERE n > 5 AND note <> 'hidden'",
        "SELECT id, n AS amount FROM items WHERE n <= 40",
    )
    with world.running():
        world.settle()
        assert_shown(world, *as_listed)
        # Rows that come, go and get another key, for a column that the sink has, or hasn't.
        world.sql(
            "UPDATE items SET note = 'second' WHERE id > 10",
            "UPDATE items SET note = 'hidden' WHERE id = 20",
            "UPDATE items SET note = NULL WHERE id = 21",
            "UPDATE items SET n = 3 WHERE id = 22",
            "UPDATE items SET n = 100 WHERE id = 1",
            "UPDATE items SET n = NULL WHERE id = 23",
            "UPDATE items SET id = 60 WHERE id = 24",
            "UPDATE items SET id = 61, note = 'hidden' WHERE id = 25",
            "DELETE FROM items WHERE id IN (2, 26)",
            "INSERT INTO orders VALUES (1, 1)",
        )
        with psycopg.connect(world.dsn) as connection:
            client.wait_for(client.view(world.file, "cache", ITEMS), client.token(connection), 120)
        world.settle()
        assert_shown(world, *as_listed)
        assert compared(world) == everything
        planted_bugs_are_found(world, monkeypatch)
        # Another generation has the same of the table, and so has the one that comes back.
        before = cached(world, ITEMS)
        world.rebuild("cache")
        world.sql("UPDATE items SET note = 'hidden' WHERE id = 30")
        world.settle()
        world.rollback("cache")
        world.settle()
        assert cached(world, ITEMS) == {id_: n for id_, n in before.items() if id_ != 30}
        world.sql("TRUNCATE items", "INSERT INTO items VALUES (1, 1, 'a'), (2, 41, 'a')")
        world.settle()
        assert_shown(world, *as_listed)
        assert compared(world) == everything
        world.sql(
            "DELETE FROM items",
            f"INSERT INTO items SELECT i, i, 'first' FROM generate_series(1, {ROWS}) i",
        )
        world.settle()
    assert goes(world) == {
        **{(sink, ORDERS): ("all", "all", "nothing") for sink in KINDS},
        ("search", ITEMS): ("all, id as key, note as text", "all", "nothing"),
        ("cache", ITEMS): ("all but note", "n > 5 AND note <> 'hidden'", "nothing"),
        ("warehouse", ITEMS): ("id, n as amount", "n <= 40", "nothing"),
    }

    for entry, mistake in (
        ("exclude: [id]", "public.items excludes id, which is part of its key"),
        ("rename: {n: note}", "has two columns of one name after rename: note and note"),
        ("where: n > 'x'", "where: "),
    ):
        write_lists(world, {**LISTS, "cache": entry})
        assert f"In sinks.cache, {ITEMS}" in (planned := unfolded(world)), planned
        assert mistake in planned
        assert goes(world)["cache", ITEMS][2] == "refused"
    # Only the warehouse can't hold it, and `rename` is its way out.
    write_lists(world, {**LISTS, "warehouse": "rename: {n: 'the amount'}"})
    assert f"{ITEMS} can't be held by warehouse: column 'the amount' has ' '" in unfolded(world)
    assert goes(world)["warehouse", ITEMS][2] == "refused"
    said = " ".join(world.cdc("register").stderr.split())
    assert "rename: {n: NAME}} in sinks.warehouse.tables" in said

    write_lists(
        world,
        {"search": "exclude: [note]", "cache": "", "warehouse": "columns: [note], where: id <= 20"},
    )
    former = shown(world)
    for sink in KINDS:
        assert f"The view of {ITEMS} in {sink} {STOPPED}" in (planned := unfolded(world))
        assert f"cdc -p FILE rebuild {sink} --table {ITEMS}" in planned
        assert goes(world)[sink, ITEMS][2] == "rebuild"
    with world.running():
        world.sql("UPDATE items SET n = 0", "INSERT INTO orders VALUES (2, 2)")
        wait_until(
            lambda: (
                {(finding["code"], finding["sink"]) for finding in world.json("status")["findings"]}
                == {("view-stopped", sink) for sink in KINDS}
            ),
            60,
            "each view of other columns, names or rows to be reported",
        )
        assert shown(world) == former
        with pytest.raises(SchemaMismatch, match=STOPPED):
            world.verified()
        for sink in KINDS:
            world.rebuild(sink, ITEMS)
        world.settle()
        world.sql("UPDATE items SET n = 1, note = 'third' WHERE id < 5")
        world.settle()
        assert compared(world) == everything
        assert_shown(
            world,
            "SELECT id, n FROM items",
            "SELECT id, n, note FROM items",
            "SELECT id, note FROM items WHERE id <= 20",
        )
    assert unfolded(world).startswith("nothing to do sink table columns rows change")
    with world.running():
        world.sql("ALTER TABLE items RENAME note TO remark")
        wait_until(
            lambda: (
                {sink for sink, made in world.progress().items() if ITEMS in made.aside}
                == {"search", "warehouse"}
            ),
            60,
            lambda: (
                f"only the sinks whose lists name the former column to stop: {world.progress()}"
            ),
        )
        assert "names note, but has no such column" in " ".join(world.cdc("status").stdout.split())
        world.settle(sinks=["cache"])
        rows = cached(world, ITEMS, "remark")
        assert set(rows.values()) == {"first", "third"}
    assert "names note, but has no such column" in unfolded(world)
    assert "names note" in world.cdc("register", code=7).stderr


def unfolded(world: "World") -> str:
    """Return what `plan` prints, on one line."""
    return " ".join(world.cdc("plan").stdout.split())


def planted_bugs_are_found(world: "World", monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that the condition hides stay in the cache; `verify` doesn't know the warehouse's names."""
    tables = [table for table in world.described if table.qualified == ITEMS]
    with redis.Redis.from_url(world.cache) as cache:
        cache.set(f"{world.name}:{ITEMS}:20", json.dumps({"id": 20, "n": 20}))
        cache.delete(f"{world.name}:{ITEMS}:40")
    sinks = [sink for sink in world.sinks if sink.name == "cache"]
    options = Options(timeout_s=180)
    (found,) = verify(world.spark, world.pipeline, tables, sinks, options)
    assert {(row.id, row.kind) for row in found.differences} == {("20", "extra"), ("40", "missing")}
    (mended,) = repair(world.spark, world.pipeline, tables, sinks, options, [found])
    assert (mended.equal, mended.repaired) == (True, 2)
    world.settle()
    sinks = [sink for sink in world.sinks if sink.name == "warehouse"]

    def without_names(table: Table, condition: sql.Composable | None = None) -> sql.Composed:
        columns = (replace(column, name=column.source_name) for column in table.columns)
        return row_query(replace(table, columns=tuple(columns)), condition)

    def of_all_rows(table: Table, condition: sql.Composable | None = None) -> sql.Composed:
        return row_query(replace(table, where=None), condition)

    for bug, kind in ((without_names, "different"), (of_all_rows, "missing")):
        with monkeypatch.context() as planted:
            planted.setattr(source_rows, "row_query", bug)
            (found,) = verify(world.spark, world.pipeline, tables, sinks, options)
        assert {row.kind for row in found.differences} == {kind}
