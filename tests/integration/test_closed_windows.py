"""Windows that close: they equal Postgres' own query until then, and never change from then on, through
random histories with crashes and lost states; cases that these don't reach; planted bugs that both find.
"""

import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import redis

from cdc.documents import engine, groups, tasks
from cdc.documents.closing import ClosedWindow
from cdc.documents.state import State
from cdc.model.position import Position, distance
from cdc.redis.server import COMMANDS, STATE_COMMANDS
from cdc.scalar.instants import microseconds, text_of
from cdc.sinks.redis.documents import executor
from cdc.sinks.redis.documents.executor import APPLY
from tests.integration.test_grouped_views import RUNS, TABLES, VIEWS, change, literal
from tests.support.document_history import MOST_ROWS, History, is_final, run_random_history
from tests.support.verbs import run_verb

DAY = "2013-01-01"
CLOSING = """
  hours:
    from: lib.trips
    where: delay < 4 OR is_late
    window: {tumbling: 1 hour, time: dep, lateness: 30 minutes}
    group_by: [origin]
    select:
      trips: count(*)
      mean: avg(fare)
      worst: max(delay)
      fares: count(DISTINCT fare)
      median: percentile_disc(0.5) WITHIN GROUP (ORDER BY delay)
      last_number: last(number) FILTER (WHERE delay > 1)
    to: [topic]
  hops:
    from: lib.trips
    window: {hopping: 2 hours, every: 30 minutes, time: planned, lateness: 1 hour}
    group_by: [number]
    select:
      trips: count(*)
      heaviest: max(weight)
      first_delay: first(delay)
      p90: percentile_disc(0.9) WITHIN GROUP (ORDER BY fare)
    to: [topic]
  by_dep:
    from: lib.trips
    window: {hopping: 3 hours, every: 1 hour, time: dep, lateness: 10 minutes}
    clock: dep
    select: {trips: count(*), fare: sum(fare)}
    having: trips >= 2 OR final
    to: [topic]
"""


def trip_at(rng: random.Random, now: int) -> str:
    """A random statement that changes a row, to times of the last hours."""
    row_id = rng.randrange(25)
    if rng.random() < 0.2:
        return f"DELETE FROM lib.trips WHERE id = {row_id}"
    times = [
        f"'{text_of(now - rng.choice([0, 0, 1, 2, 5]) * 1_800_000_000 - rng.randrange(3))}'"
        for _ in range(2)
    ]
    if rng.random() < 0.03:
        times[0] = rng.choice(["NULL", "'infinity'", "'-infinity'", "'10000-01-01'"])
    values = {
        "origin": literal(rng, "jfk", 'l"g\u001d'),
        "is_late": literal(rng, "true", "false"),
        "number": literal(rng, 1, 2),
        "dep": times[0],
        "planned": times[1],
        "delay": literal(rng, *range(6)),
        "fare": literal(rng, "10.00", "-3.10"),
        "weight": literal(rng, "1", "2.5"),
    }
    columns = ", ".join(values)
    changed = ", ".join(f"{name} = excluded.{name}" for name in values)
    return (
        f"INSERT INTO lib.trips (id, {columns}) VALUES ({row_id}, {', '.join(values.values())})"
        f" ON CONFLICT (id) DO UPDATE SET {changed}"
    )


def change_rows(history: History, rng: random.Random, now: int) -> None:
    partition = rng.choice([None, None, None, 0, 1])
    if partition is not None:
        history.apply()
    history.do(*(trip_at(rng, now) for _ in range(rng.randrange(1, MOST_ROWS))))
    if partition is None:
        history.apply()
    else:
        # One partition is read before the other: the clock stays where it was.
        history.apply(("trips", partition))
        history.send()


def touch(history: History, rng: random.Random, now: int) -> None:
    history.do(
        f"INSERT INTO lib.trips (id, origin, dep) VALUES (99, 'w', '{text_of(now)}')"
        f" ON CONFLICT (id) DO UPDATE SET is_late = {rng.choice(['true', 'false'])},"
        f" dep = excluded.dep, delay = coalesce(trips.delay, 0) + 1"
    )


def run_closing_history(history: History, seed: int) -> int:
    """Compare windows that close with their query through a random history. Returns how many documents were final."""
    run_random_history(
        history, seed, TABLES, CLOSING, partial(change_rows, history), partial(touch, history)
    )
    return sum(
        is_final(text) for documents in history.topics.values() for text in documents.values()
    )


@pytest.mark.parametrize("seed", range(RUNS))
def test_windows_that_are_closed_stay_as_they_are(history: History, seed: int) -> None:
    assert run_closing_history(history, seed) > 20
    assert history.late("hours") != []


def begin_narrow(history: History) -> Any:
    """Let the history be a user of the state's server who may only call what is needed. Returns the server,
    for another user.
    """
    commands = [f"+{command}" for command in f"{COMMANDS} {STATE_COMMANDS}".split()]
    server: Any = redis.Redis.from_url(history.url)
    server.execute_command("ACL", "SETUSER", "narrow", "reset", "on", ">secret", "~*", *commands)
    history.url = history.url.replace("redis://", "redis://narrow:secret@")
    return server


@pytest.mark.parametrize("command", ["zadd", "zrem", "hincrby", "set"])
def test_a_chunk_that_failed_in_its_middle_comes_again(history: History, command: str) -> None:
    """What it had done by then is neither left out nor done twice."""
    server = begin_narrow(history)
    rng = random.Random(1)
    history.connection.execute(TABLES.encode())
    history.declare(VIEWS)
    now = microseconds("1970-01-01T00:00:00.000000Z")
    assert now is not None
    history.clocks = {view.name: now for view in history.views.values() if view.has_clock}
    history.do(*(change(rng) for _ in range(40)))
    history.settle()
    history.do(*(change(rng) for _ in range(40)))
    server.execute_command("ACL", "SETUSER", "narrow", f"-{command}")
    with pytest.raises(AssertionError, match=f" use {command.upper()},"):
        history.apply()
    server.execute_command("ACL", "SETUSER", "narrow", f"+{command}")
    server.close()
    history.settle()


def test_the_commands_that_a_hint_names_are_enough(history: History) -> None:
    """A user of the state's server who may call no others keeps all views of groups."""
    begin_narrow(history).close()
    rng = random.Random(0)
    history.connection.execute(TABLES.encode())
    history.declare(VIEWS + CLOSING)
    now = microseconds("1969-12-31T20:00:00.000000Z")
    assert now is not None
    for _ in range(10):
        now += 1_800_000_000
        history.do(*(change(rng) for _ in range(5)))
        history.apply()
        clocks = [view.name for view in history.views.values() if view.has_clock and not view.clock]
        history.clocks |= dict.fromkeys(clocks, now)
        history.settle()


CASES = """
  moving:
    from: lib.trips
    window: {tumbling: 1 hour, time: dep, lateness: 1 hour}
    group_by: [origin]
    select: {trips: count(*), worst: max(delay)}
    to: [topic]
"""
BY_DEP = CASES.replace("    to:", "    clock: dep\n    to:")
HOPPING = CASES.replace("tumbling: 1 hour", "hopping: 1 hour, every: 30 minutes")


def opened(history: History, views: str) -> History:
    history.connection.execute(TABLES.encode())
    history.declare(views)
    history.save()
    return history


@pytest.fixture
def cases(history: History) -> History:
    return opened(history, CASES)


def at(time: str) -> int:
    """Microseconds of a time of the day."""
    instant = microseconds(f"{DAY}T{time}Z")
    assert instant is not None
    return instant


def trip(row_id: int, dep: str, delay: int = 1) -> str:
    return (
        "INSERT INTO lib.trips (id, origin, dep, delay)"
        f" VALUES ({row_id}, 'jfk', '{DAY} {dep}Z', {delay})"
    )


def trips(history: History, clock: str | None = None) -> dict[str, tuple[int, bool]]:
    """How many trips each window has, and whether it is final, by its beginning."""
    if clock is not None:
        history.clocks["moving"] = at(clock)
    history.settle()
    documents = [history.document("moving", row_id) for row_id in sorted(history.topics["moving"])]
    return {
        document["window_start"][11:16]: (document["trips"], document["final"])
        for document in documents
    }


def late(history: History) -> list[tuple[str, str]]:
    """Rows that came too late, with the time of their panes, in their order."""
    return [(change.id, change.pane[-18:-13]) for change in history.late("moving")]


def digests(history: History) -> dict[str, bytes]:
    """What the state knows of the documents in the topic."""
    ids = [row_id for row_id, *_ in history.sent.get("moving", [])]
    return dict(history.state.digests("moving", ids).by_id)


def test_a_window_closes_at_its_end_and_lateness_and_not_before(cases: History) -> None:
    cases.do(trip(1, "10:00"), trip(2, "11:00"))
    assert trips(cases, "11:59:59.999999") == {"10:00": (1, False), "11:00": (1, False)}
    cases.do(trip(3, "10:59:59.999999"))
    assert trips(cases, "11:59:59.999999") == {"10:00": (2, False), "11:00": (1, False)}
    assert trips(cases, "12:00:00") == {"10:00": (2, True), "11:00": (1, False)}
    cases.do(trip(4, "10:30"), "DELETE FROM lib.trips WHERE id = 1")
    cases.do("UPDATE lib.trips SET delay = 9 WHERE id = 3")
    assert trips(cases) == {"10:00": (2, True), "11:00": (1, False)}
    assert sorted(late(cases)) == [("1", "10:00"), ("3", "10:00"), ("4", "10:00")]


def test_a_change_of_another_column_is_not_late(cases: History) -> None:
    cases.do(trip(1, "10:00"))
    trips(cases, "12:00:00")
    cases.do("UPDATE lib.trips SET note = 'x'")
    assert trips(cases) == {"10:00": (1, True)}
    assert late(cases) == []


def test_nothing_stays_in_the_state_of_windows_that_are_closed(history: History) -> None:
    for views in (CASES, HOPPING):
        cases = opened(history.begin_again() if history.log else history, views)
        cases.do(trip(1, "10:00"), trip(2, "10:40"), trip(3, "12:00"))
        cases.apply()
        assert len(cases.index_keys()) > 0
        assert all(final for _, final in trips(cases, "14:30:00").values())
        assert len(trips(cases)) > 1
        assert (cases.index_keys(), digests(cases)) == ([], {})


def test_the_newest_row_goes_with_the_state(history: History) -> None:
    """The greatest time that is left is before the end of a window that was closed by the one that went."""
    cases = opened(history, BY_DEP)
    cases.do(trip(1, "10:00"), trip(2, "12:30"))
    assert trips(cases) == {"10:00": (1, True), "12:00": (1, False)}
    cases.do("DELETE FROM lib.trips WHERE id = 2")
    assert trips(cases) == {"10:00": (1, True)}
    cases.go_back()
    cases.do(trip(3, "10:30"))
    assert trips(cases) == {"10:00": (1, True)}
    cases.do(trip(4, "10:40"))
    assert trips(cases) == {"10:00": (1, True)}
    assert late(cases) == [("4", "10:00")]


def test_a_row_of_the_future_closes_nothing(history: History) -> None:
    cases = opened(history, BY_DEP)
    cases.do(
        trip(1, "10:00"), "INSERT INTO lib.trips (id, origin, dep) VALUES (2, 'jfk', '2099-01-01')"
    )
    assert trips(cases) == {"10:00": (1, False), "00:00": (1, False)}
    cases.do(trip(3, "10:30"))
    assert trips(cases)["10:00"] == (2, False)
    assert late(cases) == []


def test_one_partition_is_read_before_the_other(history: History) -> None:
    """What the first one has of day 30 makes nothing late that the other one has of day 2."""
    cases = opened(history, BY_DEP)
    for day in range(1, 31):
        for row_id in (2 * day, 2 * day + 1):
            cases.do(
                "INSERT INTO lib.trips (id, origin, dep)"
                f" VALUES ({row_id}, 'jfk', '2013-01-{day:02} 10:00Z')"
            )
    cases.chunk_rows = 1
    for partition in (0, 1):
        cases.apply(("trips", partition))
        cases.send()
    cases.settle()
    assert late(cases) == []
    counted = [cases.document("moving", row_id) for row_id in cases.topics["moving"]]
    assert [document["trips"] for document in counted] == [2] * 30
    assert sum(document["final"] for document in counted) == 29


def test_closed_windows_stay_when_their_table_is_read_again(cases: History) -> None:
    cases.do(trip(1, "10:00"), trip(2, "12:00"))
    trips(cases, "12:00:00")
    cases.do(trip(3, "10:30"))
    trips(cases)
    cases.declare(CASES + CASES.replace("moving", "others").replace(", lateness: 1 hour", ""))
    cases.is_new_process = cases.has_gone_back = True
    assert trips(cases) == {"10:00": (1, True), "12:00": (1, False)}
    assert cases.document("others", f'["jfk","{DAY}T10:00:00.000000Z"]')["trips"] == 2
    assert late(cases) == [("3", "10:00")]


def test_closed_windows_stay_when_their_table_is_emptied(cases: History) -> None:
    cases.do(trip(1, "10:00"), trip(2, "12:00"))
    trips(cases, "12:00:00")
    cases.connection.execute("TRUNCATE lib.trips")
    cases.rows["trips"] = {}
    cases.clear("trips")
    cases.is_new_process = True
    cases.do(trip(3, "12:10"), trip(4, "10:10"))
    assert trips(cases) == {"10:00": (1, True), "12:00": (1, False)}
    cases.do(trip(5, "10:20"))
    assert trips(cases) == {"10:00": (1, True), "12:00": (1, False)}
    assert late(cases) == [("5", "10:00")]


@pytest.mark.parametrize(
    ("old_text", "new_text", "expected"),
    [
        ("lateness: 1 hour", "lateness: 5 hours", {"10:00": (1, True), "12:00": (1, False)}),
        ("lateness: 1 hour", "lateness: 0 seconds", {"10:00": (1, True), "12:00": (1, False)}),
    ],
)
def test_windows_close_at_another_time(
    cases: History, old_text: str, new_text: str, expected: dict[str, tuple[int, bool]]
) -> None:
    """What is final stays it."""
    cases.do(trip(1, "10:00"), trip(2, "12:00"))
    trips(cases, "12:00:00")
    cases.do(trip(3, "10:30"))
    trips(cases)
    cases.declare(CASES.replace(old_text, new_text))
    cases.is_new_process = cases.has_gone_back = True
    cases.clocks.clear()
    assert trips(cases, "12:00:00") == expected


def test_windows_get_longer(cases: History) -> None:
    """Those that are as long now are others, and the former ones go."""
    cases.do(trip(1, "10:00"), trip(2, "12:00"))
    trips(cases, "14:00:00")
    cases.do(trip(3, "10:30"))
    cases.settle()
    cases.declare(CASES.replace("tumbling: 1 hour", "tumbling: 4 hours"))
    cases.is_new_process = cases.has_gone_back = True
    cases.batch()
    cases.changed_after_closing.clear()
    assert trips(cases) == {"08:00": (2, True), "12:00": (1, False)}


def test_a_window_that_is_corrected_for_ever_again(cases: History) -> None:
    cases.do(trip(1, "10:00"))
    trips(cases, "12:00:00")
    cases.do(trip(2, "10:30"))
    trips(cases)
    cases.declare(CASES.replace(", lateness: 1 hour", ""))
    cases.is_new_process = cases.has_gone_back = True
    cases.batch()
    assert cases.document("moving", f'["jfk","{DAY}T10:00:00.000000Z"]')["trips"] == 2


def test_a_repair_sends_no_closed_window_again(history: History) -> None:
    for views in (CASES, HOPPING):
        cases = opened(history.begin_again() if history.log else history, views)
        cases.do(trip(1, "10:10"), trip(3, "09:10"))
        before = trips(cases, "11:40:00")
        closed = [row_id for row_id, text in cases.topics["moving"].items() if is_final(text)]
        cases.do(trip(2, "10:20"))
        cases.settle()
        keys = {row_id: key for row_id, key, *_ in cases.sent["moving"]}
        cases.state.mark("moving", {row_id: keys[row_id] for row_id in closed}, send_again=True)
        assert len(closed) > 0
        assert trips(cases) == before | {"10:00": (2, False)}


def test_a_verb_lists_what_came_too_late(cases: History, tmp_path: Path) -> None:
    cases.do(trip(1, "10:00"))
    trips(cases, "12:00:00")
    cases.do(trip(2, "10:30"))
    cases.settle()

    def listed(view: str) -> CompletedProcess[str]:
        words = ["-p", str(tmp_path / "lib.yaml"), "--state", str(tmp_path)]
        return run_verb([*words, "views", "late", view, "--json"])

    answer = listed("moving")
    assert answer.returncode == 0, answer.stderr
    [change] = json.loads(answer.stdout)["changes"]
    assert (change["id"], change["pane"]) == ("2", f'["jfk","{DAY}T10:00:00.000000Z"]')
    cases.declare(CASES.replace(", lateness: 1 hour", ""))
    assert "corrected for ever: no change comes too late" in listed("moving").stderr


def test_the_latest_thousand_are_listed(cases: History) -> None:
    cases.do(trip(0, "10:00"))
    trips(cases, "12:00:00")
    cases.do(
        "INSERT INTO lib.trips (id, origin, dep)"
        f" SELECT n, 'jfk', '{DAY} 10:00Z' FROM generate_series(1, 1100) AS n"
    )
    cases.settle()
    sizes = cases.state.sizes((), ())
    assert (sizes.late, len(late(cases))) == ({"moving": 1100}, 1000)


def run_0(history: History) -> None:
    run_closing_history(history, 0)


position = Position("topic", (0,))
REACHED = distance(position, position)
"""The distance of a position from an end that it has got to."""


@pytest.mark.parametrize(
    ("module", "name", "twin", "run"),
    [
        (executor, "APPLY", APPLY.replace("if is_closed(view, time) then", "if false then"), run_0),
        (tasks, "closed_at", lambda *_: None, run_0),
        (State, "note_closed", lambda *_: None, test_the_newest_row_goes_with_the_state),
        (engine, "distance", lambda *_: REACHED, test_one_partition_is_read_before_the_other),
        (groups, "ClosedWindow", lambda panes, is_over: ClosedWindow(panes, is_over=True), run_0),
        (groups, "ClosedWindow", lambda panes, is_over: ClosedWindow((), is_over), run_0),
    ],
    ids=[
        "changes to closed panes are applied",
        "what the topic says is final isn't read from it",
        "the clock begins before what the topic has of closed windows",
        "a time counts before the state has what was committed by then",
        "a closed window is forgotten while it shares panes with open ones",
        "panes of closed windows stay",
    ],
)  # fmt: skip
def test_planted_bugs_are_found(
    history: History,
    monkeypatch: pytest.MonkeyPatch,
    module: Any,
    name: str,
    twin: Any,
    run: Callable[[History], object],
) -> None:
    monkeypatch.setattr(module, name, twin)
    with pytest.raises(AssertionError):
        run(history)


def moved(row_id: int, dep: str) -> str:
    return f"UPDATE lib.trips SET dep = '{DAY} {dep}Z' WHERE id = {row_id}"


def test_a_row_that_leaves_a_closed_window_counts_in_the_open_one(cases: History) -> None:
    cases.do(trip(1, "10:00"), trip(2, "12:00"))
    trips(cases, "12:00:00")
    cases.do(moved(1, "12:30"))
    assert trips(cases) == {"10:00": (1, True), "12:00": (2, False)}
    cases.do(moved(2, "10:30"))
    assert trips(cases) == {"10:00": (1, True), "12:00": (1, False)}
    assert late(cases) == [("1", "10:00"), ("2", "10:00")]


def test_what_is_late_for_a_closed_window_may_be_in_time_for_one_that_overlaps(
    history: History,
) -> None:
    cases = opened(history, HOPPING)
    cases.do(trip(1, "10:10"))
    assert trips(cases, "11:30:00") == {"09:30": (1, True), "10:00": (1, False)}
    cases.do(trip(2, "10:20"))
    assert trips(cases) == {"09:30": (1, True), "10:00": (2, False)}
    assert late(cases) == []
    cases.go_back()
    assert trips(cases) == {"09:30": (1, True), "10:00": (2, False)}
    assert trips(cases, "12:00:00") == {"09:30": (1, True), "10:00": (2, True)}
