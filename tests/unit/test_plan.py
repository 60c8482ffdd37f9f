"""What each setting's change means later, said before anything is done."""

from typing import Any

import pytest

from cdc.cli.plan import lines
from cdc.control.change_plan import CurrentState, Plan, Refusal, RequestedState, plan
from cdc.control.registrations import Captured, Registration

ITEMS, ORDERS = "public.items", "public.orders"
CONFIG = {"heartbeat.interval.ms": "2000", "database.password": "secret", "table.include.list": "x"}
SETTINGS = {"delete.retention.ms": "1000"}
STANDING = {ITEMS: True, ORDERS: True}


def current(**changed: Any) -> CurrentState:
    registration = Registration(tables={ITEMS: Captured(("note",)), ORDERS: Captured()})
    topics = {ITEMS: SETTINGS, ORDERS: SETTINGS}
    as_it_is = {"registration": registration, "config": CONFIG, "topics": topics}
    return CurrentState(**{**as_it_is, "views": {"cache": STANDING}, **changed})


def requested(tables: dict[str, Captured] | None = None, **changed: Any) -> RequestedState:
    captured = {ITEMS: Captured(("note",)), ORDERS: Captured(), **(tables or {})}
    settings = dict.fromkeys(captured, SETTINGS)
    return RequestedState(captured, **{"config": CONFIG, "settings": settings, **changed})


def without(table: str) -> RequestedState:
    state = requested()
    return RequestedState(
        {name: captured for name, captured in state.tables.items() if name != table},
        CONFIG,
        state.settings,
    )


RESEND = "all its rows are sent again"
STAYS = "its topic and its views stay as they are, and nobody updates them"


@pytest.mark.parametrize(
    ("current_state", "requested_state", "migrate", "register", "run"),
    [
        (current(), requested(), [], [], []),
        (
            current(unprepared=["publishing public.new"]),
            requested({"public.new": Captured()}),
            ["publishing public.new"],
            ["capture public.new: all its rows are sent, beside the stream"],
            [],
        ),
        (current(), without(ORDERS), [], [f"no longer capture {ORDERS}: {STAYS}"], []),
        (
            current(),
            requested({ORDERS: Captured(("b", "a"))}),
            [],
            [f"withdraw a, b of {ORDERS} from every view: {RESEND}"],
            [],
        ),
        (current(), requested({ITEMS: Captured()}), [], [f"capture note of {ITEMS}: {RESEND}"], []),
        (
            current(),
            requested({ORDERS: Captured(events=True)}),
            [],
            [
                f"take the rows of {ORDERS} as events: what was sent of it until now is dead, {RESEND}"
            ],
            [],
        ),
        (
            current(),
            requested({ITEMS: Captured(("b",))}),
            [],
            [
                f"withdraw b of {ITEMS} from every view: {RESEND}",
                f"capture note of {ITEMS}: {RESEND}",
            ],
            [],
        ),
        (
            current(),
            requested({ORDERS: Captured(key=("a",))}),
            [],
            [f"give {ORDERS} another key: what was sent of it until now is dead, {RESEND}"],
            [],
        ),
        (
            current(),
            requested(
                config={**CONFIG, "heartbeat.interval.ms": "9", "database.password": "other"}
            ),
            [],
            ["restart the connector with another heartbeat.interval.ms, database.password"],
            [],
        ),
        (
            current(topics={ITEMS: {"delete.retention.ms": "9"}}),
            requested(),
            [],
            [f"set delete.retention.ms = 1000 on the topic of {ITEMS}"],
            [],
        ),
        # Another sink, or one at another place.
        (
            current(views={"cache": STANDING, "search": {ITEMS: False}}),
            requested(),
            [],
            [],
            [f"make {ITEMS} in search, from its first record on"],
        ),
        # Another name of the pipeline: all of it is new, and what was stays.
        (
            current(registration=None, config=None, topics={}, views={}),
            requested(),
            [],
            ["create the connector; it begins with all rows of every table"],
            [],
        ),
    ],
)
def test_what_a_change_means(
    current_state: CurrentState,
    requested_state: RequestedState,
    migrate: list[str],
    register: list[str],
    run: list[str],
) -> None:
    steps = plan(current_state, requested_state)
    assert (list(steps.migrate), list(steps.register), list(steps.run)) == (migrate, register, run)
    assert steps.empty is not bool(migrate or register or run)
    assert "secret" not in str(steps)


def test_what_is_refused_is_reported_first_and_with_what_repairs_it() -> None:
    stuck = Refusal(
        "Topic shop.public.items has 2 partitions, the pipeline file says 4.",
        "cdc -p FILE topics renew",
    )
    view = Refusal(
        "The view of public.orders in cache is another pipeline's.", "give the sink another prefix"
    )
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


def test_a_former_name_is_reported_where_everything_is_new() -> None:
    assert plan(current(idle=["old"]), requested()).idle == ()
    printed = list(
        lines(
            plan(
                current(registration=None, config=None, topics={}, views={}, idle=["old"]),
                requested(),
            )
        )
    )
    assert "SELECT pg_drop_replication_slot('old')" in printed[-1]
