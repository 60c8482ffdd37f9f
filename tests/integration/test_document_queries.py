"""The query of a view: for random rows Postgres gives what is sent from the state of the same rows, text
by text.
"""

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest

from cdc.documents.plan import Node, StatePlan
from tests.support.budget import SCALE
from tests.support.document_history import History

RUNS, CHANGES = 25 * SCALE, 60
TABLES = """
CREATE TYPE lib.mood AS ENUM ('sad', 'ok');
CREATE TABLE lib.airports (
    faa varchar(3) PRIMARY KEY, name text, "Time Zone" int, is_open boolean, opened date);
CREATE TABLE lib.airlines (carrier text PRIMARY KEY, name text, parent text, notes json);
CREATE TABLE lib.planes (tailnum text, part int, seats smallint, weight numeric, price numeric(8,2),
    built date, mood lib.mood, code char(3), PRIMARY KEY (tailnum, part));
CREATE TABLE lib.flights (id bigint PRIMARY KEY, carrier text, origin varchar(3), dest text,
    tailnum text, day date, sched_dep timestamp, made_at timestamptz, delay int, distance bigint,
    fuel numeric, fare numeric(8,2), ref uuid, is_late boolean, speed double precision, extra jsonb);
CREATE TABLE lib.weather (origin text, time_hour timestamp, day_hour timestamptz, temp numeric,
    wind real, PRIMARY KEY (origin, time_hour));
"""
KEYS = {
    "airports": ["faa"],
    "airlines": ["carrier"],
    "planes": ["tailnum", "part"],
    "flights": ["id"],
    "weather": ["origin", "time_hour"],
}
"""Each table's first columns."""
VIEWS = """\
  flight_docs:
    root: lib.flights
    where: (delay > 0 OR is_late) IS NOT FALSE
    include:
      airline: {table: lib.airlines, on: {carrier: carrier}, include: {
        group: {table: lib.airlines, on: {parent: carrier}, columns: [name]}}}
      origin_airport: {table: lib.airports, on: {origin: faa}, where: is_open}
      dest_airport: {table: lib.airports, on: {dest: faa}, flatten: name}
      parts: {table: lib.planes, on: {tailnum: tailnum}, many: true, order_by: [-weight], limit: 2}
      weather:
        table: lib.weather
        on: {origin: origin, "date_trunc('hour', sched_dep)": time_hour}
    to: [topic]
  airport_docs:
    root: lib.airports
    columns: [name]
    include:
      departures:
        table: lib.flights
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
            table: lib.planes
            on: {tailnum: tailnum}
            many: true
            flatten: seats
            aggregates: {seats_sum: sum(seats), heaviest: max(weight)}
          moods:
            {table: lib.planes, on: {tailnum: tailnum}, many: true, flatten: mood, where: mood = 'ok' OR price > 7.5}
      arrivals:
        table: lib.flights
        on: {faa: dest}
        many: true
        flatten: airline
        order_by: [fuel, fare, ref, is_late]
        include:
          airline: {table: lib.airlines, on: {carrier: carrier}, columns: [notes, carrier]}
      next_zone:
        table: lib.airports
        on: {'"Time Zone" + 1': Time Zone}
        many: true
        show: false
        aggregates: {n: count(*)}
    to: [topic]
  weather_docs:
    root: lib.weather
    include:
      flights: {table: lib.flights, on: {origin: origin, day_hour: "date_trunc('day', made_at)"}, many: true}
      on_the_day: {table: lib.flights, on: {day_hour::date: day}, many: true, limit: 1, columns: [id, speed]}
    to: [topic]
"""
Plant = Callable[[Node], Node]


def random_row(chance: random.Random, name: str) -> list[Any]:
    def some(*values: Any) -> Any:
        return chance.choice([None, *values])

    def moment() -> datetime:
        minutes = chance.choice([0, 30]) + 60 * chance.choice([0, 7, 24, 31])
        return datetime(2013, 1, 1) + timedelta(minutes=minutes)  # noqa: DTZ001

    texts = ("", "a", "B", "Ä", 'q"uote\n\t', "🎈 back\\slash", "{%b}%s", "sep\x1e\x1f\x1d\x1b")
    text = some(*texts, "null")
    carrier = chance.choice(["UA", "AA", "ua", "", " ", "null", "B6", "long"])
    airport = chance.choice(["JFK", "LGA", "X", ""])
    tail = chance.choice(["N1", "N2", "N,3"])
    numbers = ("0", "1", "1.0", "1.00", "-7.5", "NaN", "12345678901234567890.123", "0.00001")
    rows = {
        "airports": [
            airport,
            text,
            some(-5, -4, -3),
            some(True, False),
            some(date(1948, 7, 1)),
        ],
        "airlines": [
            carrier,
            text,
            some("UA", "AA", "none"),
            some(
                '{"b": 1, "a": [1.5, null, "x"]}',
                "[]",
                f'{{"n": {10**30}.123456789, "z": 1.00, "e": 1e400}}',
            ),
        ],
        "planes": [
            tail,
            chance.randrange(4),
            some(2, 100, 32767),
            some(*numbers),
            some("7.50", "8.00", "NaN"),
            some(date(2000, 2, 29)),
            some("sad", "ok"),
            some("a  ", "ab ", "abc"),
        ],
        "flights": [
            chance.randrange(14),
            some(carrier),
            some(airport),
            some(airport, chance.choice(["JFK", "nowhere"])),
            some(tail),
            some(moment().date()),
            some(moment(), moment()),
            some(moment().replace(tzinfo=UTC), "0044-03-15 12:00:00+01 BC"),
            some(-3, 0, 1, 20, 2147483647),
            some(1, 2, 9223372036854775807),
            some(*numbers),
            some("0.00", "199.99", "-1.50"),
            some("00000000-0000-0000-0000-00000000000a", "f0000000-0000-0000-0000-000000000001"),
            some(True, False),
            some(0.1, 1e20),
            some('{"k": null}', '{"b": [1.10, null, "\\u00fc"], "a": {}}'),
        ],
        "weather": [
            airport,
            moment(),
            some(moment().replace(tzinfo=UTC)),
            some(*numbers),
            some(0.5),
        ],
    }
    return rows[name]


def change(history: History, chance: random.Random, count: int) -> None:
    """Change so many rows at random."""
    with history.connection.transaction():
        for _ in range(count):
            name = chance.choice([*KEYS, "flights"])
            row = random_row(chance, name)
            key = KEYS[name]
            same = " AND ".join(f"{column} = %s" for column in key)
            delete = f"DELETE FROM lib.{name} WHERE {same}"
            history.connection.execute(delete.encode(), row[: len(key)])
            if chance.random() < 0.8:
                insert = f"INSERT INTO lib.{name} VALUES ({', '.join(['%s'] * len(row))})"
                history.connection.execute(insert.encode(), row)
    history.capture()


def altered(node: Node, plant: Plant) -> Node:
    """The tree with each node changed."""
    children = tuple(altered(child, plant) for child in node.children)
    return plant(replace(node, children=children))


def declare(history: History, plant: Plant = lambda node: node) -> None:
    """Begin with the views. `plant` changes what documents are made by, not what Postgres is asked."""
    history.connection.execute(TABLES.encode())
    history.declare(VIEWS)
    views = (replace(view, root=altered(view.root, plant)) for view in history.views.values())
    history.plan = history.sink.plan = StatePlan(tuple(views))


def differing(history: History, seeds: Iterable[int]) -> bool:
    """Whether documents differ from their queries after any of some changes."""
    for seed in seeds:
        chance = random.Random(seed)
        change(history, chance, chance.choice([1, 3, CHANGES]) if history.log else CHANGES)
        history.batch()
        assert sum(map(len, history.topics.values())) > 5
        if history.differences():
            return True
    return False


def test_postgres_gives_what_is_assembled(history: History) -> None:
    declare(history)
    assert not differing(history, range(RUNS)), history.differences()
    history.do(*(f"DELETE FROM lib.{name}" for name in KEYS))
    history.settle()
    assert history.index_keys() == []


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
def test_a_wrong_document_is_found(history: History, plant: Plant) -> None:
    declare(history, plant)
    assert differing(history, range(10))
