"""What the registry's records mean for who reads them: what is kept current, what is removed, who
is at work.
"""

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

NAME = {"public.items": "20260101t000000000000"}
OTHER_NAME = {"public.orders": "20260101t000000000001"}


def retained(left_s: float, names: dict[str, str]) -> dict[str, RetainedView]:
    now = time.time()
    return {table: RetainedView(name, now + left_s, now) for table, name in names.items()}


def building(phase: str = "replay") -> GenerationBuild:
    return GenerationBuild("search", phase, NAME, time.time())  # type: ignore[arg-type]


def alive(ago_s: float) -> dict[str, float]:
    return {"a command": time.time() - ago_s}


def test_what_is_retained_is_kept_current_until_its_time_is_over() -> None:
    generations = Generations(retained={**retained(60, NAME), **retained(-1, OTHER_NAME)})
    assert generations.standby_names == NAME


def test_what_is_being_built_is_not_kept_current_by_who_applies_to_the_live_views() -> None:
    assert Generations(work=building("promote")).standby_names == {}


def test_a_table_that_is_rebuilt_takes_nothing_from_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generations = Generations(work=building(), retained=retained(60, OTHER_NAME))
    assert generations.standby_names == OTHER_NAME
    assert generations.needed_names() == {**NAME, **OTHER_NAME}


def test_a_rollback_that_was_killed_can_be_ended_however_late() -> None:
    generations = Generations(work=Rollback("search", NAME), retained=retained(-60, NAME))
    assert generations.standby_names == NAME


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
    assert (
        Generations(work=work, claims={"a command": 3}, alive_at=alive(ago_s)).promotion_in_progress
        == showing
    )


def test_the_first_in_the_topic_holds_the_sink() -> None:
    assert Generations(claims={"b": 4, "a": 9}).holder == "b"
    assert Generations().holder is None
    assert not Generations().in_progress
