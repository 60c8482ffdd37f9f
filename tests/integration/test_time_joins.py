"""Joins in time, against Postgres' own query: random tables with ties, NULLs and times before 1970,
cut anywhere, with crashes at every step.
"""

import json
import random
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cdc.config import settings
from cdc.documents import assemble, tasks
from cdc.documents.assemble import ListPlace, children_span, shown_values
from cdc.documents.plan import Node, StatePlan
from cdc.documents.rows import Entries
from cdc.documents.state import Chunk, Span, State, Turn, scan_spans
from cdc.documents.tables import view_tables
from cdc.documents.tasks import Report, climb, mark
from cdc.errors import ConnectorError
from cdc.model.position import ViewCheckpoint
from cdc.sink.factory import build_state
from cdc.verify.barrier import WaitOptions, place_barrier
from tests.support import document_history
from tests.support.budget import SCALE
from tests.support.document_history import MOST_ROWS, History, run_random_history
from tests.support.simulated import MemoryLog, SimulatedClock
from tests.unit.test_time_settings import GOOD
from tests.unit.test_time_settings import TABLES as TIMED_TABLES

CASES = """
  departures:
    root: lib.flights
    include:
      weather: {table: lib.weather, on: {origin: origin}, as_of: {dep: at}, within: 2 hours, flatten: id}
      before: {table: lib.flights, on: {tail: tail}, previous: {dep: dep}, flatten: id}
      after: {table: lib.flights, on: {tail: tail}, next: {dep: dep}, flatten: id}
      hour:
        {table: lib.flights, on: {origin: origin}, during: {dep: dep}, before: 1 hour, many: true, flatten: id}
    to: [topic]
"""

RUNS = 2 * SCALE
PATHS = Node.paths
TABLES = """
CREATE TABLE lib.flights (
    id int PRIMARY KEY, tail text, origin text, dep timestamptz, arr timestamptz, delay int);
CREATE TABLE lib.weather (id int PRIMARY KEY, origin text, at timestamptz, temp int, kind text);
CREATE TABLE lib.planes (id int PRIMARY KEY, tail text, since timestamptz, owner text);
CREATE TABLE lib.owners (name text PRIMARY KEY, city text);
"""
VIEWS = """
  departures:
    root: lib.flights
    where: delay IS NOT NULL
    include:
      weather: {table: lib.weather, on: {origin: origin}, as_of: {dep: at}, within: 2 hours, columns: [temp]}
      any_weather: {table: lib.weather, on: {origin: origin}, as_of: {dep: at}, where: "kind <> 'none'"}
      plane:
        table: lib.planes
        on: {tail: tail}
        as_of: {dep: since}
        include: {owned_by: {table: lib.owners, on: {owner: name}, columns: [city]}}
    to: [topic]
  chains:
    root: lib.flights
    include:
      last:
        table: lib.flights
        on: {tail: tail}
        previous: {dep: dep}
        columns: [delay]
        include:
          before: {table: lib.flights, on: {tail: tail}, previous: {dep: dep}, within: 5 hours, columns: [id]}
      inbound: {table: lib.flights, on: {tail: tail}, previous: {dep: arr}, within: 3 hours, columns: [id]}
      following: {table: lib.flights, on: {tail: tail}, next: {dep: dep}, within: 4 hours, columns: [id]}
      first_after: {table: lib.weather, on: {origin: origin}, next: {arr: at}, columns: [id, temp]}
    to: [topic]
  hours:
    root: lib.flights
    include:
      around:
        table: lib.weather
        on: {origin: origin}
        during: {dep: at}
        before: 1 hour
        after: 30 minutes
        many: true
        limit: 3
        columns: [id]
        aggregates: {readings: count(*), warmest: max(temp), mean: avg(temp), kinds: count(kind)}
      others:
        table: lib.flights
        on: {origin: origin}
        during: {dep: dep}
        before: 1 hour
        many: true
        order_by: [-delay]
        columns: [id, delay]
    to: [topic]
  owned:
    root: lib.owners
    include:
      planes:
        table: lib.planes
        on: {name: owner}
        many: true
        order_by: [since]
        include:
          flown: {table: lib.flights, on: {tail: tail}, next: {since: dep}, columns: [id, delay]}
    alerts: true
    to: [topic]
"""
HAVING = """
  knock_on:
    root: lib.flights
    where: delay > 1
    include:
      inbound: {table: lib.flights, on: {tail: tail}, previous: {dep: arr}, within: 9 hours, columns: [id, delay]}
      temp: {table: lib.weather, on: {origin: origin}, as_of: {dep: at}, flatten: temp}
      others:
        table: lib.weather
        on: {origin: origin}
        during: {dep: at}
        before: 5 hours
        many: true
        show: false
        aggregates: {readings: count(*)}
    having: (inbound.delay > 0 OR temp IS NULL) AND NOT (readings > 2 AND inbound IS NULL) AND delay < 9
    to: [topic]
"""
CLOCKED = """
  overdue:
    root: lib.flights
    where: dep IS NOT NULL AND arr IS NULL AND (now() > dep + interval '3 hours' OR delay = 1)
    to: [topic]
  unmatched:
    root: lib.flights
    where: now() > dep
    include:
      following: {table: lib.flights, on: {tail: tail}, next: {dep: dep}, within: 6 hours, columns: [id, dep]}
    having: following IS NULL AND now() > dep + interval '6 hours' OR now() < following.dep
    to: [topic]
  last_hours:
    root: lib.flights
    where: now() <= dep + interval '5 hours'
    columns: [tail]
    clock: arr
    to: [topic]
"""
PATTERNS = """
  late_aircraft:
    from: lib.flights
    pattern: {by: [tail], order_by: dep, steps: {late: {where: delay > 0, times: 3}}, within: 9 hours}
    columns: [dep, delay]
    include: {weather: {table: lib.weather, on: {origin: origin}, as_of: {dep: at}, columns: [temp]}}
    to: [topic]
  spells:
    from: lib.flights
    pattern:
      by: [origin]
      order_by: dep
      rows: any
      steps: {slow: {where: delay > 1, times: 2}, quick: delay < 2, last: delay > 2}
      within: 30 hours
    to: [topic]
  turns:
    from: lib.flights
    pattern: {by: [tail, origin], order_by: arr, steps: {late: delay > 1, early: delay < 3}, within: 20 hours}
    columns: [dep, delay]
    having: late.delay > delay OR late.dep IS NULL
    to: [topic]
  lost:
    from: lib.flights
    pattern: {by: [tail], order_by: dep, steps: {out: delay > 1}, unless: delay = 0 OR arr IS NULL, within: 5 hours}
    columns: [dep]
    to: [topic]
  lost_twice:
    from: lib.flights
    pattern:
      by: [origin]
      order_by: dep
      rows: any
      steps: {out: {where: delay > 1, times: 2}}
      unless: delay = 0
      within: 4 hours
    columns: [dep]
    clock: arr
    to: [topic]
"""


def moment(rng: random.Random) -> str:
    if rng.random() < 0.08:
        return "NULL"
    if rng.random() < 0.02:
        return rng.choice(["'infinity'", "'-infinity'", "'10000-01-01Z'", "'0001-01-01Z'"])
    day = rng.choice(["1969-12-31", "1970-01-01"])
    return f"'{day} {rng.randrange(24):02}:{rng.choice([0, 0, 30]):02}:00Z'"


def text(rng: random.Random, values: str) -> str:
    return "NULL" if rng.random() < 0.05 else f"'{rng.choice(values)}'"


def number(rng: random.Random) -> str:
    return "NULL" if rng.random() < 0.1 else str(rng.randrange(5))


def change(rng: random.Random) -> str:
    """A random statement that changes a row."""
    table = rng.choice(["flights", "flights", "weather", "planes", "owners"])
    if table == "owners":
        name = rng.choice("xyz")
        if rng.random() < 0.3:
            return f"DELETE FROM lib.owners WHERE name = '{name}'"
        return (
            f"INSERT INTO lib.owners VALUES ('{name}', {text(rng, 'kl')})"
            " ON CONFLICT (name) DO UPDATE SET city = excluded.city"
        )
    row_id = rng.randrange(25 if table == "flights" else 12)
    if rng.random() < 0.25:
        return f"DELETE FROM lib.{table} WHERE id = {row_id}"
    values = {
        "flights": lambda: {
            "tail": text(rng, "ab"),
            "origin": text(rng, "jl"),
            "dep": moment(rng),
            "arr": moment(rng),
            "delay": number(rng),
        },
        "weather": lambda: {
            "origin": text(rng, "jl"),
            "at": moment(rng),
            "temp": number(rng),
            "kind": text(rng, "rs"),
        },
        "planes": lambda: {
            "tail": text(rng, "ab"),
            "since": moment(rng),
            "owner": text(rng, "xyz"),
        },
    }[table]()
    columns = ", ".join(values)
    literals = ", ".join(values.values())
    changed = ", ".join(f"{name} = excluded.{name}" for name in values)
    return (
        f"INSERT INTO lib.{table} (id, {columns}) VALUES ({row_id}, {literals})"
        f" ON CONFLICT (id) DO UPDATE SET {changed}"
    )


def change_rows(history: History, rng: random.Random, _: int) -> None:
    history.do(*(change(rng) for _ in range(rng.randrange(1, MOST_ROWS))))
    if rng.random() < 0.5:
        table = rng.choice(["flights", "weather", "planes", "owners"])
        history.apply(*([table] if rng.random() < 0.5 else []))


def touch(history: History, _: random.Random, __: int) -> None:
    history.do(
        "INSERT INTO lib.owners VALUES ('w', 'v') ON CONFLICT (name) DO UPDATE SET city = owners.city || 'v'"
    )


def run_history(history: History, seed: int) -> None:
    """Compare documents with their query through a random history."""
    views = VIEWS + HAVING + CLOCKED + PATTERNS
    run_random_history(
        history, seed, TABLES, views, partial(change_rows, history), partial(touch, history)
    )


def run_histories(history: History, seeds: Iterable[int]) -> None:
    for seed in seeds:
        run_history(history, seed)
        history = history.begin_again()


@pytest.mark.parametrize("seed", range(RUNS))
def test_documents_equal_their_query(history: History, seed: int) -> None:
    run_history(history, seed)


def only_new_versions(plan: StatePlan, views: Any, state: State, chunk: Chunk) -> Any:
    """Climb from rows as they are now alone."""
    nothing = Entries({}, {}, {})
    return climb(plan, views, state, chunk._replace(rows=dict.fromkeys(chunk.rows, nothing)))


def only_parents_of_its_time(
    plan: StatePlan, state: State, parent: Node, child: Node, places: Collection[ListPlace]
) -> Iterator[Collection[str]]:
    """Mark the parents at the row's own time, and none until the next row."""
    listing = child.parent_listing
    assert listing is not None
    name = parent.table.qualified
    spans = [Span(text, f"{order} ", f"{order}!") for text, order in places]
    for _, page in scan_spans(state, name, plan.listings[name].index(listing), spans):
        yield {place.id for place in page}


def exclusive_span(parent: Node, child: Node, place: ListPlace, parent_id: str) -> Span:
    """Leave out the row that is exactly `within` away."""
    span = children_span(parent, child, place, parent_id)
    return span._replace(low=f"{span.low.rstrip()}!")


def mark_alone(state: Any, turn: Turn, views: Any, blocks: Any) -> Report:
    """Leave the digests out of what a topic is read for."""
    everything = {topic: replace(view, having=None, alerts=False) for topic, view in views.items()}
    return mark(state, turn, everything, blocks)


def without_objects(
    root: Node, names: tuple[str, ...], row: bytes, nested: Mapping[str, bytes]
) -> dict[str, Any]:
    """Let `having` find NULL in every object."""
    values = shown_values(root, names, row, nested)
    return {name: None if "." in name else value for name, value in values.items()}


def one_row_short(node: Node) -> Iterator[tuple[Node, ...]]:
    """Lead from a row of a pattern to the one after it only."""
    yield (node,)
    for child in node.children:
        for path in PATHS(child):
            if len(path) == 1 or not child.presence:
                yield (node, *path)


def exclusive_pattern(parent: Node, child: Node, place: ListPlace, parent_id: str) -> Span:
    """Leave out the row of a pattern that is exactly `within` away from its last one."""
    span = children_span(parent, child, place, parent_id)
    return span._replace(low=f"{span.low.rstrip()}!") if child.presence else span


def exclusive_absence(parent: Node, child: Node, place: ListPlace, parent_id: str) -> Span:
    """Leave out the row of `unless` that is exactly `within` away."""
    span = children_span(parent, child, place, parent_id)
    return span._replace(high=f"{span.high[:-1]} ") if child.presence is False else span


@pytest.mark.parametrize(
    ("module", "name", "twin", "seed"),
    [
        (assemble, "shown_values", without_objects, 0),
        (document_history, "mark", mark_alone, 0),
        (State, "begin_sending", lambda state, turn, _: state.require_turn(turn), 4),
        (tasks, "climb", only_new_versions, 0),
        (tasks, "parents", only_parents_of_its_time, 0),
        (assemble, "children_span", exclusive_span, 0),
        (assemble, "is_last", lambda _: False, 0),
        (State, "ripen", lambda *_: None, 0),
        (assemble, "next_change", lambda _: lambda _: None, 0),
        (Node, "paths", one_row_short, 0),
        (assemble, "children_span", exclusive_pattern, 0),
        (assemble, "children_span", exclusive_absence, 0),
    ],
    ids=[
        "having sees no objects", "the topic isn't read", "a transaction isn't noted", "new versions only",
        "no interval", "within is exclusive", "the first for the last", "due documents stay", "nothing is due",
        "a sequence is one row short", "within a pattern is exclusive", "unless is exclusive",
    ],
)  # fmt: skip
def test_planted_bugs_are_found(
    history: History, monkeypatch: pytest.MonkeyPatch, module: Any, name: str, twin: Any, seed: int
) -> None:
    """From the first seed on that finds it."""
    monkeypatch.setattr(module, name, twin)
    with pytest.raises(AssertionError):
        run_histories(history, range(seed, seed + 5))


FLIGHTS = "INSERT INTO lib.flights (id, tail, origin, dep, delay) VALUES"


def flight(row_id: int, dep: str, tail: str = "a") -> str:
    return f"{FLIGHTS} ({row_id}, '{tail}', 'j', '2013-01-01 {dep}Z', 1)"


FOLLOWING = """
  late_aircraft:
    from: lib.flights
    pattern: {by: [tail], order_by: dep, steps: {late: {where: delay > 0, times: 3}}, within: 9 hours}
    to: [topic]
  days:
    from: lib.flights
    window: {session: 4 hours, time: dep}
    group_by: [tail]
    select: {flights: count(*), delay: max(delay)}
    to: [topic]
"""


def test_what_follows_many_rows_is_asked_for_at_once(
    history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The end of a round would leave out questions on a slow machine.
    monkeypatch.setattr(tasks, "ROUND_S", 600.0)
    history.connection.execute(TABLES.encode())
    history.declare(FOLLOWING)
    history.do(*(flight(n, f"{n % 8 * 3}:00", str(n // 8)) for n in range(160)))
    history.settle()
    questions = []
    for rows in (10, 160):
        history.do(f"UPDATE lib.flights SET delay = delay + 1 WHERE id < {rows}")
        history.apply()
        history.questions = 0
        history.send()
        questions.append(history.questions)
    history.check()
    assert questions[0] == questions[1]


def test_a_barrier_waits_until_documents_are_as_of_a_time(state_url: str, tmp_path: Path) -> None:
    """Else `verify` would take what is due, and isn't sent yet, for missing."""
    path = tmp_path / "air.yaml"
    path.write_text(GOOD.replace("redis://localhost/2", state_url))
    pipeline = settings.load(path, {})
    [view] = view_tables(pipeline, TIMED_TABLES)
    assert view.derivation
    log = MemoryLog(SimulatedClock())
    sources = [topic for _, topic in view.derivation.tables]
    control = [
        pipeline.heartbeat_topic,
        pipeline.topic("cdc.truncation"),
        pipeline.registered_topic,
    ]
    for topic in (*sources, view.topic, *control):
        log.create(topic, 1)
    beat = {"op": "u", "after": {"pipeline": "air"}, "source": {"ts_ms": 1, "lsn": 1}}
    log.write(pipeline.heartbeat_topic, [(b"{}", json.dumps(beat).encode())])
    current = {
        topic: ViewCheckpoint(end) for topic, end in log.ends([*sources, view.topic]).items()
    }
    state = build_state(pipeline).open_state()
    turn = state.take("run")

    def place() -> None:
        place_barrier(pipeline, log, [view], 0, WaitOptions(0.0), {view.name: 7})

    state.note_current(turn, {view.name: current}, {})
    with pytest.raises(ConnectorError, match=f"{view.name} are behind their clock"):
        place()
    state.note_current(turn, {view.name: current}, {view.name: 6})
    with pytest.raises(ConnectorError, match=f"{view.name} are behind their clock"):
        place()
    state.note_current(turn, {view.name: current}, {view.name: 7})
    place()


def members(history: History, row_id: int) -> tuple[Any, ...]:
    history.settle()
    document = history.document("departures", row_id)
    return tuple(document[name] for name in ("weather", "before", "after"))


def reading(row_id: int, at: str, origin: str = "j") -> str:
    return f"INSERT INTO lib.weather (id, origin, at) VALUES ({row_id}, '{origin}', '2013-01-01 {at}Z')"


@pytest.fixture
def cases(history: History) -> History:
    history.connection.execute(TABLES.encode())
    history.declare(CASES)
    return history


def test_a_late_version_changes_the_rows_up_to_the_next_one(cases: History) -> None:
    hours = range(8, 13)
    cases.do(*(flight(hour, f"{hour}:00", str(hour)) for hour in hours))
    cases.do(reading(1, "7:30"), reading(2, "10:30"))
    cases.settle()
    cases.forget_emitted()
    cases.do(reading(3, "8:30"))
    assert [members(cases, hour)[0] for hour in hours] == [1, 3, 3, 2, 2]
    assert sorted(set(cases.emitted_ids)) == ["departures/10", "departures/9"]


def test_a_neighbour_at_exactly_the_end_counts(cases: History) -> None:
    """When it goes, the documents of the following hour change, and none before it."""
    cases.do(
        *(flight(number, dep, str(number)) for number, dep in enumerate(["9:00", "10:00", "11:00"]))
    )
    cases.settle()
    assert [cases.document("departures", number)["hour"] for number in range(3)] == [
        [0],
        [0, 1],
        [1, 2],
    ]
    cases.forget_emitted()
    cases.do("DELETE FROM lib.flights WHERE id = 1")
    cases.settle()
    assert sorted(set(cases.emitted_ids)) == ["departures/1", "departures/2"]
