"""Postgres and its connector: transactions, and the records that come of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from zlib import crc32

from cdc.model.table import Column, Table, row_id
from tests.simulator.processes import Processes
from tests.support.envelopes import MASKS, Row, encoded, envelope
from tests.support.simulated import MemoryLog

ITEMS = Table(
    "public",
    "items",
    (
        Column("a", "text"),
        Column("b", "bigint"),
        Column("v", "text"),
        Column("w", "text[]"),
        Column("n", "bigint"),
    ),
    ("a", "b"),
    "shop.public.items",
)
ORDERS = Table(
    "public",
    "orders",
    (Column("id", "bigint"), Column("v", "text"), Column("n", "bigint")),
    ("id",),
    "shop.public.orders",
)
TABLES = (ITEMS, ORDERS)
PARTITIONS = {ITEMS.topic: 2, ORDERS.topic: 1}
KEYS = 5
LARGE = ("v", "w")
"""Columns of items whose unchanged values an update doesn't carry."""
TRUNCATION = "shop.cdc.truncation"
HEARTBEAT = "shop.cdc.heartbeat"
VALUES = ("x", "", 'a "b" \\ \n ü', None)
Sent = tuple[str, int, bytes, bytes | None]
"""Topic, partition, key, value."""


@dataclass(frozen=True)
class Change:
    """A change of a row, or a TRUNCATE of its table. `lacking`: columns whose values aren't in the log."""

    table: Table
    op: str
    row: Row
    lsn: int
    lacking: Sequence[str] = ()


@dataclass
class Source:
    """The tables, and the log of their transactions. Every change has a number: it is the row's `n` and
    its LSN.
    """

    rows: dict[Table, dict[str, Row]] = field(default_factory=lambda: {t: {} for t in TABLES})
    wal: list[list[Change]] = field(default_factory=list)
    lsn: int = 0
    is_identity_full: bool = True
    """Whether the log has all values of a row, as with REPLICA IDENTITY FULL."""

    def write(self, changes: Iterable[tuple[str, int, int, int]]) -> None:
        """Commit a transaction: each change is a verb, the numbers of a table, a key and a value."""
        transaction: list[Change] = []
        for verb, table, key, value in changes:
            transaction += self._change(TABLES[table], verb, key, value)
        if transaction:
            self.wal.append(transaction)

    def truncate(self, table: Table) -> None:
        self.rows[table].clear()
        self.lsn += 1
        self.wal.append([Change(table, "truncate", {}, self.lsn)])

    def _change(self, table: Table, verb: str, key: int, value: int) -> Iterator[Change]:
        columns = _key(table, key)
        old = self.rows[table].get(row_id(list(columns.values())))
        if verb == "delete":
            if old:
                yield self._delete(table, old)
            return
        if verb == "rename":
            to = _key(table, value)
            if old and row_id(list(to.values())) not in self.rows[table]:
                yield self._delete(table, old)
                # Debezium's create has what the update lacked.
                yield self._put(table, "c", {**old, **to}, ())
            return
        row: Row = {**columns, "v": VALUES[value % len(VALUES)]}
        if table is ITEMS:
            row["w"] = (None, [], ["y", None], ["x"])[value // 4 % 4]
        if old is None:
            yield self._put(table, "c", row, ())
            return
        lacking: list[str] = []
        if verb == "keep":
            lacking = [name for name in LARGE if name in old and old[name] is not None]
            row |= {name: old[name] for name in lacking}
        is_whole = self.is_identity_full or table is not ITEMS
        yield self._put(table, "u", row, () if is_whole else lacking)

    def _put(self, table: Table, op: str, row: Row, lacking: Sequence[str]) -> Change:
        self.lsn += 1
        row["n"] = self.lsn
        self.rows[table][_id(table, row)] = row
        return Change(table, op, row, self.lsn, lacking)

    def _delete(self, table: Table, row: Row) -> Change:
        self.lsn += 1
        del self.rows[table][_id(table, row)]
        return Change(table, "d", row, self.lsn)

    def rows_after(self, table: Table, transactions: int) -> dict[str, Row]:
        """The rows after so many transactions."""
        rows: dict[str, Row] = {}
        for change in (c for transaction in self.wal[:transactions] for c in transaction):
            if change.table is not table:
                continue
            if change.op == "truncate":
                rows.clear()
            elif change.op == "d":
                rows.pop(_id(table, change.row))
            else:
                rows[_id(table, change.row)] = change.row
        return rows


def _key(table: Table, number: int) -> Row:
    if table is ORDERS:
        return {"id": number}
    # The large number is far beyond what a double can distinguish.
    return {"a": ("k", 'quote"', "sep,", "ü😀", "")[number % 5], "b": number * (2**53 + 1)}


def _id(table: Table, row: Row) -> str:
    return row_id([row[name] for name in table.key])


def records(change: Change) -> list[Sent]:
    """The records of a change, as Debezium writes them."""
    if change.op == "truncate":
        return [floor_record(change.table, change.lsn)]
    table = change.table
    key = {name: change.row[name] for name in table.key}
    bare = encoded(key)
    assert bare
    place = table.topic, crc32(bare) % PARTITIONS[table.topic], bare
    if change.op == "d":
        # With the default identity `before` has dummy values in all columns but the key.
        before = dict.fromkeys((column.name for column in table.columns), "") | key
        value = encoded(envelope("d", before, None, change.lsn))
        return [(*place, value), (*place, None)]
    masks = {name: MASKS[table.column(name).type.endswith("[]")] for name in change.lacking}
    return [(*place, encoded(envelope(change.op, None, {**change.row, **masks}, change.lsn)))]


def floor_record(table: Table, lsn: int) -> Sent:
    """The record of a table's last TRUNCATE, which a trigger writes to its own table."""
    row = {"table_name": table.qualified, "lsn": f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"}
    key = json.dumps({"table_name": table.qualified}).encode()
    return TRUNCATION, 0, key, encoded(envelope("c", None, row, lsn))


@dataclass
class Connector:
    """The connector and its worker: each poll is one transaction of Kafka, which stores its offset, too."""

    processes: Processes
    source: Source
    log: MemoryLog
    is_exactly_once: bool
    """Whether a poll is a transaction of Kafka."""
    stored: int = 0
    """Transactions of the source that are in Kafka, by the offset that it has stored there."""
    snapshots: list[Table] = field(default_factory=list)
    """Tables whose rows are to be sent again, beside the log."""
    slot_lsn: int = 0
    """Where its slot begins."""
    slot_start: int = 0
    """The transactions before that: it has none of them any more."""
    open: str = ""
    """The transaction of Kafka that isn't ended yet."""
    is_committing: bool = False
    polls: int = 0

    @property
    def is_done(self) -> bool:
        """Whether everything is in Kafka."""
        return self.stored == len(self.source.wal) and not self.snapshots and not self.open

    def run(self) -> None:
        """Run its process, which may be killed anywhere. A new one ends what the former has left."""
        self._finish()
        while True:
            self.processes.sleep(0.05)
            if not self.is_done:
                self._poll()

    def abandon(self) -> None:
        """End what a killed process has left, at once."""
        for _ in self._end():
            pass

    def _poll(self) -> None:
        # Rows that are sent again come before the changes that follow them.
        taken = [] if self.snapshots else self.source.wal[self.stored : self.stored + 3]
        position = self.stored + len(taken)
        sent = [record for transaction in taken for c in transaction for record in records(c)]
        sent += self._snapshot(position)
        self.polls += 1
        sent.append(
            (HEARTBEAT, 0, b'{"id":1}', encoded(envelope("u", None, {"id": 1}, self.polls)))
        )
        self.open = f"poll {self.polls}"
        for number, record in enumerate(sent):
            topic, partition, key, value = record
            transaction = self.open if self.is_exactly_once else ""
            self.log.append(topic, partition, key, value, transaction)
            if number % 4 == 1:
                self.processes.sleep(0.004)
        self.processes.sleep(0.004)
        # From here on the broker completes it, whatever becomes of the worker.
        self.is_committing = True
        self.stored = position
        self.snapshots.clear()
        self._finish()

    def _snapshot(self, position: int) -> Iterator[Sent]:
        """Rows as they are at a position, which is the LSN that they are given."""
        streamed = (c.lsn for transaction in self.source.wal[:position] for c in transaction)
        lsn = max(streamed, default=0)
        lsn = max(lsn, self.slot_lsn)
        for table in self.snapshots:
            for row in self.source.rows_after(table, position).values():
                yield from records(Change(table, "r", row, lsn))

    def _finish(self) -> None:
        for _ in self._end():
            self.processes.sleep(0.003)

    def _end(self) -> Iterator[None]:
        if self.open:
            yield from self.log.end_transaction(self.open, is_committed=self.is_committing)
        self.open = ""
        self.is_committing = False
