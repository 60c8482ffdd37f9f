"""What the registry's records mean for their readers: what is current, and who is at work."""

import time

import pytest

from cdc.generations.registry import (
    STALE_S,
    GenerationBuild,
    Generations,
    RetainedView,
    Rollback,
    Work,
)

ITEMS = "public.items"
ORDERS = "public.orders"
NAME = {ITEMS: "20260101t000000000000"}
NAMES = {**NAME, ORDERS: "20260101t000000000001"}


def retained(left_s: dict[str, float]) -> dict[str, RetainedView]:
    now = time.time()
    return {table: RetainedView(NAMES[table], now + left, now) for table, left in left_s.items()}


def building(phase: str = "replay") -> GenerationBuild:
    return GenerationBuild("search", phase, NAME, time.time())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("work", "left_s", "standby"),
    [
        pytest.param(None, {ITEMS: 60, ORDERS: -1}, [ITEMS], id="until its time is over"),
        pytest.param(building("promote"), {}, [], id="not what is being built"),
        pytest.param(building(), {ORDERS: 60}, [ORDERS], id="while another table is rebuilt"),
        pytest.param(Rollback("search", NAME), {ITEMS: -60}, [ITEMS], id="for a killed rollback, however late"),
    ],
)  # fmt: skip
def test_what_is_retained_is_kept_current(
    work: Work | None, left_s: dict[str, float], standby: list[str]
) -> None:
    generations = Generations(work=work, retained=retained(left_s))
    assert generations.standby_names == {table: NAMES[table] for table in standby}


def test_a_table_that_is_rebuilt_takes_nothing_from_another() -> None:
    generations = Generations(work=building(), retained=retained({ORDERS: 60}))
    assert generations.needed_names() == NAMES


@pytest.mark.parametrize(
    ("work", "ago_s", "showing"),
    [
        (building("promote"), 1, True),
        (building("promote"), STALE_S + 1, False),
        (Rollback("search", NAME), 1, True),
        (building("replay"), 1, False),
        (None, 1, False),
    ],
)
def test_readers_are_being_shown_another_generation(
    work: Work | None, ago_s: float, showing: bool
) -> None:
    alive_at = {"a command": time.time() - ago_s}
    generations = Generations(work=work, claims={"a command": 3}, alive_at=alive_at)
    assert generations.promotion_in_progress == showing


def test_the_first_in_the_topic_holds_the_sink() -> None:
    assert Generations(claims={"b": 4, "a": 9}).holder == "b"
    assert Generations().holder is None
    assert not Generations().in_progress
