"""An application that goes on writing: some hundred changes a second, a few rows again and again."""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg

from tests.support.load import load

ROWS = 3000
"""Rows 1 to ROWS are there for good; `writing` changes the upper half of them and inserts and deletes beyond."""
HOT = tuple(range(ROWS - 4, ROWS + 1))
TABLE = "CREATE TABLE busy (id int PRIMARY KEY, name text, amount numeric(12,2), at timestamptz)"
FILL = (
    f"INSERT INTO busy SELECT n, 'row ' || n, n / 7.0, '2026-01-01'::timestamptz + n * interval '1 s'"
    f" FROM generate_series(1, {ROWS}) n"
)
CHANGES = 5
"""The number of changes of one transaction."""


@dataclass
class Progress:
    changes: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        return self.changes / self.seconds if self.seconds else 0.0


@contextmanager
def writing(dsn: str, rate: float = 500.0) -> Iterator[Progress]:
    """Change the table `busy` at `rate` changes a second for as long as the context lasts."""
    progress, chance, began = Progress(), random.Random(7), time.monotonic()

    def write(connection: "psycopg.Connection[Any]", _: int) -> None:
        with connection.transaction():
            for _ in range(CHANGES):
                _change(connection, chance, progress.changes)
                progress.changes += 1
        progress.seconds = time.monotonic() - began

    with load(dsn, write, CHANGES / rate):
        yield progress


def _change(connection: "psycopg.Connection[Any]", chance: random.Random, number: int) -> None:
    kind = chance.random()
    if kind < 0.3:
        connection.execute(
            "UPDATE busy SET name = %s WHERE id = %s", [f"hot {number}", chance.choice(HOT)]
        )
    elif kind < 0.7:
        row = chance.randint(ROWS // 2 + 1, ROWS - len(HOT))
        connection.execute("UPDATE busy SET amount = amount + 1, at = now() WHERE id = %s", [row])
    elif kind < 0.85:
        # Rows that come and go: there in one moment, gone in the next, there again.
        connection.execute(
            "INSERT INTO busy VALUES (%s, %s, 0, now()) ON CONFLICT (id) DO UPDATE SET amount = 1",
            [ROWS + chance.randint(1, 300), f"new {number}"],
        )
    else:
        connection.execute("DELETE FROM busy WHERE id = %s", [ROWS + chance.randint(1, 300)])
