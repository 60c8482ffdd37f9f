"""Batches go from Spark's thread, which plans them, to the thread that owns the stream, which applies them."""

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
    done: threading.Event = field(default_factory=threading.Event)


class Handover(Generic[T]):
    """One query's; once closed, nothing is taken and nobody waits."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[_Parcel[T] | None] = SimpleQueue()
        self._closed = threading.Event()
        self._turn = threading.Lock()

    def give(self, content: T) -> None:
        """Wait until the owner is done with it; at once when there is no owner any more."""
        parcel = _Parcel(content)
        with self._turn:
            if self._closed.is_set():
                return
            self._queue.put(parcel)
        parcel.done.wait()

    def wake(self) -> None:
        """Have the owner look up, without waiting for it."""
        self._queue.put(None)

    @contextmanager
    def receive(self, timeout_s: float) -> Iterator[T | None]:
        """What has been given, for as long as the owner is at it; None when there is nothing within that time."""
        try:
            parcel = self._queue.get(timeout=timeout_s)
        except Empty:
            parcel = None
        try:
            yield parcel.content if parcel else None
        finally:
            if parcel:
                parcel.done.set()

    def close(self) -> None:
        """Let go of whoever waits, now and later."""
        with self._turn:
            self._closed.set()
        while not self._queue.empty():
            if parcel := self._queue.get():
                parcel.done.set()
