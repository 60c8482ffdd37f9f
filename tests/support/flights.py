"""The sample's flights as records, byte for byte what the connector makes of the table's columns
(`tests/scenarios/test_pipeline.py` holds them to that): a first snapshot, and what becomes of
flights later.
"""

from collections.abc import Iterator
from datetime import date, datetime
from typing import Any
from zlib import crc32

from cdc.model.table import Column, Table
from cdc.sample import nyc2013
from cdc.sample.plan import KEYS, Change, plan, records
from tests.support.envelopes import PLACEHOLDER, Row, encoded, envelope
from tests.support.twin import Raw

STAMP = "timestamp with time zone"
TYPES = {
    "carrier": "text",
    "flight": "integer",
    "origin": "text",
    "sched_dep": STAMP,
    "dest": "text",
    "tailnum": "text",
    "dep_time": STAMP,
    "dep_delay": "smallint",
    "sched_arr": STAMP,
    "arr_time": STAMP,
    "arr_delay": "smallint",
    "air_time": "smallint",
    "distance": "integer",
    "status": "text",
    "remark": "text",
    "on_time": "boolean",
    "updated_at": STAMP,
}
TABLE = Table(
    "public",
    "flights",
    tuple(Column(name, type_) for name, type_ in TYPES.items()),
    KEYS["flights"],
    "sample.public.flights",
)
MASK = f'"remark":"{PLACEHOLDER}"'.encode()
UPDATED = {"updated_at": "2026-11-26T12:00:00.000000Z"}
LONG_TEXT = 2000
"""From this many characters on a text lies out of its row, and an update that leaves it alone
doesn't carry it.
"""


class Log:
    """The topic of the flights while it is written."""

    def __init__(self, partitions: int) -> None:
        self._ends, self._lsn = [0] * partitions, 1000

    def record(self, op: str | None, row: Row) -> Raw:
        """Append a change of a row, as it is now or as it was; op None: a tombstone."""
        key = encoded({name: _wire(row[name]) for name in TABLE.key})
        assert key is not None
        partition, value = crc32(key) % len(self._ends), None
        self._lsn += 8
        if op is not None:
            wired = {name: _wire(value) for name, value in row.items()} | UPDATED
            before, after = (wired, None) if op == "d" else (None, wired)
            value = envelope(op, before, after, self._lsn)
            value["source"] |= {"table": TABLE.name}
        self._ends[partition] += 1
        return Raw(key, encoded(value), TABLE.topic, partition, self._ends[partition] - 1)


def _wire(value: Any) -> Any:
    return f"{value:%Y-%m-%dT%H:%M:%S.%f}Z" if isinstance(value, datetime) else value


def snapshot(start: date, end: date, partitions: int = 4) -> list[Raw]:
    """The flights of these days as a first snapshot has them."""
    log = Log(partitions)
    return [log.record("r", row) for row in records(nyc2013.flights(start, end))]


def history(start: date, end: date, partitions: int = 4) -> list[Raw]:
    """What a desk writes of the flights of these days (`cdc.sample.plan`), in the order of its
    transactions.
    """
    log, rows = Log(partitions), dict[tuple[Any, ...], Row]()
    changes = (change for step in plan(start, end) for change in step.changes)
    return [
        record
        for change in changes
        if change.table == TABLE.name
        for record in _records_of(change, log, rows)
    ]


def _records_of(change: Change, log: Log, rows: dict[tuple[Any, ...], Row]) -> Iterator[Raw]:
    """Records of a change, once it is made to the rows: a new key is a delete and a new row."""
    old_row, is_rekeyed = rows.pop(change.key, {}), change.key != change.key_after
    if change.op == "delete" or is_rekeyed:
        yield from (log.record("d", old_row), log.record(None, old_row))
    if change.op == "delete":
        return
    rows[change.key_after] = row = old_row | change.values
    if change.op == "insert" or is_rekeyed:
        yield log.record("c", row)
    elif "remark" in change.values or len(row["remark"] or "") < LONG_TEXT:
        yield log.record("u", row)
    else:
        yield log.record("u", row | {"remark": PLACEHOLDER})
