"""What a stream does next: the table of states, line by line, without Spark, a broker or a sink."""

import weakref
from dataclasses import replace
from typing import Any

import pytest

from cdc.apply import machine
from cdc.apply.machine import (
    Continue,
    ControlState,
    Decision,
    Observed,
    Reason,
    Restart,
    ResumePlan,
    Stop,
    WaitForPromotion,
    decide,
)
from cdc.apply.progress import Progress, RunState
from cdc.apply.stream import Lag
from cdc.control.floors import Floors
from cdc.control.registrations import Registration
from cdc.errors import Fenced, SinkRejected, SinkUnavailable, WorkerLost
from cdc.model.outcome import Advance, Applied
from cdc.model.position import Position, ViewCheckpoint
from cdc.model.table import Table
from cdc.postgres.table_definition import Definition
from tests.support.pages import ROOT
from tests.support.simulated import SimulatedClock

ITEMS = Table("public", "items", (), ("id",), "shop.public.items")
NAME, TOPIC = ITEMS.qualified, ITEMS.topic
CURRENT, EARLIER = Position("id", (5, 5)), Position("id", (5, 4))
NOW = 1000.0
AWAY = SinkUnavailable("a", hint="h")
FENCED = Fenced("f", hint="h")
LOST = WorkerLost("w", hint="h")
REFUSED = SinkRejected("no", hint="h")
CHANGED = Definition(1, NAME, 1, 7, "ALTER TABLE", None, None, True)
PLAN = ResumePlan(
    control=ControlState(3),
    tables=(ITEMS,),
    positions={TOPIC: CURRENT},
    live={TOPIC: CURRENT},
    generations={TOPIC: "first"},
    shapes={TOPIC: CURRENT},
    standby={NAME: "before"},
    sure_until=NOW + 1,
)


def observed(**facts: Any) -> Observed:
    """Return an observation in which nothing but these facts has changed."""
    return Observed(**{"control": PLAN.control, "standby": PLAN.standby, "now": NOW, **facts})


def view(position: Position = CURRENT, generation: str = "first") -> dict[str, ViewCheckpoint]:
    return {TOPIC: ViewCheckpoint(position, generation=generation)}


TABLE: list[tuple[dict[str, Any], Decision]] = [
    ({}, Continue()),
    ({"views": view(), "topics": {TOPIC: Position("id", (9, 9))}}, Continue()),
    ({"views": view(Position("id", (6, 5)))}, Continue()),
    ({"stopping": True}, Stop(RunState.STOPPED)),
    ({"stopping": True, "control": ControlState(4)}, Stop(RunState.STOPPED)),
    ({"log_ended": True}, Stop(RunState.CAUGHT_UP)),
    ({"log_ended": True, "unfinished": True}, Restart(Reason.DOCUMENTS)),
    ({"log_ended": True, "unfinished": True, "stopping": True}, Stop(RunState.STOPPED)),
    ({"failure": AWAY, "tolerable": True}, Restart(Reason.FAILURE)),
    ({"failure": AWAY, "tolerable": True, "stopping": True}, Stop(RunState.STOPPED)),
    ({"failure": LOST, "tolerable": True}, Restart(Reason.FAILURE)),
    ({"failure": FENCED}, Stop(RunState.FAILED, FENCED)),
    ({"failure": FENCED, "switching": True}, Restart(Reason.SWITCHED)),
    ({"failure": FENCED, "switching": True, "stopping": True}, Stop(RunState.STOPPED)),
    ({"failure": REFUSED}, Stop(RunState.FAILED, REFUSED)),
    ({"failure": REFUSED, "switching": True}, Stop(RunState.FAILED, REFUSED)),
    ({"failure": REFUSED, "stopping": True}, Stop(RunState.FAILED, REFUSED)),
    ({"paused": True}, Restart(Reason.PAUSED)),
    ({"paused": True, "control": ControlState(4)}, Restart(Reason.REGISTRATION)),
    ({"paused": True, "views": view(generation="second")}, Restart(Reason.PAUSED)),
    ({"paused": True, "stopping": True}, Stop(RunState.STOPPED)),
    ({"control": ControlState(4)}, Restart(Reason.REGISTRATION)),
    ({"control": ControlState(4, Floors(0, {NAME: 8}))}, Restart(Reason.TRUNCATE, NAME)),
    ({"control": ControlState(4, definitions=(CHANGED,))}, Restart(Reason.SCHEMA, NAME)),
    (
        {"control": ControlState(4, Floors(0, {NAME: 8}), (CHANGED,))},
        Restart(Reason.TRUNCATE, NAME),
    ),
    (
        {"control": ControlState(4, Floors(1, {NAME: 8}), (), Registration(epoch=1))},
        Restart(Reason.REGISTRATION),
    ),
    (
        {"control": ControlState(4, Floors(0, {NAME: 8})), "promoting": True},
        Restart(Reason.TRUNCATE, NAME),
    ),
    ({"promoting": True}, WaitForPromotion()),
    ({"promoting": True, "waited_s": 4.9, "views": view(generation="next")}, WaitForPromotion()),
    ({"promoting": True, "waited_s": 5.0}, Continue()),
    (
        {"promoting": True, "waited_s": 5.0, "views": view(generation="next")},
        Restart(Reason.SWITCHED, NAME),
    ),
    ({"waited_s": 1.0, "views": view(generation="next")}, Restart(Reason.SWITCHED, NAME)),
    ({"views": view(EARLIER, "next")}, Restart(Reason.SWITCHED, NAME)),
    ({"views": {}, "topics": {}}, Continue()),
    ({"standby": {}}, Restart(Reason.STANDBY)),
    ({"standby": {NAME: "another"}}, Restart(Reason.STANDBY)),
    ({"standby_returns": True}, Restart(Reason.STANDBY)),
    ({"now": NOW + 1}, Continue()),
    ({"now": NOW + 2}, Restart(Reason.CONTINUITY)),
    ({"unblocked": "public.late"}, Restart(Reason.UNBLOCKED, "public.late")),
    ({"topics": {TOPIC: Position("anew", (0, 0))}}, Restart(Reason.TOPIC, NAME)),
    ({"topics": {TOPIC: Position("id", (5, 5, 0))}}, Restart(Reason.TOPIC, NAME)),
    ({"views": view(EARLIER)}, Restart(Reason.VIEW, NAME)),
    ({"views": {TOPIC: None}}, Restart(Reason.VIEW, NAME)),
    ({"unheld": NAME}, Restart(Reason.VIEW, NAME)),
    ({"quarantine": True}, Restart(Reason.QUARANTINE)),
]


@pytest.mark.parametrize(
    ("facts", "expected"), TABLE, ids=[", ".join(facts) or "nothing" for facts, _ in TABLE]
)
def test_the_table_of_states(facts: dict[str, Any], expected: Decision) -> None:
    assert decide(PLAN, observed(**facts)) == expected


def test_every_reason_is_in_the_table() -> None:
    """But for one that is no fact outside: that the stream had ended."""
    reached = {decision.reason for _, decision in TABLE if isinstance(decision, Restart)}
    assert reached == set(Reason) - {Reason.ERROR}


def rows_of_states(text: str) -> list[list[str]]:
    """Return the state, the event and the next state of each row of the table in a text."""
    rows = [
        [cell.strip() for cell in line.split("|")[1:4]]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    header = rows.index(["state", "event", "next"])
    return rows[header + 2 :]


def test_the_page_has_the_table_of_the_module() -> None:
    assert machine.__doc__
    rows = rows_of_states(machine.__doc__)
    page = ROOT / "docs/understand/how-a-change-travels.md"
    _, _, section = page.read_text().partition("## What a stream does next\n")
    assert rows_of_states(section) == rows
    reasons = {next_state.removeprefix("starting: ") for _, _, next_state in rows}
    assert set(Reason) - reasons == {Reason.FAILURE, Reason.ERROR}


SHADOW = replace(PLAN, shadow=True, standby={})
AT_ZERO = replace(PLAN, live={TOPIC: Position("id", (0, 0))})
OTHERS = Table("public", "others", (), ("id",), "shop.public.others")
TWO = replace(
    PLAN,
    tables=(OTHERS, ITEMS),
    live={OTHERS.topic: CURRENT, TOPIC: CURRENT},
    shapes={OTHERS.topic: CURRENT, TOPIC: CURRENT},
)
DEFINED = replace(PLAN, control=ControlState(3, definitions=(CHANGED,)))
FRESH = replace(PLAN, positions={TOPIC: None}, live={TOPIC: None}, generations={})


@pytest.mark.parametrize(
    ("plan", "facts", "expected"),
    [
        (replace(PLAN, refused=(REFUSED,)), {"log_ended": True}, Stop(RunState.FAILED, REFUSED)),
        (SHADOW, {"standby": {NAME: "another"}, "standby_returns": True}, Continue()),
        (SHADOW, {"paused": True}, Continue()),
        (FRESH, {"views": {TOPIC: None}}, Continue()),
        (FRESH, {"views": view()}, Continue()),
        (TWO, {"views": view(EARLIER)}, Restart(Reason.VIEW, NAME)),
        (AT_ZERO, {"views": {TOPIC: None}}, Restart(Reason.VIEW, NAME)),
        (
            DEFINED,
            {"control": ControlState(4, definitions=(CHANGED,))},
            Restart(Reason.REGISTRATION),
        ),
        (DEFINED, {"control": ControlState(4)}, Restart(Reason.REGISTRATION)),
    ],
    ids=[
        "views that have to be made again",
        "no standby",
        "no pause",
        "no place to go back from",
        "no generation to leave",
        "the first view was not looked up",
        "a view is gone that had nothing applied",
        "no new definition",
        "fewer definitions",
    ],
)
def test_other_plans(plan: ResumePlan, facts: dict[str, Any], expected: Decision) -> None:
    """`SHADOW`: of views that readers don't see."""
    assert decide(plan, observed(**facts)) == expected


def test_a_failure_that_comes_back_too_often_says_so() -> None:
    decision = decide(PLAN, observed(failure=LOST))
    assert isinstance(decision, Stop)
    assert decision.error is not None
    assert "without any progress" in decision.error.message


def test_a_batch_of_a_view_that_is_past_its_end_takes_nothing_back() -> None:
    ahead = replace(PLAN, positions={TOPIC: Position("id", (9, 0))})
    (step,) = ahead.steps({TOPIC: (5, 5)})
    assert step.end.offsets == (9, 5)
    assert ahead.steps({TOPIC: (5, 0)}) == []


def test_a_step_carries_its_start_its_end_and_the_floor() -> None:
    floors = replace(PLAN, control=ControlState(3, Floors(0, {NAME: 8})))
    end = Position("id", (5, 7))
    assert floors.steps({TOPIC: (5, 7)}) == [Advance(ITEMS, CURRENT, end, 8)]
    assert floors.steps({"shop.public.others": (5, 7)}) == []
    assert FRESH.steps({TOPIC: (5, 7)}) == [Advance(ITEMS, None, end)]
    assert FRESH.starts() == {TOPIC: (0, 0)}


def test_a_plan_counts_what_its_views_lack_partition_by_partition() -> None:
    assert PLAN.behind({TOPIC: (9, 5)}) == 4
    assert PLAN.behind({TOPIC: (9, 4)}) == 4
    assert FRESH.behind({TOPIC: (9, 4)}) == 13


def test_a_plan_knows_which_records_are_dead() -> None:
    """Below an LSN or below an offset; of a topic that was recreated since, none by offset."""
    registration = Registration(since={TOPIC: Position("id", (2, 3))})
    control = ControlState(3, Floors(0, {NAME: 8, "public.others": 9}), (), registration)
    plan = replace(PLAN, control=control)
    assert (plan.lsns(), plan.first_offsets()) == ({TOPIC: 8}, {TOPIC: (2, 3)})
    assert (PLAN.lsns(), PLAN.first_offsets()) == ({}, {})
    recreated = replace(plan, shapes={TOPIC: Position("another", (5, 5))})
    assert recreated.first_offsets() == {}


def test_a_restart_names_its_table() -> None:
    assert str(Restart(Reason.TOPIC, NAME)) == "topic (public.items)"
    assert str(Restart(Reason.STANDBY)) == "standby"


def test_a_snapshot_is_of_its_moment() -> None:
    lag = Lag(SimulatedClock())
    total = Applied(read=1, written=1)
    lag.begin({TOPIC: (7, 5)})
    progress = lag.progress(Progress("cache"), PLAN, total, state=RunState.APPLYING)
    total.add(Applied(read=1, written=1))
    assert (progress.applied.rows, progress.lag_records) == (1, 2)


def test_a_steady_load_leaves_a_stream_no_further_behind() -> None:
    """There is always something that waits, never the same for long; a restart doesn't hide it."""
    clock = SimulatedClock()
    lag = Lag(clock)
    now = clock.time()
    lag.begin({TOPIC: (5, 5)})
    reached = PLAN
    # Each is applied before the next but one is seen; what is seen last always waits.
    for number, age in enumerate(range(60, 0, -10)):
        lag.see({TOPIC: (6 + number, 5)}, now + 100 - age)
        reached = replace(PLAN, live={TOPIC: Position("id", (5 + number, 5))})
        lag.progress(Progress("cache"), reached, Applied())
    clock.now = now + 100
    progress = lag.progress(Progress("cache"), reached, Applied())
    assert (progress.lag_records, progress.lag_seconds) == (1, 10.0)
    lag.begin({TOPIC: (11, 6)})
    progress = lag.progress(Progress("cache"), reached, Applied())
    assert (progress.lag_records, progress.lag_seconds) == (2, 10.0)
    current = replace(PLAN, live={TOPIC: Position("id", (11, 6))})
    progress = lag.progress(Progress("cache"), current, Applied())
    assert (progress.lag_records, progress.lag_seconds) == (0, 0.0)


class SeenEnds(dict[str, tuple[int, ...]]):
    """Ends that a weak reference may point to."""


def test_a_long_catch_up_under_writes_keeps_few_of_the_ends_that_it_has_seen() -> None:
    """What is reported as its lag is right within a twentieth, and never too little."""
    clock = SimulatedClock()
    lag = Lag(clock)
    now = clock.time()
    references: list[weakref.ref[SeenEnds]] = []
    lag.begin({TOPIC: (5, 5)})
    behind = replace(PLAN, live={TOPIC: Position("id", (4, 5))})
    for number in range(1, 10_001):
        ends = SeenEnds({TOPIC: (5 + number, 5)})
        references.append(weakref.ref(ends))
        lag.see(ends, now + number)
        lag.progress(Progress("cache"), behind, Applied())
    del ends
    assert sum(reference() is not None for reference in references) < 200
    clock.now = now + 10_001
    for reached in (0, 100, 5_000, 9_000, 9_999):
        plan = replace(PLAN, live={TOPIC: Position("id", (5 + reached, 5))})
        snapshot = lag.progress(Progress("cache"), plan, Applied())
        assert snapshot.lag_records == 10_000 - reached
        due_s = 10_001 - (reached + 1)
        assert due_s <= (snapshot.lag_seconds or 0) <= due_s + 10_000 / 20
    plan = replace(PLAN, live={TOPIC: Position("id", (10_005, 5))})
    assert lag.progress(Progress("cache"), plan, Applied()).lag_seconds == 0.0


def test_a_topic_that_ends_before_its_view_is_found() -> None:
    assert PLAN.find_cut({TOPIC: (5, 5)}) is None
    assert PLAN.find_cut({TOPIC: (9, 4)}) == NAME
