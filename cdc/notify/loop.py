"""Looks at a pipeline again and again for its notifier, in a thread of its own.

A message may be tried again for a minute, so whoever serves or applies doesn't wait for it.
"""

import threading
from collections.abc import Callable, Iterable

import structlog

from cdc.model.finding import Finding
from cdc.model.trace import kind, trace
from cdc.notify.notifier import Notifier

LOOK_S = 15.0
"""Seconds between two looks."""
END_S = 8.0
"""Seconds that a look has to end: longer than one takes while a server hangs."""
log = structlog.get_logger()


class NotifyLoop:
    """Tells of trouble from its making until `close`."""

    def __init__(
        self,
        notifier: Callable[[], Notifier],
        collect: Callable[[], Iterable[Finding]],
        pause_s: float = LOOK_S,
    ) -> None:
        """`notifier` makes one, and is tried again until it can; `collect` asks all servers. Both are
        called in the loop's thread only.
        """
        self._make, self._collect, self._pause_s = notifier, collect, pause_s
        self._notifier: Notifier | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="notify", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look no more, once what is under way has ended: a program that ends while a client's
        native code is at work may crash. A message that is tried again isn't waited for.
        """
        self._closed.set()
        self._thread.join(END_S)

    def _work(self) -> None:
        while not self._closed.is_set():
            try:
                if self._notifier is None:
                    self._notifier = self._make()
                self._notifier.notify(self._collect())
            except Exception as error:
                log.warning("pipeline_not_looked_at", error=kind(error), exception=trace(error))
            self._closed.wait(self._pause_s)
        if self._notifier is not None:
            self._notifier.close()
