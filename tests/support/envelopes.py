"""Records as the connector writes them, and the views they must lead to."""

import json
from collections import defaultdict
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from zlib import crc32

import pyarrow as pa

from cdc.kafka import log_reader
from cdc.kafka.log_reader import OffsetRange
from cdc.model.table import Column, Table, row_id
from cdc.sink.lane import Lane, PartitionOutcome
from cdc.spark.lane_records import LoggedRecords

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RECORDS = {
    "key": pa.binary(),
    "value": pa.binary(),
    "topic": pa.string(),
    "partition": pa.int32(),
    "offset": pa.int64(),
    "timestamp": pa.timestamp("us", "UTC"),
}
Row = dict[str, Any]
PLACEHOLDER = "__cdc_unavailable_0123456789abcdef0123456789abcdef"
COMMITTED_US = 1_700_000_000_000_000
MASKS: tuple[Any, ...] = (PLACEHOLDER, [PLACEHOLDER])
"""The placeholder of a text, of an array of texts."""


def table(topic: str, name: str = "items") -> Table:
    """A table of two key columns, so that ids are JSON arrays."""
    columns = (
        Column("a", "text"),
        Column("b", "bigint"),
        Column("v", "text"),
        Column("n", "integer"),
    )
    return Table("public", name, columns, ("a", "b"), topic)


@dataclass(frozen=True)
class Record:
    """A record of a topic; value None is a tombstone."""

    partition: int
    offset: int
    key: Row
    value: Row | None


class Topic:
    """A log in memory: give it changes, it gives records with offsets, keyed as Kafka would place them."""

    def __init__(self, table: Table, partitions: int = 2) -> None:
        self.table, self.partitions = table, partitions
        self.records: list[Record] = []
        self._next = [0] * partitions

    def add(
        self,
        op: str,
        row: Row,
        lacking: Sequence[str] = (),
        lsn: int = 1,
        committed_us: int = COMMITTED_US,
    ) -> None:
        """Add a record of one change; the values of `lacking` stay as they were, and the record doesn't carry them."""
        key = {name: row[name] for name in self.table.key}
        # hash() of text differs between runs; and the sum of bytes put all rows of the laws into
        # one partition.
        partition = crc32(json.dumps(key).encode()) % self.partitions
        if op == "d":
            old_row = {column.name: "" for column in self.table.columns} | key
            self._append(partition, key, envelope("d", old_row, None, lsn, committed_us))
            self._append(partition, key, None)
        else:
            masks = {name: MASKS[self.table.column(name).type.endswith("[]")] for name in lacking}
            after = {**row, **masks}
            self._append(partition, key, envelope(op, None, after, lsn, committed_us))

    def gap(self, partition: int) -> None:
        """An offset without a record, as a transaction marker leaves."""
        self._next[partition] += 1

    def add_partition(self) -> None:
        """Add a partition as Kafka does: the records in the topic stay where they are, new ones of
        the same key may not follow.
        """
        self.partitions += 1
        self._next.append(0)

    @property
    def ends(self) -> tuple[int, ...]:
        return tuple(self._next)

    def model(self, ends: Sequence[int] | None = None, floor: int = 0) -> dict[str, Row]:
        """The view after all records below `ends`, but for those before the floor: what every sink must hold."""
        view: dict[str, Row] = {}
        for record in self.between((0,) * self.partitions, ends or self.ends):
            key = row_id([record.key[name] for name in self.table.key])
            if record.value is not None and record.value["source"]["lsn"] < floor:
                continue
            if record.value is None or record.value["op"] == "d":
                view.pop(key, None)
            else:
                row = record.value["after"]
                view[key] = {
                    name: view[key][name] if value in MASKS else value
                    for name, value in row.items()
                }
        return view

    def between(self, start: Sequence[int], end: Sequence[int]) -> list[Record]:
        return [r for r in self.records if start[r.partition] <= r.offset < end[r.partition]]

    def _append(self, partition: int, key: Row, value: Row | None) -> None:
        self.records.append(Record(partition, self._next[partition], key, value))
        self._next[partition] += 1


def envelope(
    op: str,
    before: Row | None,
    after: Row | None,
    lsn: int = 1,
    committed_us: int = COMMITTED_US,
) -> Row:
    source = {
        "version": "3.7.0.Final",
        "ts_us": committed_us,
        "lsn": lsn,
        "schema": "public",
    }
    return {
        "before": before,
        "after": after,
        "source": source,
        "transaction": None,
        "op": op,
        "ts_ms": 1,
    }


def encoded(value: object) -> bytes | None:
    return (
        None
        if value is None
        else json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
    )


@dataclass(frozen=True)
class ListedRecords:
    """Records of a batch that a test lists: topic, partition and record. Tasks of Spark read them as they read
    the log.
    """

    spark: "SparkSession"
    records: Sequence[tuple[str, int, log_reader.Record]]

    def run(self, lane: Lane) -> list[PartitionOutcome]:
        return self._logged().run(lane)

    def run_here(self, lane: Lane) -> list[PartitionOutcome]:
        return self._logged().run_here(lane)

    def _logged(self) -> LoggedRecords:
        blocks = defaultdict(list)
        for topic, partition, record in self.records:
            blocks[topic, partition].append(record)
        ranges = tuple(
            OffsetRange(*place, records[0][2], records[-1][2] + 1)
            for place, records in blocks.items()
        )

        def read(_: str, ranges: Sequence[OffsetRange]) -> Generator[log_reader.Block]:
            for asked in ranges:
                place = asked.topic, asked.partition
                yield *place, blocks[place]

        return LoggedRecords(self.spark, "", ranges, read)


def listed(spark: "SparkSession", records: Iterable[tuple[Table, Record]]) -> ListedRecords:
    return ListedRecords(
        spark,
        [(t.topic, r.partition, (encoded(r.key), encoded(r.value), r.offset)) for t, r in records],
    )
