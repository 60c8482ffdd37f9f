"""Hand batches over from Spark's thread, which plans them, to the thread that owns the stream and
applies them.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass
class _Parcel(Generic[T]):
    content: T
    handled: threading.Event = field(default_factory=threading.Event)


class Handover(Generic[T]):
    """The handover of one query. Once closed, no batch is received and no thread waits."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[_Parcel[T] | None] = SimpleQueue()
        self._closed = threading.Event()
        self._turn = threading.Lock()

    def give(self, content: T) -> None:
        """Give a batch and wait until the owner has handled it; returns at once if the handover is
        closed.
        """
        parcel = _Parcel(content)
        with self._turn:
            if self._closed.is_set():
                return
            self._queue.put(parcel)
        parcel.handled.wait()

    def wake(self) -> None:
        """Wake the owner without a batch; returns at once."""
        self._queue.put(None)

    @contextmanager
    def receive(self, timeout_s: float) -> Iterator[T | None]:
        """Receive a batch, which counts as handled when the block ends; None if none comes within
        that time.
        """
        try:
            parcel = self._queue.get(timeout=timeout_s)
        except Empty:
            parcel = None
        try:
            yield parcel.content if parcel else None
        finally:
            if parcel:
                parcel.handled.set()

    def close(self) -> None:
        """Release all waiting threads, now and later."""
        with self._turn:
            self._closed.set()
        while not self._queue.empty():
            if parcel := self._queue.get():
                parcel.handled.set()
