"""A history as data: its steps, how a seed makes them, and what a person reads of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
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
    is_exactly_once: bool
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        """As `parsed` takes it."""
        identity = "full" if self.is_identity_full else "default"
        sending = "transactions" if self.is_exactly_once else "records"
        steps = [
            " ".join(map(str, (step.kind, *step.numbers, f"+{step.pause_ms}")))
            for step in self.steps
        ]
        return f"{self.seed} {self.kind} {identity} {sending}: {', '.join(steps)}"


def parsed(text: str) -> History:
    """A history from its text."""
    head, _, tail = text.partition(": ")
    seed, kind, identity, sending = head.split()
    steps = []
    for part in filter(None, tail.split(", ")):
        name, *numbers, pause = part.split()
        steps.append(Step(name, tuple(map(int, numbers)), int(pause)))
    return History(int(seed), kind, identity == "full", sending == "transactions", tuple(steps))


def history(seed: int) -> History:
    """The history of a seed."""
    rng = random.Random(seed)
    kind = rng.choice(("warehouse", "index", "cache"))
    is_identity_full = rng.random() < 0.7
    is_exactly_once = not is_identity_full or rng.random() < 0.7
    kinds = {**WEIGHTS}
    if not is_identity_full:
        # What no record carries any more is in quarantine then.
        for lossy in LOSSY:
            del kinds[lossy]
    steps = tuple(_step(rng, kinds) for _ in range(rng.randint(5, 30)))
    return History(seed, kind, is_identity_full, is_exactly_once, steps)


def _step(rng: random.Random, kinds: Mapping[str, float]) -> Step:
    (kind,) = rng.choices(list(kinds), list(kinds.values()))
    pause_ms = rng.choice((0, 3, 10, 30, 100, 300, 1000))
    numbers = NUMBERS[kind](rng) if kind in NUMBERS else ()
    return Step(kind, numbers, pause_ms)


def _changes(rng: random.Random) -> tuple[int, ...]:
    numbers: list[int] = []
    for _ in range(rng.randint(1, 4)):
        verb = rng.choice((0, 0, 0, 1, 1, 2, 3))
        value = rng.randrange(5) if verb == 3 else rng.randrange(16)
        numbers += verb, rng.randrange(2), rng.randrange(5), value
    return tuple(numbers)


def _table(rng: random.Random) -> tuple[int, ...]:
    return (rng.randrange(2),)


def _number(least: int, most: int) -> Callable[[random.Random], tuple[int, ...]]:
    return lambda rng: (rng.randint(least, most),)


VERBS = ("put", "keep", "delete", "rename")
"""What a transaction does to a row: `keep` leaves large values as they are."""
NAMES = ("item", "order")
SENTENCES = {
    "truncate": "TRUNCATE of {1}s",
    "kill_connector": "kill -9 of the connector",
    "repeat": "the connector sends its last {0} transactions again",
    "resend": "all {1}s are sent again",
    "lose_slot": "the slot is lost: a new snapshot",
    "compact": "compaction of the topic of {1}s",
    "delete_beginning": "the topic of {2}s loses all before offset {1}",
    "recreate": "the topic of {1}s is deleted and made again",
    "kill_run": "kill -9 of cdc run",
    "freeze_run": "cdc run is stopped for {0} tenths of a second; another one is started",
    "night": "nothing runs for {0} hours",
    "away": "the destination is away for {0} tenths of a second",
    "lose_answers": "the destination's next {0} answers are lost",
    "save": "the destination writes to its disk",
    "go_back": "the destination loses what it hasn't on its disk",
    "rebuild": "cdc rebuild (tables {0} of 3)",
    "rollback": "cdc rollback",
    "kill_command": "kill -9 of the rebuild or rollback",
    "quiet": "nothing is broken any more, and all is checked",
}
WEIGHTS = {
    "write": 40,
    "truncate": 1,
    "kill_connector": 3,
    "repeat": 1,
    "resend": 1,
    "lose_slot": 0.5,
    "compact": 2,
    "delete_beginning": 0.3,
    "recreate": 0.3,
    "kill_run": 3,
    "freeze_run": 4,
    "night": 1,
    "away": 2,
    "lose_answers": 3,
    "save": 3,
    "go_back": 3,
    "rebuild": 1.5,
    "rollback": 1,
    "kill_command": 1.5,
    "quiet": 1,
}
LOSSY = ("compact", "night", "repeat")
"""What needs all values in each record."""
NUMBERS: dict[str, Callable[[random.Random], tuple[int, ...]]] = {
    "write": _changes,
    "truncate": _table,
    "repeat": _number(1, 4),
    "resend": _table,
    "compact": _table,
    "delete_beginning": lambda rng: (rng.randrange(2), rng.randint(1, 20)),
    "recreate": _table,
    "freeze_run": _number(1, 50),
    "night": lambda rng: (rng.choice((1, 13, 30)),),
    "away": _number(1, 100),
    "lose_answers": _number(1, 3),
    "rebuild": _number(1, 3),
}


def sentences(history: History) -> str:
    """A history as a person reads it: when what happens."""
    identity = "all values of a row" if history.is_identity_full else "no unchanged large values"
    exactly = "in transactions" if history.is_exactly_once else "without transactions"
    lines = [f"seed {history.seed}: {history.kind}; the log has {identity}, sent {exactly}"]
    at_ms = 0
    for step in history.steps:
        lines.append(f"{at_ms / 1000:9.3f} s  {_sentence(step)}")
        at_ms += step.pause_ms
    return "\n".join(lines)


def _sentence(step: Step) -> str:
    if step.kind == "write":
        numbers = iter(step.numbers)
        changes = zip(*[numbers] * 4, strict=True)
        return "transaction: " + ", ".join(
            f"{VERBS[verb]} {NAMES[table]} {key}" + (f" to {value}" if verb == 3 else f" = {value}")
            for verb, table, key, value in changes
        )
    return SENTENCES[step.kind].format(*step.numbers, *(NAMES[n % 2] for n in step.numbers[:1]))


def shrunk(failing: History, fails: Callable[[History], bool]) -> History:
    """A history that fails as well, without the steps and the time that don't matter."""
    size = len(failing.steps)
    while size:
        start = 0
        while start < len(failing.steps):
            fewer = failing._replace(steps=failing.steps[:start] + failing.steps[start + size :])
            if fails(fewer):
                failing = fewer
            else:
                start += size
        size //= 2
    for number, step in enumerate(failing.steps):
        for simpler in (*_fewer_changes(step), step._replace(pause_ms=0)):
            steps = (*failing.steps[:number], simpler, *failing.steps[number + 1 :])
            if simpler != failing.steps[number] and fails(failing._replace(steps=steps)):
                failing = failing._replace(steps=steps)
    return failing


def _fewer_changes(step: Step) -> list[Step]:
    """A transaction with one of its changes."""
    if step.kind != "write":
        return []
    return [
        step._replace(numbers=step.numbers[first : first + 4])
        for first in range(0, len(step.numbers), 4)
    ]
