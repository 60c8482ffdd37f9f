"""The application: transactions by a seed, and a log of what Postgres has acknowledged.

It is the only writer, so the log says exactly which rows must be there.
"""

import json
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg

ACCOUNTS = 20
BALANCE = 1_000
ITEMS = 300
RATE = 25.0
"""Transactions per second."""
WIDE_BYTES = 6_000
"""Stored outside the row: an update of another column doesn't carry it."""
WATCHED = 12
"""Items and accounts 1 to so many are changed more often, and readers watch them."""
SCHEMA = f"""
CREATE TABLE accounts (id int PRIMARY KEY, balance int NOT NULL, ver bigint NOT NULL);
CREATE TABLE items (id int PRIMARY KEY, account int NOT NULL, ver bigint NOT NULL, note text, wide text);
ALTER TABLE items ALTER wide SET STORAGE EXTERNAL, REPLICA IDENTITY FULL;
CREATE TABLE ledger (id bigint PRIMARY KEY, kind text NOT NULL);
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
        changes: list[Change] = [("ledger", number, {"id": number, "kind": kind})]
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
        key = self.chance.randint(1, WATCHED if self.chance.random() < 0.4 else ITEMS)
        row = items.get(key) or {"id": key, "wide": None}
        row = {**row, "account": self.chance.randint(1, ACCOUNTS), "ver": self.ver}
        row["note"] = f"{kind} {number}"
        if kind == "wide":
            row["wide"] = self.chance.choice("abcdef") * WIDE_BYTES + str(number)
        return "items", key, row


@dataclass
class Writer:
    """Writes until it is closed. `acknowledged` counts transactions; `rows` is what they have left."""

    dsn: str
    seed: int
    log: Path
    rows: Rows = field(default_factory=first_rows)
    number: int = 0
    """Of the transaction that was begun last."""
    acknowledged: int = 0
    in_doubt: int = 0
    """Transactions whose answer was lost; the ledger says whether they were committed."""
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self._closing = threading.Event()
        self._going = threading.Event()
        self._idle = threading.Event()
        self._going.set()
        self._plan = Plan(random.Random(f"{self.seed} writer"))
        self._thread = threading.Thread(target=self._write, daemon=True)
        self._thread.start()

    def pause(self) -> None:
        """Return once no transaction is open."""
        self._idle.clear()
        self._going.clear()
        while self.error is None and not self._idle.wait(1):
            pass

    def resume(self) -> None:
        self._going.set()

    def close(self) -> None:
        self._closing.set()
        self._going.set()
        self._thread.join()

    def _write(self) -> None:
        try:
            with self.log.open("w") as log:
                self._write_all(lambda entry: print(json.dumps(entry), file=log, flush=True))
        except BaseException as error:
            self.error = error
            raise

    def _write_all(self, note: Callable[[dict[str, Any]], None]) -> None:
        connection = self._connect()
        while not self._closing.wait(1 / RATE):
            if not self._going.is_set():
                self._idle.set()
                self._going.wait()
                continue
            self.number += 1
            number = self.number
            kind, changes = self._plan.next(number, self.rows)
            outcome = "committed"
            try:
                _commit(connection, changes, self.rows)
            except psycopg.OperationalError:
                # Every backend of the server has ended with it, so the answer is final.
                self.in_doubt += 1
                connection = self._connect()
                found = connection.execute("SELECT FROM ledger WHERE id = %s", [number])
                outcome = "found" if found.fetchone() is not None else "lost"
            if outcome != "lost":
                apply(self.rows, changes)
                self.acknowledged += 1
            note({"at": round(time.time(), 3), "id": number, "kind": kind, "outcome": outcome})
        connection.close()

    def _connect(self) -> "psycopg.Connection[Any]":
        while not self._closing.is_set():
            try:
                return psycopg.connect(self.dsn, autocommit=True)
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
