"""Decode and apply, one record after the other: the independent reference that codec, lane and audit must equal."""

import json
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from hashlib import md5
from typing import Any, Literal, NamedTuple
from uuid import UUID

from cdc.model.table import Column, Table, row_id

Row = dict[str, Any]
RowFormat = Literal["events", "documents"]
"""What a view takes: every change as the connector wrote its row, or rows as documents."""
UNKNOWN = object()
"""A value in a view that no record has ever told."""
INTEGERS = {"smallint": 16, "integer": 32, "bigint": 64}
JSON_TYPES = ("json", "jsonb", "hstore")


class Raw(NamedTuple):
    """A record as Kafka holds it."""

    key: bytes | None
    value: bytes | None
    topic: str
    partition: int
    offset: int


@dataclass(frozen=True)
class Change:
    """The change that a record tells. after is None for a delete; missing: columns whose value it
    doesn't carry, null in `after`.
    """

    topic: str
    partition: int
    offset: int
    id: str | None
    op: str | None = None
    after: Row | None = None
    missing: frozenset[str] | None = None
    lsn: int | None = None
    dead: bool = False
    wrong: bool = False


@dataclass(frozen=True)
class Folded:
    """The newest change of a row; older as (row, missing) pairs, newest first, down to where its missing values are."""

    topic: str
    partition: int
    id: str | None
    offset: int | None
    row: Row | None
    missing: frozenset[str] | None
    older: tuple[tuple[Row | None, frozenset[str] | None], ...] | None
    first: int | None
    records: int
    dead: int
    quarantined: int


def placeholders(text: str) -> dict[str, Any]:
    """The placeholder in each of its shapes, by the kind of column that has it."""
    raw = text.encode()
    encoded = b64encode(raw).decode()
    uuid = str(UUID(bytes=md5(raw).digest(), version=3))
    pair = {text: text}
    return {
        "text": text,
        "bytea": encoded,
        "uuid": uuid,
        "text[]": [text],
        "bytea[]": [encoded],
        "uuid[]": [uuid],
        "integer[]": list(raw),
        "hstore as object": pair,
        "hstore": json.dumps(pair, separators=(",", ":")),
    }


def loads(text: str) -> Any:
    """JSON as the standard has it, numbers with a point by their text."""

    def refuse(word: str) -> None:
        raise ValueError(word)

    return json.loads(text, parse_float=str, parse_constant=refuse)


class Twin:
    """Decodes records of some tables; floors by topic."""

    def __init__(
        self,
        tables: Iterable[Table],
        form: RowFormat,
        placeholder: str,
        floors: Mapping[str, int] | None = None,
    ) -> None:
        self.tables = {table.topic: table for table in tables}
        self.form, self.floors = form, floors or {}
        self.shapes = list(placeholders(placeholder).values())

    def decode(self, record: Raw) -> Change:
        table = self.tables.get(record.topic)
        place = (record.topic, record.partition, record.offset)
        key = None if table is None else _key(table, record.key)
        if table is None or key is None:
            return Change(*place, None, wrong=True)
        bare = Change(*place, key)
        if record.value is None:
            return bare
        try:
            value = loads(record.value.decode())
            source = value.get("source") or {}
            op, after, lsn = value["op"], value.get("after"), _lsn(source)
        except (ValueError, AttributeError, KeyError):
            return replace(bare, wrong=True)
        elsewhere = not table.topic.endswith(
            f".{source.get('schema', table.schema)}.{source.get('table', table.name)}"
        )
        if (
            elsewhere
            or op not in ("r", "c", "u", "d")
            or (op != "d" and not isinstance(after, dict))
        ):
            return replace(bare, wrong=True)
        dead = lsn is not None and lsn < self.floors.get(table.topic, 0)
        change = replace(bare, op=op, lsn=lsn, dead=dead)
        return change if op == "d" else self._with_row(change, table, after)

    def _with_row(self, bare: Change, table: Table, after: Row) -> Change:
        # A snapshot selects its rows: it has all values.
        shapes = [] if bare.op == "r" else self.shapes
        missing = frozenset(name for name, value in after.items() if value in shapes)
        row = {name: None if name in missing else value for name, value in after.items()}
        if not all(_fits(column, row.get(column.name), self.form) for column in table.columns):
            return replace(bare, wrong=True)
        return replace(bare, after=self._formed(table, row), missing=missing or None)

    def _formed(self, table: Table, row: Row) -> Row:
        if self.form == "events":
            return row
        documents = {c.name for c in table.columns if c.type.split(".")[-1] in JSON_TYPES}
        return {
            name: loads(value) if name in documents and value is not None else value
            for name, value in row.items()
        }


def _lsn(source: Row) -> int | None:
    """Rows of an incremental snapshot have theirs in `sequence` only."""
    lsn = source.get("lsn")
    return int(loads(source["sequence"])[1]) if lsn is None and source.get("sequence") else lsn


def _key(table: Table, key: bytes | None) -> str | None:
    """The id of a record's row; None when the key isn't one of the table."""
    try:
        parsed = loads((key or b"").decode())
        values = [parsed[name] for name in table.key]
    except (ValueError, TypeError, KeyError):
        return None
    fit = all(
        value is not None and _fits(table.column(name), value, "documents")
        for name, value in zip(table.key, values, strict=True)
    )
    return row_id(values) if fit else None


def _fits(column: Column, value: Any, form: RowFormat) -> bool:
    """Whether a value as the connector writes it can be one of the column's."""
    type_ = column.type
    if value is None:
        return True
    if type_.endswith("[]"):
        element = Column(column.name, type_.removesuffix("[]"))
        # Nothing but nulls: what the connector makes of an array of two dimensions.
        damaged = isinstance(value, list) and value and all(element is None for element in value)
        return (
            isinstance(value, list)
            and not damaged
            and all(_fits(element, item, form) for item in value)
        )
    if type_ in INTEGERS:
        # Documents show what the connector wrote; a column of the warehouse has a width.
        bits = INTEGERS[type_] if form == "events" else 64
        return type(value) is int and -(2 ** (bits - 1)) <= value < 2 ** (bits - 1)
    if type_ == "boolean":
        return isinstance(value, bool)
    if type_.startswith("numeric(") and form == "events":
        return _decimal(value)
    return True


def _decimal(value: Any) -> bool:
    try:
        return Decimal(value).is_finite()
    except (InvalidOperation, TypeError):
        return False


def fold(changes: Sequence[Change]) -> list[Folded]:
    """Fold changes, in any order, to one row per topic, partition and id."""
    rows: dict[tuple[str, int, str | None], list[Change]] = {}
    for change in sorted(changes, key=lambda change: change.offset):
        rows.setdefault((change.topic, change.partition, change.id), []).append(change)
    return [_folded(*place, changes) for place, changes in rows.items()]


def _folded(topic: str, partition: int, key: str | None, changes: list[Change]) -> Folded:
    real = [change for change in changes if change.offset >= 0]
    quarantined = sum(change.wrong for change in real)
    dead = sum(change.dead and not change.wrong for change in real)
    living = [change for change in changes if not change.wrong and not change.dead]
    counts = (len(real), dead, quarantined)
    if not living:
        return Folded(topic, partition, key, None, None, None, None, None, *counts)
    newest = living[-1]
    if newest.missing is None:
        return Folded(
            topic, partition, key, newest.offset, newest.after, None, None, newest.offset, *counts
        )
    older: list[tuple[Row | None, frozenset[str] | None]] = []
    first = newest.offset
    for change in reversed(
        [
            change
            for change in changes
            if change.offset < newest.offset and not (change.dead and not change.wrong)
        ]
    ):
        older.append((None, None) if change.wrong else (change.after, change.missing))
        first = max(0, change.offset)
        if change.wrong or change.missing is None:
            break
    return Folded(
        topic,
        partition,
        key,
        newest.offset,
        newest.after,
        newest.missing,
        tuple(older),
        min(first, newest.offset),
        *counts,
    )


def applied(changes: Iterable[Change], view: Mapping[str, Row]) -> tuple[dict[str, Row], set[str]]:
    """The view after changes of one topic in offset order, and the ids of rows with a value that
    nobody knows.

    Change by change, without a fold: what a fold and a sink must come to together.
    """
    now, unknown = dict(view), set[str]()
    for change in sorted(changes, key=lambda change: change.offset):
        if change.id is None or (change.dead and not change.wrong):
            continue
        if change.wrong:
            unknown.add(change.id)
        elif change.after is None:
            now.pop(change.id, None)
            unknown.discard(change.id)
        else:
            row = {} if change.id in unknown else now.get(change.id, {})
            now[change.id] = {
                **change.after,
                **{name: row.get(name, UNKNOWN) for name in change.missing or ()},
            }
            unknown.discard(change.id)
    # A row in quarantine that nothing newer has come to stays as it was.
    lost = {key for key, row in now.items() if any(value is UNKNOWN for value in row.values())}
    return {key: row for key, row in now.items() if key not in lost}, lost
