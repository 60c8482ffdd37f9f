"""What follows the error that has ended a stream: the stream stays ended, starts again after a
pause, or ends the whole run.

Pure. Failures that pass by trying again at once never end a stream: see `cdc.apply.stream`. The end
of Spark ends the run, see `cdc.apply.supervisor`.
"""

import time
from collections.abc import Callable
from enum import StrEnum

from cdc.errors import CdcError, Fenced, Interrupted, SettingsError

FIRST_PAUSE_S, LONGEST_PAUSE_S = 10.0, 600.0
"""The first pause before a start, which doubles, and the longest. A stream that has worked for longer
than the longest begins with the first again.
"""
FINAL = (SettingsError, Fenced, Interrupted)
"""Errors after which a start would change nothing until a person has acted, or would do harm: two
writers would end each other for ever.
"""


class Sequel(StrEnum):
    """What follows the error that has ended a stream."""

    NOTHING = "nothing"
    """The stream stays ended; the others go on."""
    RESTART = "restart"
    """The stream starts again after a pause."""
    END_OF_RUN = "end of run"
    """All streams end."""


Policy = Callable[[CdcError], Sequel]


def end_stream(_: CdcError) -> Sequel:
    """Leave it at that: for runs that end by themselves."""
    return Sequel.NOTHING


def end_run(_: CdcError) -> Sequel:
    """End the whole run at the first error: whatever has started it knows what to do."""
    return Sequel.END_OF_RUN


def restart_stream(error: CdcError) -> Sequel:
    """Start it again, unless that would change nothing: for runs that go on until they are
    stopped.
    """
    return Sequel.NOTHING if isinstance(error, FINAL) else Sequel.RESTART


class BackOff:
    """The pauses between the starts of one stream. One thread uses it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._pause_s, self._began = clock, FIRST_PAUSE_S, clock()

    def begin(self) -> None:
        """Note that the stream starts."""
        self._began = self._clock()

    def next_pause_s(self) -> float:
        """Seconds to wait now that the stream has ended; the next time twice as long."""
        if self._clock() - self._began > LONGEST_PAUSE_S:
            self._pause_s = FIRST_PAUSE_S
        pause_s, self._pause_s = self._pause_s, min(LONGEST_PAUSE_S, 2 * self._pause_s)
        return pause_s
