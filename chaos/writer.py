"""The application: transactions by a seed, and a history of what Postgres has acknowledged.

It is the only writer, so `rows` says exactly which rows must be there.
"""

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psycopg

ACCOUNTS = 20
BALANCE = 1_000
ITEMS = range(1, 301)
RATE = 25.0
"""Transactions per second."""
WIDE_BYTES = 6_000
"""Stored outside the row: an update of another column doesn't carry it."""
WATCHED = range(1, 13)
"""Readers watch these items and accounts; the items are changed more often."""
SCHEMA = f"""
CREATE TABLE accounts (id int PRIMARY KEY, balance int NOT NULL, ver bigint NOT NULL);
CREATE TABLE items (id int PRIMARY KEY, account int NOT NULL, ver bigint NOT NULL, note text, wide text);
ALTER TABLE items ALTER wide SET STORAGE EXTERNAL, REPLICA IDENTITY FULL;
CREATE TABLE ledger (id bigint PRIMARY KEY, kind text NOT NULL, ver bigint NOT NULL);
CREATE TABLE batches (id bigint PRIMARY KEY, n int NOT NULL);
INSERT INTO accounts SELECT n, {BALANCE}, 0 FROM generate_series(1, {ACCOUNTS}) n;
"""
KINDS = {
    "transfer": 30,
    "update": 30,
    "insert": 14,
    "delete": 8,
    "wide": 8,
    "batch": 9,
    "truncate": 0.2,
}
Row = dict[str, Any]
Rows = dict[str, dict[int, Row]]
"""Rows by table and key."""
Change = tuple[str, int, Row | None]
"""Table, key, row; None for a deleted row, key 0 and None for all rows."""


def first_rows() -> Rows:
    accounts = {n: {"id": n, "balance": BALANCE, "ver": 0} for n in range(1, ACCOUNTS + 1)}
    return {"accounts": accounts, "items": {}, "ledger": {}, "batches": {}}


def apply(rows: Rows, changes: list[Change]) -> None:
    for table, key, row in changes:
        if row is not None:
            rows[table][key] = row
        elif key:
            rows[table].pop(key, None)
        else:
            rows[table].clear()


@dataclass
class Plan:
    """What the next transaction does. Versions only grow, also of a row that is deleted and comes back."""

    chance: random.Random
    ver: int = 0

    def next(self, number: int, rows: Rows) -> tuple[str, list[Change]]:
        (kind,) = self.chance.choices(list(KINDS), list(KINDS.values()))
        self.ver += 1
        changes: list[Change] = [("ledger", number, {"id": number, "kind": kind, "ver": self.ver})]
        if kind == "transfer":
            source, target = self.chance.sample(sorted(rows["accounts"]), 2)
            amount = self.chance.randint(1, BALANCE // 2)
            for key, change in ((source, -amount), (target, amount)):
                row = rows["accounts"][key]
                changes.append(
                    ("accounts", key, {**row, "balance": row["balance"] + change, "ver": self.ver})
                )
        elif kind == "truncate":
            changes.append(("batches", 0, None))
        elif kind == "batch":
            changes += [("batches", key, {"id": key, "n": number}) for key in self._new(number)]
        elif kind == "delete" and rows["items"]:
            changes.append(("items", self.chance.choice(sorted(rows["items"])), None))
        else:
            changes.append(self._item(kind, number, rows["items"]))
        return kind, changes

    def _new(self, number: int) -> range:
        return range(number * 10, number * 10 + self.chance.randint(1, 9))

    def _item(self, kind: str, number: int, items: dict[int, Row]) -> Change:
        key = self.chance.choice(WATCHED if self.chance.random() < 0.4 else ITEMS)
        row = items.get(key) or {"id": key, "wide": None}
        row = {**row, "account": self.chance.randint(1, ACCOUNTS), "ver": self.ver}
        row["note"] = f"{kind} {number}"
        if kind == "wide":
            row["wide"] = self.chance.choice("abcdef") * WIDE_BYTES + str(number)
        return "items", key, row


class Writer:
    """Writes until it is closed. Whoever holds `pause` holds it up between two transactions."""

    def __init__(self, dsn: str, seed: int, note: Callable[..., object]) -> None:
        self.rows = first_rows()
        """What acknowledged transactions have left."""
        self.number = 0
        """Of the transaction that was begun last."""
        self.acknowledged = 0
        self.error: BaseException | None = None
        self.pause = threading.Lock()
        self._dsn = dsn
        self._note = note
        self._plan = Plan(random.Random(f"{seed} writer"))
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._write, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _write(self) -> None:
        try:
            self._connection = self._connect()
            while not self._closing.wait(1 / RATE):
                with self.pause:
                    self._write_next()
            self._connection.close()
        except BaseException as error:
            self.error = error
            raise

    def _write_next(self) -> None:
        self.number += 1
        kind, changes = self._plan.next(self.number, self.rows)
        outcome = "committed"
        try:
            _commit(self._connection, changes, self.rows)
        except psycopg.OperationalError:
            # Its answer was lost. Every backend of the server has ended with it, so the ledger is final.
            self._connection = self._connect()
            query = "SELECT FROM ledger WHERE id = %s"
            is_there = self._connection.execute(query, [self.number]).fetchone() is not None
            outcome = "found" if is_there else "lost"
        if outcome != "lost":
            apply(self.rows, changes)
            self.acknowledged += 1
        self._note("write", id=self.number, kind=kind, outcome=outcome)

    def _connect(self) -> "psycopg.Connection[Any]":
        while not self._closing.is_set():
            try:
                return psycopg.connect(self._dsn, autocommit=True)
            except psycopg.OperationalError:
                time.sleep(0.2)
        raise psycopg.OperationalError("closed while Postgres is away")


def _commit(connection: "psycopg.Connection[Any]", changes: list[Change], rows: Rows) -> None:
    with connection.transaction():
        for table, key, row in changes:
            if row is not None:
                _put(connection, table, row, rows[table].get(key))
            elif key:
                connection.execute(f"DELETE FROM {table} WHERE id = %s".encode(), [key])
            else:
                connection.execute(f"TRUNCATE {table}".encode())


def _put(connection: "psycopg.Connection[Any]", table: str, row: Row, former: Row | None) -> None:
    if former is None:
        values = ", ".join(["%s"] * len(row))
        statement = f"INSERT INTO {table} ({', '.join(row)}) VALUES ({values})"
        connection.execute(statement.encode(), list(row.values()))
    else:
        changed = {name: value for name, value in row.items() if former.get(name) != value}
        names = ", ".join(f"{name} = %s" for name in changed)
        statement = f"UPDATE {table} SET {names} WHERE id = %s"
        connection.execute(statement.encode(), [*changed.values(), row["id"]])
