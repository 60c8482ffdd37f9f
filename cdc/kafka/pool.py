"""Connections to brokers that stay open between their uses: making one costs more than most requests.

In:  a broker's address. Out: `Topics`, for one user at a time.
Invariant: what has failed, in whatever way, is closed and used no more.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from cdc.kafka.topics import Topics


class TopicsPool:
    """Any thread may borrow from it, and close it. There are as many connections as users at once."""

    def __init__(self) -> None:
        self._idle: list[Topics] = []

    @contextmanager
    def borrowed(self, bootstrap: str) -> Iterator[Topics]:
        """Borrow a connection while the block runs. Raises ConnectorError."""
        topics = self._take(bootstrap) or Topics(bootstrap)
        try:
            topics.require_reachable()
            yield topics
        except BaseException:
            topics.close()
            raise
        self._idle.append(topics)

    def close(self) -> None:
        """Close those that nobody uses. The pool may be used again."""
        with suppress(IndexError):
            while True:
                self._idle.pop().close()

    def _take(self, bootstrap: str) -> Topics | None:
        """Take one to this broker; those to others are closed: the file names another now."""
        with suppress(IndexError):
            while True:
                topics = self._idle.pop()
                if topics.bootstrap == bootstrap:
                    return topics
                topics.close()
        return None
