"""Repeat a step in a thread of its own while a run is at work.

In:  the step. Out: what it does, every few seconds.
Invariant: no failure ends the thread. A failure is logged once, until the step succeeds or fails in
another way.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog

from cdc.sink.remedy import classify

log = structlog.get_logger()


@contextmanager
def repeating(
    step: Callable[[], object], every_s: float, *, subject: str, event: str
) -> Iterator[None]:
    """Call `step` every `every_s` seconds until the block ends.

    `subject` names the step in messages; `event` is the log's name for a failure of it.
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
                    log.warning(event, error=failure.message, hint=failure.hint)
                reported = failure.message

    threading.Thread(target=repeat, name=subject, daemon=True).start()
    try:
        yield
    finally:
        stopping.set()
