"""Compare the rows that have changed, and a slice of all rows, in one task of one job: plain Python, no frames.

In:  for each table a range of its topic, and its views. Out: ids of the rows that differ.
Invariant: values stay with the executor. If a side can't be read, the answer has an error: it neither
finds a difference nor proves anything.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from cdc.codec.decode_options import DecodeOptions
from cdc.codec.members import members
from cdc.codec.record import RecordDecoder, Unreadable
from cdc.generations.registry import Sweep
from cdc.kafka.log_reader import OffsetRange, read_records
from cdc.model.table import Table
from cdc.model.trace import kind
from cdc.postgres import source
from cdc.postgres.row_query import source_names
from cdc.sink.contract import ListIds, ReadRows
from cdc.sink.lane_run import freeze_gc, task_numbers
from cdc.verify.bucket_hashes import difference
from cdc.verify.row_equality import Comparable, comparable
from cdc.verify.source_rows import (
    IDS_PER_QUERY,
    begin_in_snapshot,
    fetch_rows,
    list_ids,
    require_all_rows,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

    from cdc.config.settings import Pipeline

Rows = Mapping[str, Sequence[str]]
"""By id, the documents of its rows: usually one."""
ABSENT = -1
"""In place of the hash of a row that the view lacks. `Comparable.state_hash` is never negative."""


SLICE_ROWS = 2000
"""Ids that a slice lists, or some more. It is compared within a second, so that turns stay short."""
SLICE_S = 2.0
"""How long a slice lists ids. For Postgres, the limit of the query: a slice that takes longer fails."""


@dataclass(frozen=True)
class Slicing:
    """Which slice of all rows of a view is compared. list_ids: lists ids of the view."""

    begin: Sweep
    list_ids: ListIds


@dataclass(frozen=True)
class Slice:
    """A slice of all rows of a view.

    ids    are compared
    after  where the next slice begins; None: nothing was listed
    error  why not, without values
    """

    ids: frozenset[str] = frozenset()
    after: Sweep | None = None
    error: str | None = None


@dataclass(frozen=True)
class ChangedView:
    """A view to compare. suspects: ids that are compared, whether they have changed or not."""

    sink: str
    read: ReadRows
    suspects: frozenset[str]
    slicing: Slicing | None = None


@dataclass(frozen=True)
class ChangedTable:
    """A table whose rows with a record in `ranges` are compared with its views.

    settings  SQL that sets the time of the table's clock, if it has one
    """

    table: Table
    ranges: tuple[OffsetRange, ...]
    views: tuple[ChangedView, ...]
    settings: str = ""


@dataclass(frozen=True)
class ChangedAnswer:
    """What became of a view.

    differing  by the id of a row that differs: the hash of the view's row, or ABSENT
    explained  suspects with a record in the range
    slice      of all rows
    error      why the view couldn't be compared, without values
    """

    sink: str
    table: str
    differing: Mapping[str, int] = field(default_factory=dict)
    explained: frozenset[str] = frozenset()
    slice: Slice = Slice()
    error: str | None = None


def compare_changed(
    spark: "SparkSession", pipeline: "Pipeline", tables: Sequence[ChangedTable]
) -> tuple[list[ChangedAnswer], float]:
    """Compare the changed rows of tables. Returns an answer for each view, and seconds of CPU."""
    settings = pipeline.source
    task = _Task(
        pipeline.kafka, settings.reader_dsn, source.setting_to_read(settings), tuple(tables)
    )
    ((answers, cpu_s),) = task_numbers(spark.sparkContext, 1).mapPartitionsWithIndex(task).collect()
    return answers, cpu_s


@dataclass(frozen=True)
class _Task:
    bootstrap: str
    dsn: str = field(repr=False)
    dsn_setting: str
    tables: tuple[ChangedTable, ...]

    def __call__(
        self, _: int, numbers: Iterable[int]
    ) -> Iterator[tuple[list[ChangedAnswer], float]]:
        for _ in numbers:
            # Spark discards a Python worker that hasn't read all of its input.
            pass
        began_s = time.process_time()
        answers: list[ChangedAnswer] = []
        for changed in self.tables:
            answers += self._compare(changed)
        freeze_gc("changed rows")
        yield answers, time.process_time() - began_s

    def _compare(self, changed: ChangedTable) -> list[ChangedAnswer]:
        name = changed.table.qualified
        try:
            changed_ids = self._changed_ids(changed)
            slices = {view.sink: self._list_slice(changed, view) for view in changed.views}
            own_ids = {view.sink: view.suspects | slices[view.sink].ids for view in changed.views}
            ids = sorted(changed_ids.union(*own_ids.values()))
            expected = _collect(self._source_rows(changed, ids)) if ids else {}
        except Exception as error:
            return [ChangedAnswer(view.sink, name, error=kind(error)) for view in changed.views]
        rules = comparable(changed.table)
        answers = []
        for view in changed.views:
            try:
                actual = _collect(view.read(ids)) if ids else {}
                compared_ids = changed_ids | own_ids[view.sink]
                differing = _differing(changed.table, rules, compared_ids, expected, actual)
                explained = view.suspects & changed_ids
                answers.append(
                    ChangedAnswer(view.sink, name, differing, explained, slices[view.sink])
                )
            except Exception as error:
                answers.append(ChangedAnswer(view.sink, name, error=kind(error)))
        return answers

    def _changed_ids(self, changed: ChangedTable) -> frozenset[str]:
        decoder = RecordDecoder([changed.table], DecodeOptions().placeholder)
        topic = changed.table.topic
        keys: set[bytes | None] = set()
        with closing(read_records(self.bootstrap, changed.ranges)) as blocks:
            for _, _, records in blocks:
                keys.update(key for key, _, _ in records)
        row_ids: set[str] = set()
        for key in keys:
            row_id = decoder.row_id(topic, key)
            if row_id is None:
                # It is in quarantine: nothing says which row isn't in the views.
                raise Unreadable("a record names no row of its table")
            row_ids.add(row_id)
        return frozenset(row_ids)

    def _list_slice(self, changed: ChangedTable, view: ChangedView) -> Slice:
        """List the ids of a slice. A failure keeps no other row from being compared."""
        if view.slicing is None:
            return Slice()
        begin = view.slicing.begin
        try:
            if begin.side == "view":
                ids, cursor = _list_some(view.slicing.list_ids, begin.cursor)
            else:
                listed, cursor = self._list_source(changed, begin.cursor)
                # What the view has, it has listed.
                ids = listed - _collect(view.read(sorted(listed))).keys()
        except Exception as error:
            return Slice(error=kind(error))
        if cursor is None:
            side: Literal["source", "end"] = "source" if begin.side == "view" else "end"
            return Slice(ids, replace(begin, side=side, cursor=None))
        return Slice(ids, replace(begin, cursor=cursor))

    def _list_source(
        self, changed: ChangedTable, cursor: str | None
    ) -> tuple[frozenset[str], str | None]:
        with closing(source.open_session(self.dsn)) as connection:
            require_all_rows(connection, source_names(changed.table), self.dsn_setting)
            begin_in_snapshot(connection, changed.settings)
            connection.execute(f"SET LOCAL statement_timeout = '{SLICE_S}s'".encode())
            ids, cursor = list_ids(connection, changed.table, cursor, SLICE_ROWS)
            return frozenset(ids), cursor

    def _source_rows(self, changed: ChangedTable, ids: Sequence[str]) -> Iterator["pa.RecordBatch"]:
        with closing(source.open_session(self.dsn)) as connection:
            require_all_rows(connection, source_names(changed.table), self.dsn_setting)
            begin_in_snapshot(connection, changed.settings)
            for start in range(0, len(ids), IDS_PER_QUERY):
                chunk_ids = ids[start : start + IDS_PER_QUERY]
                yield from fetch_rows(connection, changed.table, chunk_ids, changed.settings)


def _list_some(list_ids: ListIds, cursor: str | None) -> tuple[frozenset[str], str | None]:
    """List ids until there are enough, or for long enough: pages may be empty."""
    deadline = time.monotonic() + SLICE_S
    ids: set[str] = set()
    while True:
        page, cursor = list_ids(cursor)
        ids.update(page)
        if cursor is None or len(ids) >= SLICE_ROWS or time.monotonic() > deadline:
            return frozenset(ids), cursor


def _collect(batches: Iterable["pa.RecordBatch"]) -> Rows:
    rows: dict[str, list[str]] = {}
    for batch in batches:
        row_ids = batch.column("id").to_pylist()
        documents = batch.column("document").to_pylist()
        for row_id, document in zip(row_ids, documents, strict=True):
            rows.setdefault(row_id, []).append(document)
    return rows


def _differing(
    table: Table, rules: Comparable, ids: Iterable[str], expected: Rows, actual: Rows
) -> dict[str, int]:
    """See `ChangedAnswer.differing`. Leaves out rows of closed windows, and events that the source has purged."""
    closes = table.derivation is not None and table.derivation.closes
    differing: dict[str, int] = {}
    for row_id in ids:
        own = expected.get(row_id, ())
        seen = actual.get(row_id, ())
        if closes and any(_is_final(document) for document in seen):
            continue
        if table.events and not own:
            continue
        found = difference(
            rules, own[0] if own else None, len(own), seen[0] if seen else None, len(seen)
        )
        if found:
            _, _, _, state = found
            differing[row_id] = ABSENT if state is None else state
    return differing


def _is_final(document: str) -> bool:
    return bytes(members(document.encode()).get("final", b"")) == b"true"
