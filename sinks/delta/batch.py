"""The commits of a batch: executors write the files of all its tables, then the driver commits each table
by itself, the log of changes before the mirror.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyroaring import BitMap64

from cdc.errors import CdcError, SinkUnavailable
from cdc.model.outcome import Advance, Applied
from cdc.model.position import ViewCheckpoint
from cdc.model.table import Table
from cdc.sink import lane_run
from cdc.sink.contract import Batch, Outcome, PositionLost
from cdc.sink.fencing import checkpoint_after
from cdc.sinks.delta import executor, parquet, positions
from cdc.sinks.delta.columns import merged, schema, to_arrow
from cdc.sinks.delta.executor import Staged, ViewState, WarehouseWriter
from cdc.sinks.delta.log import (
    DELETION_VECTORS,
    Action,
    File,
    FileNames,
    TableLog,
    TableState,
    additions,
    extension,
    removal,
)
from cdc.sinks.delta.mirror import (
    Rewrite,
    Search,
    Source,
    find_superseded,
    mark,
    remaining_rows,
    rewrite,
    run_tasks,
    source,
)
from cdc.sinks.delta.place import is_bucket, place, reading, write_hint
from cdc.sinks.delta.vectors import DAMAGED_HINT, bitmap

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cdc.sinks.delta.sink import Delta

BATCH = "STREAMING UPDATE"
"""The operation of a batch's commits, by Delta's name."""
SEARCHED_BYTES = 16 * 2**20
"""The files of a mirror that each task of a batch searches for what it supersedes. Without another job of Spark
a batch of 200 changes of 20,000 rows took 0.16 s of CPU instead of 0.25; but the tasks of such a job divide a
large mirror.
"""
OFFSET_BITS = 48
"""Of an offset: at a million records a second they last for nine years."""
decode_staged = msgspec.json.Decoder(Staged).decode


@dataclass(eq=False)
class TableCommit:
    """What a batch is going to commit to one table's view.

    pending: by kind, the checkpoints of those parts of the view that gain something.
    states: by kind, the Delta tables as they were read then. A commit since then has to be a conflict.
    view: what executors get to know.
    names: of the batch's files.
    """

    advance: Advance
    tables: "Delta"
    pending: Mapping[str, ViewCheckpoint | None]
    states: Mapping[str, TableState]
    view: ViewState
    names: FileNames
    staged: Staged = field(default_factory=Staged)
    """What executors have written."""
    rewritten: Mapping[str, File | None] = field(default_factory=dict)
    """Files of the mirror that were written again: by its path, what replaces each."""

    @property
    def table(self) -> Table:
        return self.advance.table

    def folder(self, kind: str) -> str:
        return self.tables.folder(self.table, kind)

    def log(self, kind: str) -> TableLog:
        return self.tables.logs[self.folder(kind)]

    def discard(self, *, committed: bool) -> None:
        """Remove the files of a batch that wasn't applied.

        committed: whether a commit may have added some to a table. Those stay.
        """
        for kind in self.pending:
            folder = self.folder(kind)
            # Where nothing was committed no table is opened: what can't be read now must not hide
            # the failure that led here.
            if committed:
                state = TableLog(folder).refresh() or TableState()
                if state.identity != self.states[kind].identity:
                    continue
            parquet.remove_files_with(folder, self.names.common)

    def append(self, spark: "SparkSession", checkpoint: ViewCheckpoint) -> None:
        """Commit the events to the log of changes; of a repair's events those that it lacks."""
        events = self.staged.events
        if self.advance.is_repair and events:
            events = self._missing_events(spark)
        self._commit("changes", additions(events), checkpoint, self.staged.events)

    def _missing_events(self, spark: "SparkSession") -> list[File]:
        """Return files of the staged events that the log of changes lacks: those that have none that is
        logged already, and new ones in the place of the others.
        """
        log = self.log("changes")
        folder = self.folder("changes")
        staged = {f"{folder}/{file['path']}": file for file in self.staged.events}
        stored = [source(log.place, file) for file in self.states["changes"].files.values()]
        logged = _find_logged(spark, list(staged), stored, self.view.topic_id)
        columns = to_arrow(schema(self.table, "changes"))
        requests = [
            Rewrite(folder, [Source(path, rows)], columns, self.names.generate())
            for path, rows in logged.items()
        ]
        unchanged = [file for path, file in staged.items() if path not in logged]
        return unchanged + [file for file in rewrite(spark, requests) if file]

    def search(self) -> Search | None:
        """Describe the search for the rows that the batch supersedes; None where there can be none, or
        the tasks that wrote the batch have found them.
        """
        if "mirror" not in self.pending or self.view.files is not None:
            return None
        files = list(self.states["mirror"].files)
        return self.staged.search(self.table.qualified, self.view.mirror, files)

    def rewrites(self) -> dict[str, Rewrite]:
        """List the files of the mirror that are to be written again, by their paths: where readers
        don't support deletion vectors those with superseded rows, or with marks of earlier merges.
        """
        if "mirror" not in self.pending or self.tables.may_have_marks(self.table):
            return {}
        state = self.states["mirror"]
        columns = schema(self.table, "mirror")
        if state.metadata:
            columns = merged(state.columns, columns)
        added = {file["path"]: file for file in self.staged.rows}
        rewrites = {}
        for path, file in {**state.files, **added}.items():
            superseded = self.staged.superseded.get(path)
            if superseded or "deletionVector" in file:
                left = source(self.log("mirror").place, file, superseded)
                name = self.names.generate()
                rewrites[path] = Rewrite(self.view.mirror, [left], to_arrow(columns), name)
        return rewrites

    def merge(self, checkpoint: ViewCheckpoint) -> None:
        """Commit the rows to the mirror."""
        state = self.states["mirror"]
        rows = self.staged.rows
        if self.tables.may_have_marks(self.table):
            place = self.log("mirror").place
            changes = mark(place, state, rows, self.staged.superseded, self.names)
        else:
            replaced = [file for path, file in state.files.items() if path in self.rewritten]
            files = [file for file in rows if file["path"] not in self.rewritten]
            files += [file for file in self.rewritten.values() if file]
            changes = [*map(removal, replaced), *additions(files)]
        self._commit("mirror", changes, checkpoint, [*rows, *self.staged.deleted])

    def _commit(
        self,
        kind: str,
        changes: Sequence[Action],
        checkpoint: ViewCheckpoint,
        staged: Sequence[File],
    ) -> None:
        """Commit to a part of the view, which is created, or gets columns and features that it lacks;
        then remove those staged files that it doesn't have.

        Raises CommitConflict, SinkUnavailable.
        """
        state = self.states[kind]
        features = self.tables.features(self.table, kind)
        # All files of a mirror without marks that had some have been written again.
        dropped = [DELETION_VECTORS] if kind == "mirror" and not features else []
        shape = extension(state, schema(self.table, kind), features, dropped=dropped)
        self.log(kind).commit(state.identity, [*shape, *changes], BATCH, checkpoint)
        added = {action["add"]["path"] for action in changes if "add" in action}
        unused = [file["path"] for file in staged if file["path"] not in added]
        parquet.remove_files(self.folder(kind), unused)


def begin(tables: "Delta", writer: str, advance: Advance, names: FileNames) -> TableCommit:
    """Read the positions of a view's parts, and register the step with the writer fence.

    Raises:
        Fenced, PositionLost: see `Sink.apply`.
    """
    table = advance.table
    folders = tables.folders(table)
    last_commits = {kind: tables.logs[folder].last_commit() for kind, folder in folders.items()}
    for last_commit in last_commits.values():
        if last_commit.trouble:
            raise PositionLost(
                last_commit.trouble,
                hint=f"cdc -p FILE rebuild {tables.name} --table {table.qualified}",
                table=table.qualified,
            )
    checkpoints = {kind: last_commit.checkpoint for kind, last_commit in last_commits.items()}
    pending = tables.fence.begin_step(writer, advance, folders, checkpoints)
    states = {kind: tables.logs[folder].state or TableState() for kind, folder in folders.items()}
    mirror = states["mirror"]
    view = ViewState(
        table,
        advance.end.topic_id,
        folders.get("changes"),
        folders["mirror"],
        known_offsets(advance, checkpoints.get("changes")),
        known_offsets(advance, checkpoints["mirror"]),
        mirror.version if checkpoints["mirror"] else None,
        list(mirror.files) if mirror.size_bytes <= SEARCHED_BYTES else None,
    )
    return TableCommit(advance, tables, pending, states, view, names)


def known_offsets(advance: Advance, checkpoint: ViewCheckpoint | None) -> tuple[int, ...]:
    """Return by partition the offset below which a part needs nothing; 0 for a repair."""
    return positions.known_offsets(None if advance.is_repair else checkpoint, advance.end)


def _find_logged(
    spark: "SparkSession", staged: Sequence[str], logged: Sequence[Source], topic_id: str
) -> Mapping[str, bytes]:
    """Find the staged events that a log of changes has, in one Spark job.

    staged: locations of files; their events are few, and of one topic. logged: the log's files.
    Returns by location the bitmap of those rows, for files that have any.

    Raises SinkUnavailable: a file can't be read.
    """
    found: dict[str, bytes] = {}
    for path, rows in run_tasks(spark, partial(_look_up, staged, topic_id), logged):
        found[path] = (bitmap(found.get(path)) | bitmap(rows)).serialize()
    return found


def _look_up(staged: Sequence[str], topic_id: str, logged: Source) -> Iterator[tuple[str, bytes]]:
    """Look into a file of the log: the staged files that have events of it, and the bitmaps of these."""
    with reading(logged.path.rpartition("/")[0]):
        present = np.concatenate([np.empty(0, np.int64), *_keys(logged, topic_id)])
        for path in staged:
            keys = np.concatenate(list(_keys(Source(path, None))))
            rows = np.flatnonzero(np.isin(keys, present))
            if len(rows):
                yield path, BitMap64(rows.astype(np.uint64)).serialize()


def _keys(events: Source, topic_id: str | None = None) -> Iterator[np.ndarray]:
    """Read a file's events, each as one number for its partition and offset.

    topic_id: only the events of this topic, with the ones that name none: they are of a time when a
    log had one topic only.
    """
    fields = {"_cdc_partition": pa.int64(), "_cdc_offset": pa.int64(), "_cdc_topic": pa.string()}
    for table in remaining_rows(events, pa.schema(fields)):
        topic = table["_cdc_topic"]
        is_of_topic = pc.or_kleene(pc.is_null(topic), pc.equal(topic, topic_id))
        rows = table if topic_id is None else table.filter(is_of_topic)
        partitions = rows["_cdc_partition"].to_numpy().astype(np.int64)
        yield (partitions << OFFSET_BITS) | rows["_cdc_offset"].to_numpy()


def apply_batch(tables: "Delta", batch: Batch) -> Outcome:
    """Have the executors write the files of all tables, then commit those tables that gain something.
    One that fails doesn't keep the others from it.

    Raises:
        Fenced, PositionLost, RowsRejected, SinkUnavailable: see `Sink.apply`.
    """
    steps: dict[str, TableCommit] = {}
    failures: list[CdcError] = []
    names = FileNames()
    for advance in batch.advances:
        try:
            step = begin(tables, batch.writer, advance, names)
        except CdcError as error:
            failures.append(error)
            if isinstance(error, SinkUnavailable) and is_bucket(tables.path):
                # A store that doesn't answer would be waited for once a table.
                break
            continue
        if step.pending:
            steps[advance.table.qualified] = step
    outcome = _write_and_commit(tables, batch, steps, names) if steps else Outcome()
    if failures:
        raise failures[0]
    return outcome


def _write_and_commit(
    tables: "Delta",
    batch: Batch,
    steps: Mapping[str, TableCommit],
    names: FileNames,
) -> Outcome:
    from pyspark.sql import SparkSession

    spark = SparkSession.active()
    for step in steps.values():
        for kind in step.pending:
            place(step.folder(kind)).make()
    try:
        outcome = _write_files(tables, batch, steps, names)
        # Rows of large mirrors that the batch supersedes.
        searches = [search for step in steps.values() if (search := step.search())]
        for name, bitmaps in find_superseded(spark, searches).items():
            steps[name].staged.superseded = bitmaps
        # Files of mirrors whose readers don't support deletion vectors.
        planned = {name: step.rewrites() for name, step in steps.items()}
        requests = [request for entries in planned.values() for request in entries.values()]
        results = iter(rewrite(spark, requests))
        for name, entries in planned.items():
            steps[name].rewritten = {path: next(results) for path in entries}
    except BaseException:
        for step in steps.values():
            step.discard(committed=False)
        raise
    failures: list[CdcError] = []
    for name, step in steps.items():
        try:
            _commit_table(spark, batch.writer, step, outcome.applied[name])
        except CdcError as error:
            step.discard(committed=True)
            failures.append(error)
            continue
        for kind in step.pending:
            tables.cleanups.tidy(spark, step.folder(kind))
    # The others are committed before the first error is raised.
    if failures:
        raise failures[0]
    return outcome


def _write_files(
    tables: "Delta", batch: Batch, steps: Mapping[str, TableCommit], names: FileNames
) -> Outcome:
    writer = WarehouseWriter(
        {step.table.topic: step.view for step in steps.values()},
        names,
        archives="changes" in tables.kinds,
        limits=executor.LIMITS,
    )
    lane = batch.lane(writer, [step.advance for step in steps.values()])
    hints = {"unavailable": write_hint(tables.path), "rejected": DAMAGED_HINT}
    outcome = lane_run.run_on_executors(lane, batch.records, tables.name, hints)
    for name, step in steps.items():
        for message in outcome.writer_results.get(name, ()):
            step.staged.add(decode_staged(message))
    return outcome


def _commit_table(spark: "SparkSession", writer: str, step: TableCommit, applied: Applied) -> None:
    """Append the events first, then merge the rows; each only where it gains something."""
    tables = step.tables
    for kind, previous in step.pending.items():
        checkpoint = previous
        if not (step.advance.is_repair and checkpoint):
            # A repair doesn't change the position: the stream that owns it goes on undisturbed.
            end = positions.next_position(checkpoint, step.advance.end)
            advance = replace(step.advance, end=end)
            generation = tables.generation(step.table)
            checkpoint = checkpoint_after(advance, checkpoint, applied, writer, generation)
        if kind == "changes":
            step.append(spark, checkpoint)
        else:
            step.merge(checkpoint)
        tables.fence.record(step.folder(kind), checkpoint)
