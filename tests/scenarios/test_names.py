"""Names of tables and columns that Postgres takes: carried exactly through all three sinks, or
refused by name.

Postgres says what the views must hold (`cdc.verify`); rows are looked at by their readers' own
means as well.
"""

import json
from typing import TYPE_CHECKING, Any

from psycopg import sql

from cdc.kafka.topics import Topics
from cdc.model.position import Reach, distance
from cdc.postgres import source, table_survey
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from tests.scenarios.conftest import World

LONG = "x" * 63
# Each a name that some part of the way could take for something else: SQL, JSON, Spark, Parquet,
# regular expressions, Elasticsearch's dots, format strings, YAML, our own columns on the way.
CARRIED = (
    *(
        'quo"te', "apo'strophe", "back`tick", "back\\slash", "per%cent", "%s", "co:lon", "dot.ted", "dol$lar", "$1",
    ),
    *(
        "*", "sla/sh", "ha#sh", "st*r", "que?", "[x]", "<x>", "a|b", "^", "@", "&amp", "!", "~", "-", "+1", "1st",
        "cr\rx",
    ),
    *(
        "order", "select", "user", "table", "null", "true", "Mixed", "straße", "日本", "\U0001f600",
        "nb\u00a0sp", "_foo",
    ),
    *(
        "key", "value", "topic", "offset", "partition", "after", "op", "document", "record", "problem", "s", "t", "row",
    ),
    *("item", "element", "metadata", "col", "properties", "type", "envelope", "e\u0301", LONG),
)  # fmt: skip
# What a Delta table or an index can't have, by table; the way out is `rename` or `exclude` of that sink.
UNFIT: dict[str, tuple[str, ...]] = {
    "spaced": (
        "order date", " lead", "trail ", "x, y", "a;b", "{", "a(b)", "a=b", "tab\tx", "new\nline", " ",
    ),
    "own": (
        "_id", "_source", "_version", "_routing", "_index", "_seq_no", "_primary_term", ".lead", "a..b", "_metadata",
    ),
    "within": ("id.x",),
}  # fmt: skip
# What no view can have; the way out is `exclude` of the source.
RESERVED = ("_cdc_id", "_CDC")


def create(schema: str, table: str, key: str, *columns: str) -> sql.Composed:
    listed = sql.SQL(", ").join(sql.SQL("{} text").format(sql.Identifier(name)) for name in columns)
    return sql.SQL("CREATE TABLE {} ({} int PRIMARY KEY, day date, {})").format(
        sql.Identifier(schema, table), sql.Identifier(key), listed
    )


def insert(schema: str, table: str, columns: tuple[str, ...], row: int) -> sql.Composed:
    values = sql.SQL(", ").join(
        sql.Literal(f"{index}: {name}") for index, name in enumerate(columns)
    )
    return sql.SQL("INSERT INTO {} VALUES ({}, '0044-03-15 BC', {})").format(
        sql.Identifier(schema, table), sql.Literal(row), values
    )


TABLES: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("public", "Orders", 'Key"of"it\'s', CARRIED),
    ("public", "order-items", "dot.ted", ("Mixed", "x")),
    ("_Odd-schema", "-t_", "select", ("from",)),
    ("public", "T" * 63, LONG, ("v",)),
    *(("public", name, "id", ("kept", *columns)) for name, columns in UNFIT.items()),
    ("public", "reserved", "id", ("kept", *RESERVED)),
)


def entry(schema: str, table: str, **more: Any) -> str:
    return json.dumps({"table": f"{schema}.{table}", "partitions": 1, **more})


def run(world: "World", *statements: sql.SQL | sql.Composed) -> None:
    with source.connect(world.dsn) as connection, connection.transaction():
        for statement in statements:
            connection.execute(statement)


def change(world: "World", schema: str, table: str, key: str, column: str) -> None:
    """An update, a delete, a row that gets another key."""
    name, place, value = sql.Identifier(schema, table), sql.Identifier(key), sql.Identifier(column)
    run(
        world,
        sql.SQL("UPDATE {} SET {} = 'other' WHERE {} = 1").format(name, value, place),
        sql.SQL("DELETE FROM {} WHERE {} = 2").format(name, place),
        sql.SQL("UPDATE {} SET {} = 7 WHERE {} = 3").format(name, place, place),
    )


def aside(world: "World", sink: str) -> dict[str, list[str]]:
    """Return what the run says of tables that wait for somebody, by table."""
    states = world.progress()
    return states[sink].aside if sink in states else {}


def level(world: "World", sink: str, name: str) -> bool:
    """Whether one table's view has all that its topic has now."""
    (built,) = (candidate for candidate in world.sinks if candidate.name == sink)
    table = table_survey.table_named(world.described, name)
    with Topics(world.pipeline.kafka) as kafka:
        return (
            distance(built.position(table), kafka.ends([table.topic])[table.topic]).reach
            is Reach.REACHED
        )


def test_every_name_is_carried_or_refused(world: "World") -> None:
    """In small mirrors; `tests/contract/test_names.py` carries the same names into large ones."""
    run(world, sql.SQL('CREATE SCHEMA "_Odd-schema"'))
    for schema, table, key, columns in TABLES:
        run(world, create(schema, table, key, *columns))
        run(world, *(insert(schema, table, columns, row) for row in range(6)))
    # Names that the connector takes for one; and tables beside that are nobody's business.
    run(
        world,
        create("public", "cased", "id", "name", "Name"),
        create("public", "beside", "id", "name", "Name"),
    )
    run(world, create("public", "orders", "id", "x"))

    # What no sink can have is refused as a whole, with the entry that leaves it out.
    world.write_file(
        entry("public", "cased"), *(entry(schema, table) for schema, table, _, _ in TABLES)
    )
    for verb in ("migrate", "register"):
        message = "".join(world.cdc(verb, code=4).stderr.split())
        assert "{table:public.reserved,exclude:[_cdc_id,_CDC]}" in message
        assert "public.cased" in message
        assert "ALTERTABLEpublic.casedRENAMECOLUMN" in message
        assert not any(f"public.{table}" in message for table in ("Orders", "spaced", "own"))

    # What one sink can't have is that sink's matter, every table and column by name.
    tables = [
        entry(schema, table, exclude=RESERVED if table == "reserved" else ())
        for schema, table, _, _ in TABLES
    ]
    world.write_file(*tables)
    world.cdc("migrate")
    message = "".join(world.cdc("register").stderr.split())
    for table, columns in UNFIT.items():
        assert f"{{table:public.{table},rename:{{" in message
        listed = json.dumps(columns, ensure_ascii=False)[1:-1].replace(" ", "").replace('"', "")
        assert all(name in message.replace('"', "") for name in listed.split(",")), table
    assert "public.Orders,rename" not in message
    rename_in_sinks(world)
    with world.running():
        world.settle()
        for schema, table, key, columns in TABLES:
            change(world, schema, table, key, columns[0])
        world.settle()
        world.assert_equal()
        a_name_that_comes_later(world)


def rename_in_sinks(world: "World") -> None:
    """Write into the file what `register` has said, with a name for each column."""
    text = world.file.read_text()
    for sink, kind in (("search", "elasticsearch"), ("warehouse", "delta")):
        listed: list[Any] = ["*.*"]
        for table, columns in UNFIT.items():
            names = {column: f"column {n}" for n, column in enumerate(columns)}
            if sink == "warehouse":
                names = {column: name.replace(" ", "_") for column, name in names.items()}
            listed.append({"table": f"public.{table}", "rename": names})
        text = text.replace(f"{{type: {kind},", f"{{type: {kind}, tables: {json.dumps(listed)},")
    world.file.write_text(text)


def a_name_that_comes_later(world: "World") -> None:
    """A later name sets its table aside, alone, in sinks that can't hold it; another name brings the table back."""
    items, orders = sql.Identifier("public", "order-items"), sql.Identifier("public", "Orders")
    run(world, sql.SQL("ALTER TABLE {} ADD COLUMN _id text").format(items))
    run(
        world,
        sql.SQL("ALTER TABLE {} ADD COLUMN _cdc_id text").format(
            sql.Identifier("_Odd-schema", "-t_")
        ),
    )
    wait_until(
        lambda: len(aside(world, "search")) == 2, 60, "two tables to be set aside in the index"
    )
    reason, hint = aside(world, "search")["public.order-items"]
    assert "column _id has the name of a field of Elasticsearch's own" in reason
    assert "rename: {_id: NAME}} in sinks.search.tables" in hint
    assert "column _cdc_id" in aside(world, "search")["_Odd-schema.-t_"][0]
    run(
        world,
        sql.SQL("""UPDATE {} SET "Mixed" = 'later', _id = 'x'""").format(items),
        sql.SQL("""UPDATE {} SET "order" = 'later'""").format(orders),
    )
    run(
        world,
        sql.SQL("ALTER TABLE {} DROP COLUMN _cdc_id").format(sql.Identifier("_Odd-schema", "-t_")),
    )
    for sink, name in (
        ("search", "public.Orders"),
        ("cache", "public.order-items"),
        ("warehouse", "public.order-items"),
    ):
        wait_until(lambda sink=sink, name=name: level(world, sink, name), 60, f"{name} in {sink}")  # type: ignore[misc]
    assert aside(world, "cache").keys() <= {"_Odd-schema.-t_"}
    run(world, sql.SQL("ALTER TABLE {} RENAME COLUMN _id TO own_id").format(items))
    world.settle()
    world.assert_equal()
    wait_until(lambda: not aside(world, "search"), 60, "nothing to be aside")
