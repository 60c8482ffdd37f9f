"""Tells of what others have seen, in a thread of its own: a message may be tried again for a minute,
and whoever looks doesn't wait for it.
"""

import threading
from collections.abc import Callable, Iterable

import structlog

from cdc.model.finding import Finding
from cdc.model.trace import kind, trace
from cdc.notify.notifier import Notifier

END_S = 8.0
"""Seconds for what is under way at the end."""
log = structlog.get_logger()


class NotifyLoop:
    """Tells of findings from its making until `close`."""

    def __init__(self, notifier: Callable[[], Notifier]) -> None:
        """`notifier` makes one, in the loop's thread, and is tried again until it can."""
        self._make = notifier
        self._notifier: Notifier | None = None
        self._findings: tuple[Finding, ...] = ()
        self._news, self._closing = threading.Event(), False
        self._thread = threading.Thread(target=self._work, name="notify", daemon=True)
        self._thread.start()

    def take(self, findings: Iterable[Finding]) -> None:
        """Take the findings of a look; returns at once. While a message is under way only those of
        the newest look wait.
        """
        self._findings = tuple(findings)
        self._news.set()

    def close(self) -> None:
        """End, once what is under way has ended: a program that ends while a client's native code
        is at work may crash. A message that is tried again isn't waited for.
        """
        self._closing = True
        self._news.set()
        self._thread.join(END_S)

    def _work(self) -> None:
        while True:
            self._news.wait()
            self._news.clear()
            if self._closing:
                break
            self._tell()
        if self._notifier is not None:
            self._notifier.close()

    def _tell(self) -> None:
        try:
            if self._notifier is None:
                self._notifier = self._make()
            self._notifier.notify(self._findings)
        except Exception as error:
            log.warning("findings_not_told", error=kind(error), exception=trace(error))
