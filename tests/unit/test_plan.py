"""What each setting's change means later, said before anything is done."""

from typing import Any

import pytest
from rich.console import Console

from cdc.cli.plan import MOST_ALIKE, lines, what_goes_where
from cdc.control.change_plan import (
    CurrentState,
    Plan,
    PlannedView,
    Refusal,
    RequestedState,
    plan,
)
from cdc.control.registrations import Captured, Registration
from cdc.model.mask import Mask

ITEMS, ORDERS = "public.items", "public.orders"
CONFIG = {"heartbeat.interval.ms": "2000", "database.password": "secret", "table.include.list": "x"}
OTHER_CONFIG = {**CONFIG, "heartbeat.interval.ms": "9", "database.password": "other"}
SETTINGS = {"delete.retention.ms": "1000"}
STANDING = {ITEMS: True, ORDERS: True}
CAPTURED = {ITEMS: Captured(("note",)), ORDERS: Captured()}
NEW: dict[str, Any] = {"registration": None, "config": None, "topics": {}, "views": {}}
"""Another name of the pipeline: all of it is new, and what was stays."""
RESEND = "all its rows are sent again"
DEAD = f"what was sent of it until now is dead, {RESEND}"


def current(**changed: Any) -> CurrentState:
    topics = {ITEMS: SETTINGS, ORDERS: SETTINGS}
    as_it_is = {"registration": Registration(tables=CAPTURED), "config": CONFIG, "topics": topics}
    return CurrentState(**{**as_it_is, "views": {"cache": STANDING}, **changed})


def requested(tables: dict[str, Captured] | None = None, **changed: Any) -> RequestedState:
    captured = {**CAPTURED, **(tables or {})}
    settings = dict.fromkeys(captured, SETTINGS)
    return RequestedState(captured, **{"config": CONFIG, "settings": settings, **changed})


@pytest.mark.parametrize(
    ("current_state", "requested_state", "register"),
    [
        (current(), requested(), []),
        (
            current(), RequestedState({ITEMS: CAPTURED[ITEMS]}, CONFIG, requested().settings),
            [f"no longer capture {ORDERS}: its topic and its views stay as they are, and nobody updates them"],
        ),
        (
            current(), requested({ORDERS: Captured(("b", "a"))}),
            [f"withdraw a, b of {ORDERS} from every view: {RESEND}"],
        ),
        (current(), requested({ITEMS: Captured()}), [f"capture note of {ITEMS}: {RESEND}"]),
        (
            current(), requested({ORDERS: Captured(events=True)}),
            [f"take the rows of {ORDERS} as events: {DEAD}"],
        ),
        (
            current(), requested({ITEMS: Captured(("b",))}),
            [f"withdraw b of {ITEMS} from every view: {RESEND}", f"capture note of {ITEMS}: {RESEND}"],
        ),
        (
            current(), requested({ORDERS: Captured(mask={"b": Mask(hash="salt"), "a": Mask(cut=20)})}),
            [
                f"mask {column} of {ORDERS} ({how}): {RESEND}; the topic keeps what was sent before until it is"
                " compacted"
                for column, how in (("a", "cut to 20"), ("b", "hash"))
            ],
        ),
        (
            current(registration=Registration(tables={**CAPTURED, ORDERS: Captured(mask={"a": Mask(redact=True)})})),
            requested(config={**CONFIG, "column.mask.hash.v2.SHA-256.with.salt.secret": "x"}),
            [f"send a of {ORDERS} without a mask: {RESEND}; every view gets its values"],
        ),
        (current(), requested({ORDERS: Captured(key=("a",))}), [f"give {ORDERS} another key: {DEAD}"]),
        (
            current(), requested(config=OTHER_CONFIG),
            ["restart the connector with another heartbeat.interval.ms, database.password"],
        ),
        (
            current(topics={ITEMS: {"delete.retention.ms": "9"}}), requested(),
            [f"set delete.retention.ms = 1000 on the topic of {ITEMS}"],
        ),
        (current(**NEW), requested(), ["create the connector; it begins with all rows of every table"]),
    ],
)  # fmt: skip
def test_what_register_would_do(
    current_state: CurrentState, requested_state: RequestedState, register: list[str]
) -> None:
    steps = plan(current_state, requested_state)
    assert steps == Plan(register=tuple(register))
    assert steps.empty is not bool(register)
    assert "secret" not in str(steps)


def test_a_new_table_is_published_and_captured() -> None:
    unprepared = current(unprepared=["publishing public.new"])
    steps = plan(unprepared, requested({"public.new": Captured()}))
    assert steps.migrate == ("publishing public.new",)
    assert steps.register == ("capture public.new: all its rows are sent, beside the stream",)
    assert (steps.run, steps.empty) == ((), False)


def test_a_sink_that_is_new_or_at_another_place_is_filled() -> None:
    views = {"cache": STANDING, "search": {ITEMS: False}}
    steps = plan(current(views=views), requested())
    assert steps == Plan(run=(f"make {ITEMS} in search, from its first record on",))
    assert not steps.empty


def test_a_view_that_is_taken_out_of_its_sink_is_noted() -> None:
    """It is no change: it stays as long as the view is there."""
    steps = plan(current(kept=[f"{ORDERS} in cache"]), requested())
    assert steps.empty
    assert list(lines(steps)) == [
        f"note      {ORDERS} in cache is no longer in the file: nobody updates it",
        "nothing to do",
    ]


def test_what_is_refused_is_reported_first_and_with_what_repairs_it() -> None:
    stuck = Refusal("Topic shop.public.items has 2 partitions.", "cdc -p FILE topics renew")
    view = Refusal("The view is another pipeline's.", "give the sink another prefix")
    steps = plan(
        current(views={"cache": {ITEMS: True, ORDERS: view}}),
        requested(refused=[stuck], left_out={"a.v": "a view"}),
    )
    assert list(lines(steps)) == [
        f"refused   {stuck.what}",
        f"          {stuck.hint}",
        f"refused   {view.what}",
        f"          {view.hint}",
        "left out  a.v: a view",
    ]
    assert list(lines(Plan())) == ["nothing to do"]


@pytest.mark.parametrize(
    ("view", "captured", "effect"),
    [
        (True, CAPTURED[ORDERS], "nothing"),
        (True, Captured(("note",)), "rows sent again"),
        (False, CAPTURED[ORDERS], "made"),
        (Refusal("Other columns.", f"cdc -p FILE rebuild cache --table {ORDERS}"), CAPTURED[ORDERS], "rebuild"),
        (Refusal("It names nn, but has no such column.", "did you mean n?"), CAPTURED[ORDERS], "refused"),
        (None, CAPTURED[ORDERS], "not known"),
    ],
)  # fmt: skip
def test_what_goes_where_and_what_becomes_of_it(
    view: Refusal | bool | None, captured: Captured, effect: str
) -> None:
    views = {"cache": {} if view is None else {ORDERS: view}}
    listed = [PlannedView("cache", ORDERS, "all but note, amount as total", "n > 0")]
    steps = plan(current(views=views), requested({ORDERS: captured}, listed=listed))
    assert [planned.effect for planned in steps.listed] == [effect]
    assert steps.empty is (effect in ("nothing", "not known"))


def test_what_goes_where_has_room_on_a_screen() -> None:
    """Views that are alike share a row, if they are many."""
    names = [f"public.t{number}" for number in range(MOST_ALIKE + 1)]
    views = [PlannedView("warehouse", name, "all", "all") for name in names]
    condition = "status <> 'draft' AND country IN ('DE', 'AT')"
    views.append(
        PlannedView("cache", ORDERS, "all but note, amount as total", condition, "rows sent again")
    )
    console = Console(width=80)
    with console.capture() as printed:
        console.print(what_goes_where(views))
    shown = printed.get().splitlines()
    assert max(map(len, shown)) <= 80
    assert [line[10:28].strip() for line in shown[1:3]] == [f"public.t0 and {MOST_ALIKE}", "more"]
    assert len(shown) == 6


def test_a_former_name_is_reported_where_everything_is_new() -> None:
    assert plan(current(idle=["old"]), requested()).idle == ()
    *_, last = lines(plan(current(**NEW, idle=["old"]), requested()))
    assert "SELECT pg_drop_replication_slot('old')" in last
