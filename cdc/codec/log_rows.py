"""What executors make of a topic's raw records: which row each is of, and what it says of that row.

In:  records as Spark's Kafka source gives them, a partition's in the order of offsets
Out: rows that Spark counts, compares and folds; of an audit's records no value leaves the executor

`RecordClassifier` is for the audit, `documents`, `ids` and `commits` are for `cdc.verify.recent_changes`,
`unknown` ends what `cdc.audit` folds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from cdc.codec.decode_options import DecodeOptions
from cdc.codec.members import members
from cdc.codec.record import Change, RecordDecoder, Unreadable
from cdc.codec.table import TableCodec, codec
from cdc.model.table import Column, Table

if TYPE_CHECKING:
    import pyarrow as pa

    Work = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]
    """What is done with the Arrow batches of a task."""

RECORDS = ("key", "value", "partition", "offset")
"""Of the records that an audit takes."""
KEYLESS = "keyless"
FOREIGN = "foreign"
UNREADABLE = "unreadable"
TOMBSTONE = "tombstone"
DELETE = "delete"
ROW = "row"
DEAD = "dead"
SUMMARY = (
    "partition int, offset long, id string, says string, living boolean, outdated boolean, missing array<string>,"
    " carried array<string>, unmasked boolean"
)
IDS = "id string, key binary"
COMMITS = "id string, committed_us long, offset long"
DOCUMENTS = "id string, document string"
NOTHING: frozenset[str] = frozenset()


class RecordSummary(NamedTuple):
    """What an audit needs to know of a record; as columns they are `SUMMARY`.

    id        of its row; None for KEYLESS and FOREIGN
    says      what the record is to the views
              KEYLESS, FOREIGN: it is of no row, since its key isn't one of the table
              UNREADABLE: no change that the views can hold, also where it is from before a TRUNCATE
              DEAD: from before a TRUNCATE, or of another server
              TOMBSTONE, DELETE, ROW: what a view makes of it
    living    whether a view would make that of it; a tombstone may be dead, too
    outdated  a row from before the definition by which its values have to be read
    missing   the columns whose value a row doesn't carry, None for one that carries all
    carried   those that it does carry, None where these are the table's own and no others
    unmasked  whether it has a value that the mask of its column would have changed; of a DEAD record
              and a DELETE, too
    """

    partition: int
    offset: int
    id: str | None
    says: str
    living: bool = False
    outdated: bool = False
    missing: list[str] | None = None
    carried: list[str] | None = None
    unmasked: bool = False


@dataclass(frozen=True)
class RecordClassifier:
    """Looks at the records of one topic as a rebuild of all its views would meet them. Can be
    pickled.

    warehouses  the table with the columns of each view that is a warehouse, which can't hold all that
                the others can
    below       the LSN from which on records are what the table's definition makes of them
    """

    table: Table
    reading: DecodeOptions
    warehouses: tuple[Table, ...]
    below: int = 0

    def __reduce__(
        self,
    ) -> tuple[type[RecordClassifier], tuple[Table, DecodeOptions, tuple[Table, ...], int]]:
        return RecordClassifier, (self.table, self.reading, self.warehouses, self.below)

    def work(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """RECORDS in, `RecordSummary` out."""
        for batch in batches:
            columns = (batch.column(name).to_pylist() for name in RECORDS)
            yield _batch([self.classify(*record) for record in zip(*columns, strict=True)])

    def classify(
        self, key: bytes | None, value: bytes | None, partition: int, offset: int
    ) -> RecordSummary:
        """Say what a rebuild would make of one record, and whether it has a value that is masked now."""
        summary = self._summarize(key, value, partition, offset)
        if value is None or not self._masked:
            return summary
        return summary._replace(unmasked=self._shows_masked(value))

    def _summarize(
        self, key: bytes | None, value: bytes | None, partition: int, offset: int
    ) -> RecordSummary:
        if key is None:
            return RecordSummary(partition, offset, None, KEYLESS)
        row_id = self._decoder.row_id(self.table.topic, key)
        if row_id is None or members(key).keys() != self._key:
            return RecordSummary(partition, offset, None, FOREIGN)
        if offset < self._first_offset(partition):
            # Of another server or with another key: it need not be a change of the table as it is
            # now.
            return RecordSummary(partition, offset, row_id, TOMBSTONE if value is None else DEAD)
        return self._change(row_id, key, value, partition, offset)

    def _change(
        self, row_id: str, key: bytes, value: bytes | None, partition: int, offset: int
    ) -> RecordSummary:
        try:
            change = self._decoder.decode(self.table.topic, key, value)
        except Unreadable:
            return RecordSummary(partition, offset, row_id, UNREADABLE)
        # Before its values are looked at: what is dead needs to fit no view.
        if change.lsn is not None and change.lsn < self._floor:
            return RecordSummary(partition, offset, row_id, DEAD)
        if change.row is None:
            return RecordSummary(
                partition, offset, row_id, TOMBSTONE if value is None else DELETE, living=True
            )
        for table_codec, warehouse in self._codecs:
            if table_codec.problem(change.row, warehouse=warehouse):
                return RecordSummary(partition, offset, row_id, UNREADABLE)
        return self._row(change, change.row, partition, offset)

    def _row(self, change: Change, row: bytes, partition: int, offset: int) -> RecordSummary:
        outdated = change.lsn is not None and change.lsn < self.below
        carried = members(row).keys() - change.missing
        if self.table.reshaped:
            carried &= self._columns
        carried_columns = None if carried == self._columns else sorted(carried)
        missing = list(change.missing) or None
        return RecordSummary(
            partition, offset, change.id, ROW, True, outdated, missing, carried_columns
        )

    def _shows_masked(self, value: bytes) -> bool:
        try:
            # A mask may cut a character in half (a surrogate). Other decoders refuse such a text.
            event = json.loads(value)
            rows = [row for row in (event.get("before"), event.get("after")) if row]
            return any(
                column.mask is not None
                and column.mask.shows(column.type, row.get(column.source_name))
                for row in rows
                for column in self._masked
            )
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return False  # It is UNREADABLE, and reported as that.

    def _first_offset(self, partition: int) -> int:
        first_offsets = self.reading.first_offsets.get(self.table.topic, ())
        return first_offsets[partition] if partition < len(first_offsets) else 0

    @cached_property
    def _floor(self) -> int:
        return self.reading.floors.get(self.table.topic, 0)

    @cached_property
    def _masked(self) -> list[Column]:
        return [column for column in self.table.columns if column.mask]

    @cached_property
    def _decoder(self) -> RecordDecoder:
        return RecordDecoder([self.table], self.reading.placeholder)

    @cached_property
    def _codecs(self) -> list[tuple[TableCodec, bool]]:
        """What a row has to fit: the whole table, and each warehouse. One that has all columns takes one check."""
        of_warehouse = {self.table: False} | dict.fromkeys(self.warehouses, True)
        return [(codec(table), warehouse) for table, warehouse in of_warehouse.items()]

    @cached_property
    def _key(self) -> frozenset[str]:
        return frozenset(self.table.key)

    @cached_property
    def _columns(self) -> frozenset[str]:
        return frozenset(column.name for column in self.table.columns)


def unknown(table: Table) -> Work:
    """The ids of rows whose newest change lacks a value that a view which is empty couldn't give
    it.

    In:  `RecordSummary` of some rows, whatever is living or UNREADABLE of them; the records of a
         row and partition one after the other, in the order of offsets
    Out: id string
    """
    column_names = frozenset(column.name for column in table.columns)

    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        history = RowHistory(column_names)
        for batch in batches:
            names = ("id", "partition", "says", "missing", "carried")
            columns = (batch.column(name).to_pylist() for name in names)
            ids = []
            for row_id, partition, *summary in zip(*columns, strict=True):
                if history.place != (row_id, partition):
                    ids += history.ids_with_gaps
                    history = RowHistory(column_names, (row_id, partition))
                history.add(*summary)
            yield _ids(ids)
        yield _ids(history.ids_with_gaps)

    return work


class RowHistory:
    """The changes of one row since the last that was whole: which values they leave in an empty
    view.
    """

    def __init__(self, columns: frozenset[str], place: tuple[str, int] | None = None) -> None:
        self.place = place
        self._columns = columns
        self._known_columns = NOTHING
        self._has_gap = False

    def add(
        self, says: str, missing: Collection[str] | None, carried: Collection[str] | None
    ) -> None:
        """Take note of the next change of the row."""
        if says == ROW:
            kept_values = self._known_columns.intersection(missing or ())
            self._has_gap = len(kept_values) < len(missing or ())
            self._known_columns = kept_values.union(self._columns if carried is None else carried)
            return
        # What lies before a delete is void, and before a record in quarantine too; this one leaves
        # the row as it is.
        self._known_columns = NOTHING
        if says != UNREADABLE:
            self._has_gap = False

    @property
    def ids_with_gaps(self) -> list[str]:
        """The row's id, if its newest change lacks a value."""
        return [self.place[0]] if self.place and self._has_gap else []


def documents(table: Table) -> Work:
    """What each record makes of its row: DOCUMENTS, the document null where the row is gone.

    Takes key and value. Records that can't be read are left out. A value that a record doesn't
    carry is what the connector has put in its place.
    """

    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        decoder = RecordDecoder([table], DecodeOptions().placeholder)
        document = codec(table).document
        for batch in batches:
            rows: list[tuple[str, bytes | None]] = []
            for key, value in zip(
                batch.column("key").to_pylist(), batch.column("value").to_pylist(), strict=True
            ):
                try:
                    change = decoder.decode(table.topic, key, value)
                    change = decoder.select(table.topic, change)
                    rows.append((change.id, None if change.row is None else document(change.row)))
                except Unreadable:
                    continue
            yield _documents(rows)

    return work


def ids(table: Table) -> Work:
    """The row that each key names: IDS. Takes keys; those that aren't of the table are left out."""

    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        decoder = RecordDecoder([table], DecodeOptions().placeholder)
        for batch in batches:
            pairs = [
                (decoder.row_id(table.topic, key), key) for key in batch.column("key").to_pylist()
            ]
            pairs_of_table = [pair for pair in pairs if pair[0] is not None]
            row_ids = pa.array([row_id for row_id, _ in pairs_of_table], pa.string())
            keys = pa.array([key for _, key in pairs_of_table], pa.binary())
            yield pa.RecordBatch.from_arrays([row_ids, keys], names=["id", "key"])

    return work


def commits(table: Table) -> Work:
    """When the row of each record was committed: COMMITS, in microseconds since 1970; null where a record has
    no row, can't be read or doesn't say it. Takes key, value and offset. Records whose key isn't one of the
    table are left out.
    """

    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        decoder = RecordDecoder([table], DecodeOptions().placeholder)
        for batch in batches:
            rows: list[tuple[str, int | None, int]] = []
            for key, value, offset in zip(*map(pa.Array.to_pylist, batch.columns), strict=True):
                row_id = decoder.row_id(table.topic, key)
                committed_us = None
                try:
                    change = decoder.decode(table.topic, key, value)
                    committed_us = None if change.row is None else change.commit_us
                except Unreadable:
                    pass
                if row_id is not None:
                    rows.append((row_id, committed_us, offset))
            types = (pa.string(), pa.int64(), pa.int64())
            columns = [pa.array([row[n] for row in rows], type_) for n, type_ in enumerate(types)]
            yield pa.RecordBatch.from_arrays(columns, names=["id", "committed_us", "offset"])

    return work


def _batch(summaries: list[RecordSummary]) -> pa.RecordBatch:
    import pyarrow as pa

    texts = pa.list_(pa.string())
    text = pa.string()
    flag = pa.bool_()
    types = (pa.int32(), pa.int64(), text, text, flag, flag, texts, texts, flag)
    columns = [
        pa.array([record[index] for record in summaries], type_)
        for index, type_ in enumerate(types)
    ]
    return pa.RecordBatch.from_arrays(columns, names=list(RecordSummary._fields))


def _documents(rows: list[tuple[str, bytes | None]]) -> pa.RecordBatch:
    import pyarrow as pa

    row_ids = pa.array([row_id for row_id, _ in rows], pa.string())
    texts = pa.array([text for _, text in rows], pa.binary()).cast(pa.string())
    return pa.RecordBatch.from_arrays([row_ids, texts], names=["id", "document"])


def _ids(row_ids: list[str]) -> pa.RecordBatch:
    import pyarrow as pa

    return pa.RecordBatch.from_arrays([pa.array(row_ids, pa.string())], names=["id"])
