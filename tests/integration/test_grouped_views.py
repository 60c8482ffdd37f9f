"""Grouped views: documents of groups and windows equal Postgres' own query through random histories;
cases that these don't reach; planted bugs that they find.
"""

import random
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from cdc.documents import aggregates, groups
from cdc.documents.aggregates import tallied
from cdc.documents.groups import Sessions
from cdc.documents.plan import Aggregate, Grouping, Tally, Totals, Window
from cdc.documents.rows import Entries
from cdc.documents.state import Span
from cdc.model.table import Table
from cdc.scalar import operators
from cdc.scalar.instants import instant_of, microseconds, text_of
from cdc.scalar.operators import Term
from cdc.sink.lane import Failure
from tests.support.budget import SCALE
from tests.support.document_history import MOST_ROWS, History, run_random_history

RUNS = 2 * SCALE
TABLES = """
CREATE TYPE lib.kind AS ENUM ('air', 'sea');
CREATE TABLE lib.trips (
    id int PRIMARY KEY, origin text, carrier varchar(8), is_late boolean, kind lib.kind, number bigint,
    dep timestamptz, planned timestamp, delay int, fare numeric(8, 2), weight numeric, note text, seen timestamptz);
"""
VIEWS = """
  by_origin:
    from: lib.trips
    group_by: [origin]
    select:
      trips: count(*)
      delays: count(delay)
      total: sum(delay)
      mean: avg(delay)
      worst: max(delay)
      best: min(delay)
      late: count(*) FILTER (WHERE delay > 2)
      late_total: sum(fare) FILTER (WHERE delay > 2)
      first_note: min(note)
      numbers: sum(number)
      last_seen: max(seen) FILTER (WHERE is_late)
      notes: count(DISTINCT note)
      weights: count(DISTINCT weight) FILTER (WHERE delay > 0)
      median: percentile_disc(0.5) WITHIN GROUP (ORDER BY fare)
      oldest: percentile_disc(0) WITHIN GROUP (ORDER BY note) FILTER (WHERE is_late)
      earliest: first(kind)
      latest: last(weight) FILTER (WHERE delay > 0)
    order_by: planned
    to: [topic]
  by_many:
    from: lib.trips
    where: delay IS NOT NULL
    group_by:
      origin: origin
      late: is_late
      kind: kind
      number: number
      upper_note: upper(note COLLATE "C")
      month: date_trunc('month', dep)
    select: {trips: count(*), fare: sum(fare), heaviest: max(weight), weight: avg(weight)}
    to: [topic]
  by_lateness: {from: lib.trips, group_by: [is_late], select: {trips: count(*)}, alerts: true, to: [topic]}
  by_number: {from: lib.trips, group_by: [number], select: {n: count(note)}, to: [topic]}
  daily:
    from: lib.trips
    window: {tumbling: 1 day, time: dep}
    select: {trips: count(*), fare: sum(fare), p90: percentile_disc(0.9) WITHIN GROUP (ORDER BY weight)}
    to: [topic]
  planned:
    from: lib.trips
    window: {tumbling: 2 hours, time: planned}
    group_by: [origin]
    select: {trips: count(*), worst: max(delay)}
    to: [topic]
  moving:
    from: lib.trips
    where: delay < 4 OR is_late
    window: {hopping: 3 hours, every: 30 minutes, time: dep}
    group_by: [origin]
    select:
      trips: count(*)
      late: count(*) FILTER (WHERE delay > 1)
      mean: avg(delay)
      fare: sum(fare)
      worst: max(delay)
      lightest: min(weight)
      first_note: min(note) FILTER (WHERE delay > 0)
      notes: count(DISTINCT note)
      kinds: count(DISTINCT kind) FILTER (WHERE delay > 1)
      median: percentile_disc(0.5) WITHIN GROUP (ORDER BY delay)
      high: percentile_disc(0.75) WITHIN GROUP (ORDER BY weight) FILTER (WHERE delay > 0)
      number_before: first(number)
      late_after: last(is_late) FILTER (WHERE delay > 0)
    to: [topic]
  weeks:
    from: lib.trips
    window: {tumbling: 1 week, time: dep, start: 2013-01-07}
    select: {trips: count(*)}
    to: [topic]
  busy:
    from: lib.trips
    window: {hopping: 2 hours, every: 1 hour, time: dep}
    group_by: [origin]
    select: {trips: count(*), fare: sum(fare)}
    having: trips >= 2 AND (fare > 20 OR fare IS NULL)
    to: [topic]
  closed:
    from: lib.trips
    window: {tumbling: 1 hour, time: dep}
    group_by: [origin]
    select: {trips: count(*)}
    having: now() > window_end + interval '30 minutes' OR trips > 3
    to: [topic]
  runs:
    from: lib.trips
    window: {session: 30 minutes, time: dep}
    group_by: [origin]
    select:
      trips: count(*)
      total: sum(delay)
      mean: avg(fare)
      worst: max(delay)
      first_note: min(note)
      late: count(*) FILTER (WHERE delay > 1)
      notes: count(DISTINCT note) FILTER (WHERE is_late)
      median: percentile_disc(0.5) WITHIN GROUP (ORDER BY weight)
      number_before: first(number) FILTER (WHERE is_late)
      carrier_after: last(carrier)
    to: [topic]
  runs_of_all:
    from: lib.trips
    where: delay < 4 OR is_late
    window: {session: 1 hour, time: planned}
    select: {trips: count(*)}
    to: [topic]
  busy_runs:
    from: lib.trips
    where: delay > 0
    window: {session: 45 minutes, time: dep}
    group_by: {number: number, late: is_late}
    select: {trips: count(*), fare: sum(fare)}
    having: trips >= 2 OR now() > window_end
    to: [topic]
  sliding:
    from: lib.trips
    where: delay < 4 OR is_late
    window: {sliding: 1 hour, time: dep}
    group_by: [origin]
    select:
      trips: count(*)
      late: count(*) FILTER (WHERE delay > 1)
      mean: avg(delay)
      worst: max(delay)
      notes: count(DISTINCT note)
      median: percentile_disc(0.5) WITHIN GROUP (ORDER BY fare) FILTER (WHERE delay > 1)
      number_before: first(number)
      last_kind: last(kind) FILTER (WHERE delay > 1)
    to: [topic]
  sliding_of_all:
    from: lib.trips
    window: {sliding: 2 hours, time: planned}
    select: {trips: count(*), fare: sum(fare)}
    having: trips > 1 AND (fare > 0 OR fare IS NULL)
    to: [topic]
"""


def literal(rng: random.Random, *values: object) -> str:
    if rng.random() < 0.1:
        return "NULL"
    return f"'{rng.choice(values)}'"


def moment(rng: random.Random, *others: str) -> str:
    if rng.random() < 0.03:
        return rng.choice([*others, "'10000-01-01'", "'0001-01-01'", "'9999-12-31 23:00'"])
    day = rng.choice(["1969-12-31", "1970-01-01"])
    return literal(rng, f"{day} {rng.randrange(24):02}:{rng.choice([0, 0, 29, 30, 59]):02}:00")


def change(rng: random.Random) -> str:
    """A random statement that changes a row."""
    row_id = rng.randrange(25)
    if rng.random() < 0.25:
        return f"DELETE FROM lib.trips WHERE id = {row_id}"
    values = {
        "origin": literal(rng, "jfk", 'l"g', "", "é\u001d"),
        "carrier": literal(rng, "aa", "ua"),
        "is_late": literal(rng, "true", "false"),
        "kind": literal(rng, "air", "sea"),
        "number": literal(rng, 1, -9_223_372_036_854_775_808, 9_223_372_036_854_775_807),
        "dep": moment(rng, "'infinity'", "'-infinity'"),
        "planned": moment(rng),
        "delay": literal(rng, *range(-1, 6)),
        "fare": literal(rng, "10.00", "10.25", "-3.10", "NaN"),
        "weight": literal(rng, "1", "1.0", "1.00", "2.5", "-7e20", "Infinity"),
        "note": literal(rng, "a", "B", "b"),
        "seen": moment(rng),
    }
    columns = ", ".join(values)
    changed = ", ".join(f"{name} = excluded.{name}" for name in values)
    return (
        f"INSERT INTO lib.trips (id, {columns}) VALUES ({row_id}, {', '.join(values.values())})"
        f" ON CONFLICT (id) DO UPDATE SET {changed}"
    )


def change_rows(history: History, rng: random.Random, _: int) -> None:
    history.do(*(change(rng) for _ in range(rng.randrange(1, MOST_ROWS))))
    if rng.random() < 0.5:
        history.apply()


def touch(history: History, rng: random.Random, _: int) -> None:
    history.do("DELETE FROM lib.trips WHERE id = 99")
    history.do(
        "INSERT INTO lib.trips (id, origin, dep) VALUES (99, 'w', '1970-01-01')",
        # Never the row that it was: nothing would come of that.
        f"UPDATE lib.trips SET is_late = {rng.choice(['true', 'false'])}, fare = {rng.randrange(10**6)}"
        " WHERE id = 99",
    )


def run_history(history: History, seed: int) -> None:
    """Compare documents with their query through a random history."""
    run_random_history(
        history, seed, TABLES, VIEWS, partial(change_rows, history), partial(touch, history)
    )


@pytest.mark.parametrize("seed", range(RUNS))
def test_documents_equal_their_query(history: History, seed: int) -> None:
    """And nothing stays in the state of groups without rows."""
    run_history(history, seed)
    history.do("DELETE FROM lib.trips")
    history.settle()
    assert history.topics == {name: {} for name in history.views}
    assert history.index_keys() == []


def truncated(every: int, start: int, text: str) -> str | None:
    """Cut a time before the start of panes to the end of its pane, as a division of computers does."""
    instant = microseconds(text)
    if instant is None:
        return None
    begin = start + int((instant - start) / every) * every
    return text_of(begin, has_zone=text.endswith("Z"))


def without_followers(
    sessions: Sessions, versions: Collection[Entries]
) -> Iterator[tuple[str, int]]:
    """Leave out the row after a changed one."""
    found = list(all_changed(sessions, versions))
    times = {instant_of(order) for entries in versions for _, order in entries.places.values()}
    return (begin for begin in found if begin[1] in times)


all_changed = Sessions.changed


def without_filter(totals: Totals, where: Term | None) -> Tally:
    tally = filtered_tally(totals, where)
    return replace(tally, where=totals.where) if isinstance(totals, Grouping) else tally


filtered_tally = Totals.tally


def all_values(part: Aggregate, table: Table, tally: Tally, numbers: Mapping[str, int]) -> Any:
    """Count equal values as if they were different."""
    if part.function == "distinct":
        return sum(number for name, number in numbers.items() if ":" in name)
    return tallied(part, table, tally, numbers)


@pytest.mark.parametrize(
    ("module", "name", "twin"),
    [
        (operators, "binned", truncated),
        (Window, "begins", lambda _, pane: range(pane, pane + 1)),
        (aggregates, "tallied", lambda part, table, tally, numbers: numbers.get("n", 0)),
        (Totals, "tally", without_filter),
        (aggregates, "rank", lambda fraction, count: max(1, int(fraction * count))),
        (aggregates, "tallied", all_values),
        (aggregates, "Span", lambda text, low, _: Span(text, low, "\x7f")),
        (groups, "note_due", lambda *_: None),
        (Sessions, "changed", without_followers),
    ],
    ids=[
        "panes before 1970 are cut the other way",
        "a row is in the window that begins with its pane alone", "numbers are counts", "no FILTER",
        "a percentile is one row too low", "equal values are counted each", "a row without a value is the last one",
        "nothing is due", "sessions that begin with another row aren't marked",
    ],
)  # fmt: skip
def test_planted_bugs_are_found(
    history: History, monkeypatch: pytest.MonkeyPatch, module: Any, name: str, twin: Any
) -> None:
    operators.strict.cache_clear()
    monkeypatch.setattr(module, name, twin)
    try:
        with pytest.raises(AssertionError):
            run_history(history, 0)
    finally:
        operators.strict.cache_clear()


CASES = """
  moving:
    from: lib.trips
    window: {hopping: 1 hour, every: 30 minutes, time: dep}
    group_by: [origin]
    select:
      trips: count(*)
      mean: avg(delay)
      worst: max(delay)
      late: count(*) FILTER (WHERE delay > 2)
    to: [topic]
"""
DAY = "2013-01-01"


@pytest.fixture
def cases(history: History) -> History:
    history.connection.execute(TABLES.encode())
    history.declare(CASES)
    return history


def trip(row_id: int, dep: str, delay: int = 1, origin: str = "jfk", day: str = DAY) -> str:
    return (
        "INSERT INTO lib.trips (id, origin, dep, delay)"
        f" VALUES ({row_id}, '{origin}', '{day} {dep}Z', {delay})"
    )


def window(begin: str, origin: str = "jfk", day: str = DAY) -> str:
    return f'["{origin}","{day}T{begin}:00.000000Z"]'


def counts(history: History) -> dict[str, int]:
    """How many trips each window has, by its id."""
    history.settle()
    return {
        row_id: history.document("moving", row_id)["trips"] for row_id in history.topics["moving"]
    }


def test_another_key_needs_another_topic(cases: History) -> None:
    """A sink would take a document's record under the former key for one of another document."""
    cases.do(trip(1, "10:00"))
    cases.settle()
    cases.declare(CASES.replace("[origin]", "{is_late: is_late, place: origin}"))
    cases.has_gone_back = cases.is_new_process = True
    cases.apply()
    with pytest.raises(Failure, match="has documents with the key") as refusal:
        cases.send()
    assert refusal.value.kind == "rekeyed"
    assert "the key of view.moving is (is_late, place, window_start) now" in refusal.value.message
    cases.renew_topics()
    cases.settle()
    cases.do("UPDATE lib.trips SET is_late = true WHERE id = 1")
    cases.settle()
    assert set(cases.topics["moving"]) == {
        f'[true,"jfk","{DAY}T{begin}:00.000000Z"]' for begin in ("09:30", "10:00")
    }


def test_windows_at_the_end_of_time_get_longer(cases: History) -> None:
    """Tables often have 9999-12-31 where something has no end."""
    cases.do(trip(1, "22:00", day="9999-12-31"), trip(2, "22:00", day="9999-12-29"))
    assert len(counts(cases)) == 4
    cases.declare(CASES.replace("hopping: 1 hour", "hopping: 1 day"))
    cases.has_gone_back = cases.is_new_process = True
    assert len(counts(cases)) > 48


def test_what_groups_need_is_part_of_what_rows_are_stored_for(cases: History) -> None:
    """Rows are read again for another window, and none of the former one's numbers stay."""
    cases.do(trip(1, "10:10"))
    cases.settle()
    cases.declare(CASES.replace("hopping: 1 hour, every: 30 minutes", "tumbling: 1 hour"))
    cases.has_gone_back = cases.is_new_process = True
    assert counts(cases) == {window("10:00"): 1}
    cases.do("DELETE FROM lib.trips")
    assert counts(cases) == {}
    assert cases.index_keys() == []


OTHERS = (
    "group_by: [origin]",
    "group_by: [number]",
    "group_by: [is_late]",
    "group_by: [number, is_late]",
    "window: {tumbling: 1 day, time: dep}",
    "window: {tumbling: 1 day, time: planned}",
    "group_by: {origin: dep, number: origin}",
)


def test_a_definition_follows_any_other(history: History) -> None:
    """What rows were stored for before is undone under the new definition."""
    head = "  moving:\n    from: lib.trips\n    select: {trips: count(*)}\n    to: [topic]\n    "
    former = f"{head}group_by: [origin, number]\n"
    history.connection.execute(TABLES.encode())
    history.declare(former)
    history.do(
        "INSERT INTO lib.trips (id, origin, number, is_late, dep, planned)"
        f" VALUES (1, 'x', 7, true, '{DAY}', '{DAY}'), (2, '[1', -7, false, '{DAY}', '{DAY}')"
    )
    history.settle()
    for views in (text for other in OTHERS for text in (f"{head}{other}\n", former)):
        history.declare(views)
        history.renew_topics()
        history.settle()
        assert len(history.topics["moving"]) > 0


SLIDING = """
  moving:
    from: lib.trips
    window: {sliding: 1 hour, time: dep}
    group_by: [origin]
    select: {trips: count(*)}
    to: [topic]
"""


def test_groups_follow_a_sliding_window_of_which_nothing_was_sent(history: History) -> None:
    """A run may end between the two, and the file change."""
    history.connection.execute(TABLES.encode())
    history.declare(SLIDING)
    history.do(trip(1, "10:00"))
    history.apply()
    history.declare(SLIDING.replace("sliding: 1 hour", "tumbling: 1 hour"))
    assert counts(history) == {window("10:00"): 1}


DOTTED = """
  moving:
    from: lib.trips
    window: {sliding: 1 hour, time: dep}
    select: {trips: count(*), late.most: max(delay)}
    having: '"late.most" > 2'
    to: [topic]
  starts:
    from: lib.trips
    group_by: {window_start: origin}
    select: {trips: count(*)}
    to: [topic]
"""


def test_members_may_have_dots_and_names_of_windows_that_there_are_not(history: History) -> None:
    history.connection.execute(TABLES.encode())
    history.declare(DOTTED)
    history.do(trip(1, "10:00", delay=2), trip(2, "10:30", delay=3))
    assert counts(history) == {"2": 2}
    assert history.document("moving", 2)["late.most"] == 3
    assert history.document("starts", "jfk") == {"window_start": "jfk", "trips": 2}


SESSIONS = """
  moving:
    from: lib.trips
    window: {session: 30 minutes, time: dep}
    group_by: [origin]
    select: {trips: count(*)}
    to: [topic]
"""


@pytest.fixture
def sessions(history: History) -> History:
    history.connection.execute(TABLES.encode())
    history.declare(SESSIONS)
    return history


def test_a_session_is_as_long_as_it_gets(sessions: History) -> None:
    """Also longer than a page of the list that it is read from."""
    rows = (
        "INSERT INTO lib.trips (id, origin, dep)"
        f" SELECT n, 'jfk', '{DAY} 10:00Z'::timestamptz + n * interval '1 minute' FROM generate_series"
    )
    sessions.do(f"{rows}(0, 4999) AS n")
    assert counts(sessions) == {window("10:00"): 5000}
    sessions.do("DELETE FROM lib.trips WHERE id BETWEEN 2500 AND 2540")
    assert sorted(counts(sessions).values()) == [2459, 2500]


def test_what_changes_back_within_a_batch_sends_nothing(cases: History) -> None:
    cases.do(trip(1, "10:00"))
    cases.settle()
    cases.forget_emitted()
    cases.do("UPDATE lib.trips SET origin = 'lga'")
    cases.do("UPDATE lib.trips SET origin = 'jfk'")
    cases.settle()
    assert cases.emitted == []


def test_a_row_counts_in_the_windows_of_the_hour_after_it(history: History) -> None:
    history.connection.execute(TABLES.encode())
    history.declare(SLIDING)
    history.do(*(trip(number, f"{10 + number}:00") for number in range(4)))
    history.do(trip(4, "11:00:00.000001"))
    assert counts(history) == {"0": 1, "1": 2, "2": 3, "3": 2, "4": 2}
    history.forget_emitted()
    history.do("DELETE FROM lib.trips WHERE id = 1")
    assert counts(history) == {"0": 1, "2": 2, "3": 2, "4": 1}
    assert sorted(history.emitted_ids) == ["moving/1", "moving/2", "moving/4"]
