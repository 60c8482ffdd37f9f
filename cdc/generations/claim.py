"""One command at a time changes what a sink's readers see: who holds a sink, and who finds it held.

Claims are records of the registry's topic, so the first in it is the first for all who read them. One whose command has
said nothing for long is put away by the next; a command that was only stopped learns of it before its next step.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from threading import Event, Thread
from uuid import uuid4

import structlog

from cdc.errors import CdcError, SettingsError
from cdc.generations.registry import STALE_S, Generations, Progress, Registry, Retained, Work
from cdc.model.trace import kind, trace

TICK_S = 1.0
POLL_S = 0.1
log = structlog.get_logger()


@contextmanager
def claim(registry: Registry, sink: str) -> Iterator["Claim"]:
    """Be the only command that works on a sink's generations; one that was killed is waited for until it is dead.

    Raises:
        SettingsError: another one is at work.
    """
    held = Claim(registry, sink, uuid4().hex)
    held.enter()
    stopped = Event()
    thread = Thread(target=held.tick, args=[stopped], daemon=True)
    thread.start()
    try:
        yield held
    finally:
        stopped.set()
        thread.join()
        held.leave()


class Claim:
    """One command's hold on a sink's generations. `progress` is asked once a second, in a thread of its own."""

    def __init__(self, registry: Registry, sink: str, command: str) -> None:
        self._registry, self._sink, self._command = registry, sink, command
        self.progress: Callable[[], Progress] = lambda: Progress(time.time())

    @property
    def generations(self) -> Generations:
        return self._registry.of(self._sink)

    def enter(self) -> None:
        """Get in line, and wait until those before have left it or are dead. Raises SettingsError."""
        self._registry.write((("claim", self._sink, self._command), {"at": time.time()}))
        try:
            while first := self._first():
                self._wait_for(first)
        except BaseException:
            self.leave()
            raise

    def check(self) -> None:
        """Raise SettingsError when another command has taken this one for dead."""
        self._registry.read()
        if self._command not in self.generations.claims:
            raise self._taken("took this one for dead")

    def begin(self, work: Work) -> None:
        """Say what is being done, before it is."""
        self.check()
        self._registry.write((("work", self._sink), asdict(work)))

    def forget(self, tables: Sequence[str]) -> None:
        """What was retained of these tables is about to be replaced."""
        retained = [table for table in tables if table in self.generations.retained]
        self._registry.retire(self._sink, retained)

    def end(self, retained: Mapping[str, Retained] | None = None, tables: Sequence[str] = ()) -> None:
        """It is done: of `tables` this is retained from now on. Without any, what was retained is retained still."""
        kept = retained or {}
        told = ((("kept", self._sink, table), asdict(kept[table]) if table in kept else None) for table in tables)
        self._registry.write(*told, (("work", self._sink), None))

    def tick(self, stopped: Event) -> None:
        """Say every second that somebody is at work, and how far."""
        while not stopped.wait(TICK_S):
            try:
                self._tick()
            except CdcError as error:
                log.warning("tick_failed", sink=self._sink, error=error.message)
            except Exception as error:
                # Whatever it is: a command whose ticks have ended counts as dead, and another would begin beside it.
                log.error("tick_failed", sink=self._sink, error=kind(error), exception=trace(error))

    def leave(self) -> None:
        """Let others in; when that can't be said, they are let in once this one counts as dead."""
        try:
            self._registry.write(*(((kind, self._sink, self._command), None) for kind in ("tick", "claim")))
        except CdcError as error:
            log.warning("claim_not_released", sink=self._sink, error=error.message)

    def _tick(self) -> None:
        self._registry.write((("tick", self._sink, self._command), asdict(self.progress())))

    def _first(self) -> str | None:
        """The command that is before this one; those that are dead are put away."""
        self._registry.read()
        generations = self.generations
        if self._command not in generations.claims:
            raise self._taken("took this one for dead")
        first = generations.holder
        return first if first != self._command else None

    def _wait_for(self, first: str) -> None:
        """Until it is gone or dead; dead ones are put away. Raises SettingsError when it shows that it is alive."""
        seen, told_at = self.generations.alive_at[first], 0.0
        while time.time() - seen < STALE_S:
            if time.time() - told_at > TICK_S:
                self._tick()
                told_at = time.time()
            time.sleep(POLL_S)
            self._registry.read()
            if first not in self.generations.claims:
                return
            if self.generations.alive_at[first] != seen:
                raise self._taken("is at work")
        self._registry.write((("claim", self._sink, first), None), (("tick", self._sink, first), None))

    def _taken(self, what: str) -> SettingsError:
        return SettingsError(
            f"Another rebuild or rollback of {self._sink} {what}.",
            hint=f"cdc -p FILE generations shows it; one that was killed can be continued after {STALE_S:.0f} s",
            sink=self._sink,
        )
