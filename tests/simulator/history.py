"""A history as data: its steps, how a seed makes them, and what a person reads of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple


class Step(NamedTuple):
    """Something that happens, and the time that passes afterwards. `numbers` say what it happens to."""

    kind: str
    numbers: tuple[int, ...]
    pause_ms: int


class History(NamedTuple):
    """A life from beginning to end. The same history is always the same life."""

    seed: int
    kind: str
    is_identity_full: bool
    steps: tuple[Step, ...]


def history(seed: int) -> History:
    """The history of a seed."""
    rng = random.Random(seed)
    kind = rng.choice(("warehouse",))
    return History(seed, kind, True, tuple(_step(rng) for _ in range(rng.randint(5, 30))))


def _step(rng: random.Random) -> Step:
    (kind,) = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))
    pause_ms = rng.choice((0, 3, 10, 30, 100, 300, 1000))
    return Step(kind, NUMBERS.get(kind, lambda _: ())(rng), pause_ms)


def _changes(rng: random.Random) -> tuple[int, ...]:
    numbers: list[int] = []
    for _ in range(rng.randint(1, 4)):
        verb = rng.choice((0, 0, 0, 1, 1, 2, 3))
        value = rng.randrange(5) if verb == 3 else rng.randrange(16)
        numbers += verb, rng.randrange(2), rng.randrange(5), value
    return tuple(numbers)


def _table(rng: random.Random) -> tuple[int, ...]:
    return (rng.randrange(2),)


WEIGHTS = {"write": 20, "truncate": 1, "kill_run": 2, "kill_connector": 2, "quiet": 1}
NUMBERS: dict[str, Callable[[random.Random], tuple[int, ...]]] = {
    "write": _changes,
    "truncate": _table,
}
