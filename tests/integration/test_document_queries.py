"""The query of a view: for random rows Postgres gives what is assembled from the state of the same
rows, text by text.
"""

import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from psycopg import sql

from cdc.codec.table import codec
from cdc.config import settings
from cdc.model.table import Column, Table, row_id
from cdc.postgres import source, table_survey
from cdc.postgres.row_query import row_query
from cdc.views.aggregates import result_type
from cdc.views.assemble import assemble
from cdc.views.plan import Node, StatePlan, View
from cdc.views.resolve import resolve_views
from cdc.views.rows import StoredRow, entry_maker
from cdc.views.sql import document_query
from tests.support.budget import SCALE
from tests.support.memory_state import MemoryState

RUNS, CHANGES = 25 * SCALE, 60
TABLES = """
CREATE SCHEMA air;
CREATE SCHEMA view;
CREATE TYPE air.mood AS ENUM ('sad', 'ok');
CREATE TABLE air.airports (
    faa varchar(3) PRIMARY KEY, name text, "Time Zone" int, is_open boolean, opened date);
CREATE TABLE air.airlines (carrier text PRIMARY KEY, name text, parent text, notes json);
CREATE TABLE air.planes (tailnum text, part int, seats smallint, weight numeric, price numeric(8,2),
    built date, mood air.mood, code char(3), PRIMARY KEY (tailnum, part));
CREATE TABLE air.flights (id bigint PRIMARY KEY, carrier text, origin varchar(3), dest text,
    tailnum text, day date, sched_dep timestamp, made_at timestamptz, delay int, distance bigint,
    fuel numeric, fare numeric(8,2), ref uuid, is_late boolean, speed double precision, extra jsonb);
CREATE TABLE air.weather (origin text, time_hour timestamp, day_hour timestamptz, temp numeric,
    wind real, PRIMARY KEY (origin, time_hour));
"""
FILE = """\
pipeline: air
kafka: localhost:9092
connect: http://localhost:8083
source: {dsn: "postgresql://localhost/air", tables: ["air.*"]}
sinks:
  cache: {type: redis, url: "redis://localhost/0", prefix: air}
state: {type: redis, url: "redis://localhost/2", prefix: air}
views:
  flight_docs:
    root: air.flights
    where: (delay > 0 OR is_late) IS NOT FALSE
    include:
      airline: {table: air.airlines, on: {carrier: carrier}, include: {
        group: {table: air.airlines, on: {parent: carrier}, columns: [name]}}}
      origin_airport: {table: air.airports, on: {origin: faa}, where: is_open}
      dest_airport: {table: air.airports, on: {dest: faa}, flatten: name}
      parts: {table: air.planes, on: {tailnum: tailnum}, many: true, order_by: [-weight, code::text], limit: 2}
      weather:
        table: air.weather
        on: {origin: origin, "date_trunc('hour', sched_dep)": time_hour}
    to: [cache]
  airport_docs:
    root: air.airports
    columns: [name]
    include:
      departures:
        table: air.flights
        on: {faa: origin}
        many: true
        order_by: [day desc, carrier, -made_at]
        limit: 3
        where: dest <> 'X' AND length(carrier) < 3
        aggregates:
          departures_count: count(*)
          delayed: count(delay)
          delay_sum: sum(delay)
          delay_mean: avg(delay)
          distance_sum: sum(distance)
          distance_mean: avg(distance)
          fuel_sum: sum(fuel)
          fuel_mean: avg(fuel)
          fuel_least: min(fuel)
          fuel_most: max(fuel)
          fare_mean: avg(fare)
          fare_most: max(fare)
          first_carrier: min(carrier)
          last_dest: max(dest)
          first_made: min(made_at)
        include:
          tail:
            table: air.planes
            on: {tailnum: tailnum}
            many: true
            flatten: seats
            aggregates: {seats_sum: sum(seats), heaviest: max(weight)}
          moods:
            {table: air.planes, on: {tailnum: tailnum}, many: true, flatten: mood, where: mood = 'ok' OR price > 7.5}
      arrivals:
        table: air.flights
        on: {faa: dest}
        many: true
        flatten: airline
        order_by: [fuel, fare, ref, is_late]
        include:
          airline: {table: air.airlines, on: {carrier: carrier}, columns: [notes, carrier]}
      next_zone:
        table: air.airports
        on: {'"Time Zone" + 1': Time Zone}
        many: true
        show: false
        aggregates: {n: count(*)}
    to: [topic]
  weather_docs:
    root: air.weather
    include:
      flights: {table: air.flights, on: {origin: origin, day_hour: "date_trunc('day', made_at)"}, many: true}
      on_the_day: {table: air.flights, on: {day_hour::date: day}, many: true, limit: 1, columns: [id, speed]}
    to: [topic]
""".replace(", code::text]", "]")  # fmt: skip
Row = dict[str, Any]
Plant = Callable[[Node], Node]


def state_of(plan: StatePlan, rows: Mapping[str, Mapping[str, Row]]) -> MemoryState:
    """The rows in memory, asked as `assemble` asks the state."""
    state = MemoryState()
    for table in plan.tables:
        entries = entry_maker(plan, table)
        columns = [column.name for column in table.columns]
        for key, row in rows[table.name].items():
            wire, key_json = (
                json.dumps({name: _wire(row[name]) for name in names}, ensure_ascii=False).encode()
                for names in (columns, table.key)
            )
            stored = StoredRow(entries(wire).encode(), key_json, wire)
            state.tables.setdefault(table.qualified, {})[key] = stored
    return state


class Numeric(str):
    __slots__ = ()


def _wire(value: Any) -> Any:
    """A value as the connector writes it."""
    if isinstance(value, Numeric):
        return {"NaN": "NAN", "Infinity": "POSITIVE_INFINITY"}.get(value, value)
    if isinstance(value, datetime) and value.tzinfo:
        return f"{value:%Y-%m-%dT%H:%M:%S.%f}Z"
    if isinstance(value, datetime):
        return (value - datetime(1970, 1, 1)) // timedelta(microseconds=1)  # noqa: DTZ001
    if isinstance(value, date):
        return (value - date(1970, 1, 1)).days
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else value


def _parameter(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else value


def random_row(chance: random.Random, name: str) -> Row:
    def some(*values: Any) -> Any:
        return chance.choice([None, *values])

    def moment() -> datetime:
        minutes = chance.choice([0, 30]) + 60 * chance.choice([0, 7, 24, 31])
        return datetime(2013, 1, 1) + timedelta(minutes=minutes)  # noqa: DTZ001

    text = some("", "a", "B", "Ä", 'q"uote\n', "🎈 back\\slash", "a{b}")
    carrier = chance.choice(["UA", "AA", "ua", "", "B6", "long"])
    airport = chance.choice(["JFK", "LGA", "X", ""])
    tail = chance.choice(["N1", "N2", "N,3"])
    texts = ("0", "1", "1.0", "1.00", "-7.5", "NaN", "12345678901234567890.123", "0.00001")
    numeric = [Numeric(text) for text in texts]
    rows: dict[str, Row] = {
        "airports": {
            "faa": airport,
            "name": text,
            "Time Zone": some(-5, -4, -3),
            "is_open": some(True, False),
            "opened": some(date(1948, 7, 1)),
        },
        "airlines": {
            "carrier": carrier,
            "name": text,
            "parent": some("UA", "AA", "none"),
            "notes": some({"b": 1, "a": [1.5, None, "x"]}, [], {"n": 10**30}),
        },
        "planes": {
            "tailnum": tail,
            "part": chance.randrange(4),
            "seats": some(2, 100, 32767),
            "weight": some(*numeric),
            "price": some(Numeric("7.50"), Numeric("8.00"), Numeric("NaN")),
            "built": some(date(2000, 2, 29)),
            "mood": some("sad", "ok"),
            "code": some("a  ", "ab ", "abc"),
        },
        "flights": {
            "id": chance.randrange(14),
            "carrier": some(carrier),
            "origin": some(airport),
            "dest": some(airport, chance.choice(["JFK", "nowhere"])),
            "tailnum": some(tail),
            "day": some(moment().date()),
            "sched_dep": some(moment(), moment()),
            "made_at": some(moment().replace(tzinfo=UTC)),
            "delay": some(-3, 0, 1, 20),
            "distance": some(1, 2, 9223372036854775807),
            "fuel": some(*numeric),
            "fare": some(Numeric("0.00"), Numeric("199.99"), Numeric("-1.50")),
            "ref": some(
                "00000000-0000-0000-0000-00000000000a", "f0000000-0000-0000-0000-000000000001"
            ),
            "is_late": some(True, False),
            "speed": some(0.1, 1e20),
            "extra": some({"k": None}),
        },
        "weather": {
            "origin": airport,
            "time_hour": moment(),
            "day_hour": some(moment().replace(tzinfo=UTC)),
            "temp": some(*numeric),
            "wind": some(0.5),
        },
    }
    return rows[name]


def fill(connection: source.Connection, tables: Mapping[str, Table], chance: random.Random) -> dict[str, dict[str, Row]]:  # noqa: E501  # fmt: skip
    """Make random rows, in Postgres and here."""
    rows: dict[str, dict[str, Row]] = {name: {} for name in tables}
    for _ in range(CHANGES):
        name = chance.choice([*tables, "flights"])
        row = random_row(chance, name)
        key = row_id([str(row[part]) if isinstance(row[part], str) else _document(row[part]) for part in tables[name].key])  # noqa: E501  # fmt: skip
        rows[name][key] = row
    for name, table in tables.items():
        identifier = sql.Identifier(table.schema, name)
        connection.execute(sql.SQL("TRUNCATE {}").format(identifier))
        places = sql.SQL(", ").join([sql.Placeholder()] * len(table.columns))
        insert = sql.SQL("INSERT INTO {} VALUES ({})").format(identifier, places)
        for row in rows[name].values():
            values = [_parameter(row[column.name]) for column in table.columns]
            connection.execute(insert, values)
    return rows


def _document(value: Any) -> Any:
    return f"{value:%Y-%m-%dT%H:%M:%S.%f}" if isinstance(value, datetime) else value


@pytest.fixture
def connection(postgres_dsn: str) -> Iterator[source.Connection]:
    with source.connect(postgres_dsn) as connection:
        connection.execute(TABLES)
        connection.execute("SET timezone = 'UTC'")
        yield connection


def views_of(
    connection: source.Connection, folder: Path
) -> tuple[tuple[View, ...], dict[str, Table]]:
    (folder / "air.yaml").write_text(FILE)
    pipeline = settings.load(folder / "air.yaml", {})
    pipeline = pipeline.with_tables([f"air.{name}" for name in ("airports", "airlines", "planes", "flights", "weather")])  # noqa: E501  # fmt: skip
    tables = table_survey.describe(connection, pipeline)
    return resolve_views(pipeline, tables), {table.name: table for table in tables}


def view_table(view: View) -> Table:
    """A view as what it is in a sink: the root's columns, aggregates, nested members as json."""
    root = view.root
    columns = [*root.shown]
    for child in root.children:
        columns += [Column(part.name, result_type(part, child.table)) for part in child.aggregates]
    columns += [Column(child.field, "json") for child in root.children if child.shows]
    return Table("view", view.name, tuple(columns), root.table.key, f"air.view.{view.name}")


def assembled(view: View, plan: StatePlan, rows: Mapping[str, Mapping[str, Row]]) -> dict[str, str]:
    """The documents of a view by id, as a sink that reads the view's topic has them."""
    state = state_of(plan, rows)
    table = codec(view_table(view))
    documents = assemble(plan, state, view, list(rows[view.root.table.name])).documents
    return {
        table.row_id(document.key): table.document(document.row).decode()
        for document in documents
        if document.row is not None
    }


def queried(view: View, connection: source.Connection) -> dict[str, str]:
    """The same from Postgres, read as `verify` reads a table."""
    connection.execute(
        f"CREATE OR REPLACE VIEW view.{view.name} AS {document_query(view)}".encode()
    )
    query = row_query(view_table(view)).as_string(None)
    return {key: text.replace("\n", " ") for key, text in connection.execute(query.encode())}


def altered(node: Node, plant: Plant) -> Node:
    """The tree with each node changed."""
    children = tuple(altered(child, plant) for child in node.children)
    return plant(replace(node, children=children))


def compared(
    connection: source.Connection, folder: Path, seed: int, plant: Plant = lambda node: node
) -> list[tuple[str, Any, Any]]:
    """The documents that differ between the state and Postgres: view, and both.

    `plant` changes what is assembled, not what Postgres is asked.
    """
    views, tables = views_of(connection, folder)
    rows = fill(connection, tables, random.Random(seed))
    plan = StatePlan(tuple(replace(view, root=altered(view.root, plant)) for view in views))
    differing, documents = [], 0
    for view, planted in zip(views, plan.views, strict=True):
        actual, expected = assembled(planted, plan, rows), queried(view, connection)
        documents += len(expected)
        differing += [
            (view.name, actual.get(key), expected.get(key))
            for key in actual.keys() | expected.keys()
            if actual.get(key) != expected.get(key)
        ]
    assert documents > 5
    return differing


@pytest.mark.parametrize("seed", range(RUNS))
def test_postgres_gives_what_is_assembled(
    connection: source.Connection, tmp_path: Path, seed: int
) -> None:
    assert compared(connection, tmp_path, seed) == []


@pytest.mark.parametrize(
    "plant",
    [
        lambda node: replace(node, order_by=()),
        lambda node: replace(node, limit=1000),
        lambda node: replace(node, where=None),
        lambda node: replace(
            node, aggregates=tuple(replace(part, function="count") for part in node.aggregates)
        ),
    ],
    ids=["order", "limit", "where", "aggregates"],
)
def test_a_wrong_document_is_found(
    connection: source.Connection, tmp_path: Path, plant: Plant
) -> None:
    assert any(compared(connection, tmp_path, seed, plant) for seed in range(5))
