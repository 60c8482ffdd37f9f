"""Documents from the state, against Postgres' own query of the same random rows, text by text: through cuts,
chunks and crashes at every step; and nothing is left over.
"""

import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest
import redis

from cdc.documents import tasks
from cdc.documents.plan import Node, StatePlan
from cdc.documents.state import Chunk, State, Turn
from tests.support.budget import SCALE
from tests.support.document_history import PARTITIONS, PREFIX, Crash, History, do_nothing

RUNS = 6 * SCALE
ROUNDS = 25 if SCALE == 1 else 110
"""`make properties`, at a scale of 20, looks at more than 100,000 changes."""
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


def as_it_is(node: Node) -> Node:
    return node


def declare(history: History, plant: Plant = as_it_is) -> None:
    """Begin with the views. `plant` changes what documents are made by, not what Postgres is asked."""
    history.connection.execute(TABLES.encode())
    history.declare(VIEWS)
    views = (replace(view, root=altered(view.root, plant)) for view in history.views.values())
    history.plan = history.sink.plan = StatePlan(tuple(views))


def run_random(history: History, seed: int, interruptions: tuple[float, ...]) -> None:
    """Random transactions and cuts, and processes that end at any call; then all documents are compared."""
    chance = random.Random(seed)
    share = chance.choice(interruptions)

    def interrupt() -> None:
        if chance.random() < share:
            raise Crash

    history.chunk_rows = chance.choice([1, 3, 50])
    change(history, chance, 60)
    for _ in range(ROUNDS):
        change(history, chance, chance.choice([1, 3, 20]))
        history.interrupt = interrupt
        parts = [(table.name, number) for table in history.tables for number in range(PARTITIONS)]
        history.apply(*(part for part in parts if chance.random() < 0.9))
        history.send()
        history.interrupt = do_nothing
        if chance.random() < 0.3:
            history.settle()
    history.settle()
    assert sum(map(len, history.topics.values())) > 5


def kinds_of_keys(history: History) -> set[str]:
    """What comes after the prefix in the keys of the state."""
    with redis.Redis.from_url(history.url, decode_responses=True) as server:
        return {key.removeprefix(f"{PREFIX}:").split(":")[0] for key in server.scan_iter()}


@pytest.mark.parametrize("seed", range(RUNS))
def test_postgres_gives_what_is_assembled(
    history: History, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(tasks, "SLICE", (3, tasks.SLICE)[seed % 2])
    declare(history)
    run_random(history, seed, (0.0, 0.01, 0.05))
    # All that is left are rows, their indexes, positions, names, and what rows are stored for.
    tables = {table.qualified for table in history.tables}
    assert kinds_of_keys(history) <= {"_cdc", "_x", "_number", "_documents", "_needs", *tables}
    history.do(*(f"DELETE FROM lib.{name}" for name in KEYS))
    history.settle()
    assert kinds_of_keys(history) <= {"_cdc", "_number", "_documents", "_needs"}


def pending_lost(state: State) -> list[Chunk]:
    for chunk in read_pending(state):
        climbed(state, chunk, {})
    return []


def note_turn(state: State, turn: Turn) -> None:
    require_turn(state, turn)
    state.__dict__["turn"] = turn


def forgotten_before_sent(state: State, view: str, limit: int) -> dict[str, str]:
    marks = read_dirty(state, view, limit)
    sent(state, state.__dict__["turn"], view, marks)
    return marks


def in_mind(state: State, view: str) -> set[str]:
    """The documents that this process alone knows to be dirty."""
    kept: dict[str, set[str]] = state.__dict__.setdefault("in_mind", {})
    return kept.setdefault(view, set())


def climbed_in_mind(state: State, chunk: Chunk, marks: Mapping[str, Collection[str]]) -> None:
    for view, ids in marks.items():
        in_mind(state, view).update(ids)
    climbed(state, chunk, {})


def dirty_in_mind(state: State, view: str, limit: int) -> dict[str, str]:
    return {**dict.fromkeys(in_mind(state, view), "0"), **read_dirty(state, view, limit)}


def sent_in_mind(state: State, turn: Turn, view: str, marks: Mapping[str, str], *more: Any) -> None:
    in_mind(state, view).difference_update(marks)
    sent(state, turn, view, marks, *more)


read_pending = State.pending
read_dirty = State.dirty
climbed = State.climbed
require_turn = State.require_turn
sent = State.sent


def count_alone(node: Node) -> Node:
    parts = tuple(replace(part, function="count") for part in node.aggregates)
    return replace(node, aggregates=parts)


@pytest.mark.parametrize(
    ("plant", "twins"),
    [
        (lambda node: replace(node, order_by=()), {}),
        (lambda node: replace(node, limit=1000), {}),
        (lambda node: replace(node, where=None), {}),
        (count_alone, {}),
        (as_it_is, {"pending": pending_lost}),
        (as_it_is, {"is_unsent": lambda *_: True}),
        (as_it_is, {"mark_rows": lambda *_: None}),
        (as_it_is, {"require_turn": note_turn, "dirty": forgotten_before_sent}),
        (as_it_is, {"climbed": climbed_in_mind, "dirty": dirty_in_mind, "sent": sent_in_mind}),
    ],
    ids=[
        "order", "limit", "where", "aggregates", "what is pending is lost", "each root is taken for dirty",
        "pages are not marked", "marks are forgotten before documents are sent",
        "chunks are forgotten before their documents are marked",
    ],
)  # fmt: skip
def test_planted_bugs_are_found(
    history: History, monkeypatch: pytest.MonkeyPatch, plant: Plant, twins: Mapping[str, Any]
) -> None:
    monkeypatch.setattr(tasks, "SLICE", 3)
    for name, twin in twins.items():
        monkeypatch.setattr(State, name, twin)
    with pytest.raises(AssertionError):
        run_seeds(history, plant)


def run_seeds(history: History, plant: Plant) -> None:
    for seed in range(10):
        declare(history, plant)
        run_random(history, seed, (0.0, 0.01, 0.05))
        history = history.begin_again()
