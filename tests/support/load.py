"""An application that goes on writing while a test looks at something else."""

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg


@contextmanager
def load(dsn: str, write: Callable[["psycopg.Connection[Any]", int], object], pause_s: float) -> Iterator[None]:
    """Call `write` with a connection (each statement commits) and 1, 2, 3, ... for as long as the context lasts."""
    stop = threading.Event()

    def run() -> None:
        with psycopg.connect(dsn, autocommit=True) as conn:
            for number in itertools.count(1):
                if stop.wait(pause_s):
                    return
                write(conn, number)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
