"""Repeat a step in a separate thread during a run.

In:  the step. Out: its effects, every few seconds. Invariant: no failure ends the thread. A failure
that recurs is reported once, until the step succeeds or fails in another way.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cdc.errors import CdcError
from cdc.sink.remedy import classify


@contextmanager
def repeating(
    step: Callable[[], object],
    every_s: float,
    *,
    subject: str,
    report: Callable[[CdcError], object],
    close: Callable[[], object] = lambda: None,
) -> Iterator[None]:
    """Call `step` every `every_s` seconds until the block ends, and `report` with its failures.

    `subject` names the step in messages. `close` is called in the same thread after the last step, which may
    end later than the block.
    """
    stopping = threading.Event()

    def repeat() -> None:
        reported: str | None = None
        while not stopping.wait(every_s):
            try:
                step()
                reported = None
            except Exception as error:
                failure = classify(error, subject)
                if failure.message != reported:
                    report(failure)
                reported = failure.message
        close()

    threading.Thread(target=repeat, name=subject, daemon=True).start()
    try:
        yield
    finally:
        stopping.set()
