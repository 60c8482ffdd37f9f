"""Fires the faults of a seed, one after another, until the time is over and each was fired once.

Invariant: a fault is mended before anything else happens, also where a signal ends the program.
"""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from cdc.apply.supervisor import stop_on_signal
from cdc.errors import CdcError
from cdc.sink.contract import Fault

HOLD_S = (1.0, 6.0)
"""The shortest and the longest time for which a fault lasts."""
COMPARE_EVERY_S = 180.0


def schedule(seed: int, names: Sequence[str]) -> Iterator[tuple[str, float]]:
    """Yield faults without end, each with the seconds for which it lasts. Each comes once before one
    comes again.
    """
    chance = random.Random(seed)  # noqa: S311  # no secret
    while True:
        for name in chance.sample(names, len(names)):
            yield name, round(chance.uniform(*HOLD_S), 1)


class Unmended(CdcError):
    """A fault couldn't be undone."""


@dataclass
class Nemesis:
    """Fires faults at a pipeline.

    recover  waits until every view holds what is committed when it is called; raises CdcError
    compare  compares the views with their source; raises CdcError where they aren't equal
    show     prints a line
    """

    faults: Mapping[str, Fault]
    seed: int
    recover: Callable[[], object]
    compare: Callable[[], object]
    show: Callable[[str], object]
    fired: Counter[str] = field(default_factory=Counter)
    recoveries: list[dict[str, str | float]] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    _began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def play(self, seconds: float) -> None:
        """Fire faults for this long, each at least once, and compare now and then and at the end."""
        compared = self.seconds
        for number, (name, hold_s) in enumerate(schedule(self.seed, list(self.faults))):
            is_over = number >= len(self.faults) and self.seconds > seconds
            if is_over or len(self.skipped) == len(self.faults):
                break
            if name not in self.skipped:
                self.fire(name, hold_s)
            if self.seconds > compared + COMPARE_EVERY_S:
                self._compare()
                compared = self.seconds
        self._compare()

    def fire(self, name: str, hold_s: float) -> None:
        """Begin a fault, end it after `hold_s` seconds or at a signal, and wait for the views."""
        held = False
        problem = None
        with stop_on_signal() as stopping:

            def hold() -> None:
                nonlocal held
                held = True
                stopping.wait(hold_s)

            try:
                self.faults[name](hold)
            except CdcError as error:
                problem = error
        if problem and (held or stopping.is_set()):
            raise Unmended(
                f"The fault {name!r} couldn't be undone: {problem.message}",
                hint="undo it by hand, as docs/understand/faults.md has it",
            )
        if stopping.is_set():
            raise KeyboardInterrupt
        mended = time.monotonic()
        if problem:
            self.skipped[name] = problem.message
            self._note(f"{name}: skipped. {problem.message}")
            # It may have begun all the same, as where the answer to a request was lost.
            self.recover()
            return
        self.fired[name] += 1
        self.recover()
        took_s = round(time.monotonic() - mended, 1)
        lasted_s = hold_s if held else 0.0
        self.recoveries.append({"fault": name, "lasted_s": lasted_s, "recovered_s": took_s})
        lasted = f"lasted {lasted_s:g} s" if held else "at once"
        self._note(f"{name}: {lasted}, recovered after {took_s:g} s")

    def _compare(self) -> None:
        self.compare()
        self._note("every view is equal")

    def _note(self, text: str) -> None:
        self.show(f"{self.seconds:6.0f} s  {text}")
