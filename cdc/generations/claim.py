"""Claims: one command at a time changes what a sink's readers see.

Claims are records of the registry's topic, so that every reader agrees on the first one. A command
removes the claim of a dead command before it: one without ticks for STALE_S. A command that was
only stopped finds its claim removed before its next step, and fails.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from threading import Event
from uuid import uuid4

import structlog

from cdc.errors import CdcError, SettingsError
from cdc.generations.registry import STALE_S, Generations, Progress, Registry, RetainedView, Work
from cdc.model.trace import kind, trace

TICK_S = 1.0
POLL_S = 0.1
log = structlog.get_logger()


@contextmanager
def claim(registry: Registry, sink: str) -> Iterator["Claim"]:
    """Claim a sink's generations for one command.

    Waits until a command that was killed counts as dead.

    Raises:
        SettingsError: another command is at work.
    """
    own_claim = Claim(registry, sink, uuid4().hex)
    own_claim.acquire()
    stopped = Event()
    join_ticks = registry.clock.start(lambda: own_claim.run_ticks(stopped))
    try:
        yield own_claim
    finally:
        stopped.set()
        join_ticks()
        own_claim.release()


class Claim:
    """A command's claim of a sink's generations.

    `progress` is called once a second, in a thread of its own.
    """

    def __init__(self, registry: Registry, sink: str, command: str) -> None:
        self._registry = registry
        self._sink = sink
        self._command = command
        self.clock = registry.clock
        self.progress: Callable[[], Progress] = lambda: Progress(self.clock.time())

    @property
    def generations(self) -> Generations:
        """The registry's entries of the sink, as of the last read."""
        return self._registry.for_sink(self._sink)

    def acquire(self) -> None:
        """Write the claim, and wait until the commands ahead have released theirs or are dead.

        Raises SettingsError.
        """
        self._registry.write((("claim", self._sink, self._command), {"at": self.clock.time()}))
        try:
            while ahead := self._command_ahead():
                self._outwait(ahead)
        except BaseException:
            self.release()
            raise

    def check(self) -> None:
        """Raise SettingsError when another command has removed this claim, as a dead command's."""
        self._registry.read()
        if self._command not in self.generations.claims:
            raise self._conflict("took this one for dead")

    def announce(self, work: Work) -> None:
        """Write the job to the registry before it is done."""
        self.check()
        self._registry.write((("work", self._sink), asdict(work)))

    def forget_retained(self, tables: Sequence[str]) -> None:
        """Delete the retained views of these tables from the registry.

        Called before their generations are replaced.
        """
        retained = [table for table in tables if table in self.generations.retained]
        self._registry.forget_retained(self._sink, retained)

    def complete(
        self, retained: Mapping[str, RetainedView] | None = None, tables: Sequence[str] = ()
    ) -> None:
        """Remove the job from the registry.

        Of `tables`, only the views in `retained` are retained from now on.
        """
        views = retained or {}
        records = (
            (("kept", self._sink, table), asdict(views[table]) if table in views else None)
            for table in tables
        )
        self._registry.write(*records, (("work", self._sink), None))

    def run_ticks(self, stopped: Event) -> None:
        """Write a tick every second until `stopped`: the command is alive, and its progress."""
        while not self.clock.wait(stopped, TICK_S):
            try:
                self._write_tick()
            except CdcError as error:
                log.warning("tick_failed", sink=self._sink, error=error.message)
            except Exception as error:
                # Any error is caught: a command without ticks counts as dead, and another one would
                # start beside it.
                log.error("tick_failed", sink=self._sink, error=kind(error), exception=trace(error))

    def release(self) -> None:
        """Remove the claim. If that fails, others wait until this command counts as dead."""
        try:
            self._registry.write(
                *(((kind, self._sink, self._command), None) for kind in ("tick", "claim"))
            )
        except CdcError as error:
            log.warning("claim_not_released", sink=self._sink, error=error.message)

    def _write_tick(self) -> None:
        self._registry.write((("tick", self._sink, self._command), asdict(self.progress())))

    def _command_ahead(self) -> str | None:
        """Return the command that holds the sink, None when it is this one.

        Raises SettingsError: the claim is gone.
        """
        self.check()
        holder = self.generations.holder
        return holder if holder != self._command else None

    def _outwait(self, command: str) -> None:
        """Wait until a command ahead is gone or dead; remove a dead one.

        Raises SettingsError when it ticks.
        """
        first_tick = self.generations.alive_at[command]
        last_tick = 0.0
        while self.clock.time() - first_tick < STALE_S:
            if self.clock.time() - last_tick > TICK_S:
                self._write_tick()
                last_tick = self.clock.time()
            self.clock.sleep(POLL_S)
            self._registry.read()
            if command not in self.generations.claims:
                return
            if self.generations.alive_at[command] != first_tick:
                raise self._conflict("is at work")
        self._registry.write(
            (("claim", self._sink, command), None), (("tick", self._sink, command), None)
        )

    def _conflict(self, reason: str) -> SettingsError:
        return SettingsError(
            f"Another rebuild or rollback of {self._sink} {reason}.",
            hint=f"cdc -p FILE generations: it shows it; one that was killed can be continued after {STALE_S:.0f} s",
            sink=self._sink,
        )
