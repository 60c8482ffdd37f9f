"""An application that goes on writing while a test looks at something else."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg


@contextmanager
def load(
    dsn: str, write: Callable[["psycopg.Connection[Any]", int], object], every_s: float
) -> Iterator[None]:
    """Call `write` with a connection (each statement commits) and 1, 2, 3, ... for as long as the
    context lasts.

    One call is due `every_s` seconds after the one before, however long that one took.
    """
    stop = threading.Event()

    def run() -> None:
        with psycopg.connect(dsn, autocommit=True) as conn:
            began = time.monotonic()
            for number in itertools.count(1):
                if stop.wait(max(0.0, began + number * every_s - time.monotonic())):
                    return
                write(conn, number)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
