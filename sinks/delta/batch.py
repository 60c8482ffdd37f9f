"""The commits of one batch: executors write the files of all its tables, then each table is
committed by itself.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from cdc.errors import CdcError, SinkUnavailable
from cdc.model.outcome import Advance, Applied
from cdc.model.position import ViewCheckpoint
from cdc.model.table import Table
from cdc.sink import lane_run
from cdc.sink.contract import Batch, Outcome, PositionLost
from cdc.sinks.delta import executor, mirror, parquet, positions
from cdc.sinks.delta.cleanup import Cleanups
from cdc.sinks.delta.columns import merged, schema, to_arrow
from cdc.sinks.delta.executor import Staged, ViewState, WarehouseWriter
from cdc.sinks.delta.log import (
    DELETION_VECTORS,
    NO_TABLE,
    Action,
    Identity,
    LastCommit,
    TableLog,
    TableState,
    addition,
    additions,
    creation,
    extension,
    removal,
)
from cdc.sinks.delta.mirror import (
    Rewrite,
    Search,
    Source,
    find_superseded,
    remaining_rows,
    rewrite,
    run_tasks,
    sources,
)
from cdc.sinks.delta.parquet import DataFile, FileNames
from cdc.sinks.delta.place import commit_conflict, is_bucket, locate, place, reading, write_hint
from cdc.sinks.delta.tables import Tables
from cdc.sinks.delta.vectors import bitmap

if TYPE_CHECKING:
    import numpy as np
    from pyspark.sql import SparkSession

BATCH = "STREAMING UPDATE"
"""The operation of a batch's commits, by Delta's name."""

SEARCHED_BYTES = 16 * 2**20
"""The files of a mirror that each task of a batch searches for what it supersedes. Without another job of Spark
a batch of 200 changes of 20,000 rows took 0.16 s of CPU instead of 0.25; but the tasks of such a job divide a
large mirror.
"""


@dataclass(eq=False)
class TableCommit:
    """What a batch is going to commit to one table's view.

    pending: by kind, our last commit in those parts of the view that gain something.
    identities: by kind, of the Delta tables as they were read then; NO_TABLE where there was none. A
    commit since then has to be a conflict.
    view: what executors get to know.
    names: of the batch's files.
    """

    advance: Advance
    tables: Tables
    pending: Mapping[str, LastCommit]
    identities: Mapping[str, Identity]
    view: ViewState
    names: FileNames
    staged: Staged = field(default_factory=Staged)
    """What executors have written."""
    rewritten: Sequence[tuple[str, DataFile | None]] = ()
    """Files of the mirror that were written again: by its path each, and what replaces it."""

    @property
    def table(self) -> Table:
        """The source's table."""
        return self.advance.table

    def log(self, kind: str) -> TableLog:
        """Return the log of a part of the view."""
        return self.tables.commits.log(self.tables.folder(self.table, kind))

    def discard(self, *, committed: bool) -> None:
        """Remove the files of a batch that wasn't applied.

        committed: whether a commit may have added some to a table. Those stay.
        """
        for kind in self.pending:
            folder = self.tables.folder(self.table, kind)
            # Where nothing was committed no table is opened: what can't be read now must not hide
            # the failure that led here.
            if not committed or self._is_unchanged(kind, folder):
                parquet.remove_files(folder, parquet.names_with(folder, self.names.common))

    def _is_unchanged(self, kind: str, folder: str) -> bool:
        state = TableLog(folder).refresh()
        return (state.identity if state else NO_TABLE) == self.identities[kind]

    def append(self, spark: "SparkSession", checkpoint: ViewCheckpoint) -> None:
        """Commit the events to the log of changes; of a repair's events those that it lacks."""
        folder = self.tables.folder(self.table, "changes")
        events: list[DataFile] = self.staged.events
        if self.advance.is_repair and events:
            events = self._missing_events(spark, folder)
        self._commit("changes", additions(events), checkpoint)
        committed = _names(events)
        staged = _names(self.staged.events)
        parquet.remove_files(folder, [name for name in staged if name not in committed])

    def _missing_events(self, spark: "SparkSession", folder: str) -> list[DataFile]:
        """Return files of the staged events that the log of changes lacks: those that have none that is
        logged already, and new ones in the place of the others.
        """
        log = self.log("changes")
        state = log.refresh()
        staged = {f"{folder}/{file.name}": file for file in self.staged.events}
        logged = find_logged(
            spark,
            list(staged),
            sources(log.place, state.files.values() if state else ()),
            self.view.topic_id,
        )
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
        state = self._mirror_state()
        folder = self.tables.folder(self.table, "mirror")
        return self.staged.search(self.table.qualified, folder, list(state.files) if state else [])

    def rewrites(self) -> list[tuple[str, Rewrite]]:
        """List the files of the mirror that are to be written again, by their paths: where readers
        don't support deletion vectors those with superseded rows, or with marks of earlier merges.
        """
        if "mirror" not in self.pending or self._may_have_marks:
            return []
        log = self.log("mirror")
        state = self._mirror_state()
        added = {file.name: addition(file)["add"] for file in self.staged.rows}
        files = {**(state.files if state else {}), **added}
        columns = schema(self.table, "mirror")
        if state:
            columns = merged(state.columns, columns)
        folder = log.place.location
        rewrites = []
        for path, file in files.items():
            superseded = self.staged.superseded.get(path)
            if superseded or "deletionVector" in file:
                rows = mirror.marked_rows(log.place, file, superseded)
                source = Source(locate(folder, path), rows.serialize())
                name = self.names.generate()
                rewrites.append((path, Rewrite(folder, [source], to_arrow(columns), name)))
        return rewrites

    def merge(self, checkpoint: ViewCheckpoint) -> None:
        """Commit the rows to the mirror."""
        state = self._mirror_state()
        added = self._marking(state) if self._may_have_marks else self._replacing(state)
        self._commit("mirror", added, checkpoint)
        folder = self.tables.folder(self.table, "mirror")
        committed = {action["add"]["path"] for action in added if "add" in action}
        staged = _names([*self.staged.rows, *self.staged.deleted])
        parquet.remove_files(folder, [name for name in staged if name not in committed])

    def _marking(self, state: TableState | None) -> list[Action]:
        place = self.log("mirror").place
        present = state or TableState()
        return mirror.mark(place, present, self.staged.rows, self.staged.superseded, self.names)

    def _replacing(self, state: TableState | None) -> list[Action]:
        """Make the actions where files with superseded rows have been written again."""
        present = state.files if state else {}
        former = {path for path, _ in self.rewritten}
        removed = [removal(file) for path, file in present.items() if path in former]
        files = [file for file in self.staged.rows if file.name not in former]
        files += [file for _, file in self.rewritten if file]
        return [*removed, *additions(files)]

    def _commit(self, kind: str, changes: Sequence[Action], checkpoint: ViewCheckpoint) -> None:
        """Commit to a part of the view, which is created, or gets columns and features that it lacks.

        Raises CommitConflict, SinkUnavailable.
        """
        log = self.log(kind)
        state = log.refresh()
        columns = schema(self.table, kind)
        features = self.tables.features(self.table, kind)
        # All files of such a mirror that had marks have been written again.
        is_unmarked = kind == "mirror" and not self._may_have_marks
        dropped = [DELETION_VECTORS] if is_unmarked else []
        shape = (
            extension(state, columns, features, dropped=dropped)
            if state
            else creation(columns, features)
        )
        log.commit(self.identities[kind], [*shape, *changes], BATCH, checkpoint)

    def _mirror_state(self) -> TableState | None:
        """Return the mirror as it was when the batch began. Raises CommitConflict."""
        state = self.log("mirror").refresh()
        if (state.identity if state else NO_TABLE) != self.identities["mirror"]:
            raise commit_conflict()
        return state

    @property
    def _may_have_marks(self) -> bool:
        return self.tables.may_have_deletion_vectors(self.table.qualified)


def begin(tables: Tables, writer: str, advance: Advance, names: FileNames) -> TableCommit:
    """Read the positions of a view's parts, and register the step with the writer fence.

    Raises:
        Fenced, PositionLost: see `Sink.apply`.
    """
    table, commits = advance.table, tables.commits
    folders = tables.folders(table)
    last_commits = {kind: commits.last_commit(folder) for kind, folder in folders.items()}
    for kind, last_commit in last_commits.items():
        if last_commit.trouble:
            raise PositionLost(
                f"The Delta table {folders[kind]} can't be gone on with: {last_commit.trouble}.",
                hint=f"cdc -p FILE rebuild {tables.sink} --table {table.qualified}",
                table=table.qualified,
            )
    tables.fence.begin_step(writer, advance, folders, lambda: load_position(tables, table))
    pending = {
        kind: last_commit
        for kind, last_commit in last_commits.items()
        if tables.fence.gains(writer, advance, folders[kind], last_commit.checkpoint)
    }
    states = {kind: commits.log(folder).state for kind, folder in folders.items()}
    identities = {kind: state.identity if state else NO_TABLE for kind, state in states.items()}
    view = ViewState(
        table,
        advance.end.topic_id,
        folders.get("changes"),
        folders["mirror"],
        known_offsets(advance, last_commits.get("changes")),
        known_offsets(advance, last_commits["mirror"]),
        identities["mirror"][0] if last_commits["mirror"].checkpoint else None,
        _searched_files(states["mirror"]),
    )
    return TableCommit(advance, tables, pending, identities, view, names)


def load_position(tables: Tables, table: Table) -> ViewCheckpoint | None:
    """Return the older position of a view's parts, where reading starts; the fence records both.

    A position that isn't true of the rows any more is returned too, so that these can be read.

    Raises:
        SchemaMismatch: the position is lost.
    """
    checkpoints = {kind: tables.last_commit(table, kind).checkpoint for kind in tables.kinds}
    for kind, checkpoint in checkpoints.items():
        tables.fence.record(tables.folder(table, kind), checkpoint)
    return positions.oldest_of(checkpoints)


def known_offsets(advance: Advance, last_commit: LastCommit | None) -> tuple[int, ...]:
    """Return by partition the offset below which a part needs nothing; 0 for a repair."""
    checkpoint = None if advance.is_repair or last_commit is None else last_commit.checkpoint
    return positions.known_offsets(checkpoint, advance.end)


def _searched_files(mirror: TableState | None) -> list[str] | None:
    """List the files of a mirror that is so small that every task of a batch searches it."""
    if mirror is None:
        return []
    return list(mirror.files) if mirror.size_bytes <= SEARCHED_BYTES else None


def _names(files: Sequence[DataFile]) -> list[str]:
    return [file.name for file in files]


OFFSET_BITS = 48
"""Of an offset: at a million records a second they last for nine years."""


class Lookup(NamedTuple):
    """What is looked up in a file of the log: the events of staged files, whose locations these are."""

    logged: Source
    staged: Sequence[str]
    topic_id: str


def find_logged(
    spark: "SparkSession", staged: Sequence[str], logged: Sequence[Source], topic_id: str
) -> Mapping[str, bytes]:
    """Find the staged events that a log of changes has, in one Spark job.

    staged: locations of files; their events are few, and of one topic. logged: the log's files.
    Returns by location the bitmap of those rows, for files that have any.

    Raises:
        SinkUnavailable: a file can't be read.
    """
    found: dict[str, bytes] = {}
    lookups = [Lookup(file, staged, topic_id) for file in logged]
    for path, rows in run_tasks(spark, _look_up, lookups):
        found[path] = (bitmap(found.get(path)) | bitmap(rows)).serialize()
    return found


def _look_up(lookup: Lookup) -> Iterator[tuple[str, bytes]]:
    """Look into a file of the log: the staged files that have events of it, and the bitmaps of these."""
    import numpy as np
    from pyroaring import BitMap64

    with reading(lookup.logged.path.rpartition("/")[0]):
        present = np.concatenate([np.empty(0, np.int64), *_keys(lookup.logged, lookup.topic_id)])
        for path in lookup.staged:
            keys = np.concatenate(list(_keys(Source(path, None))))
            rows = np.flatnonzero(np.isin(keys, present))
            if len(rows):
                yield path, BitMap64(rows.astype(np.uint64)).serialize()


def _keys(source: Source, topic_id: str | None = None) -> "Iterator[np.ndarray]":
    """Read a file's events, each as one number for its partition and offset.

    topic_id: only the events of this topic, with the ones that name none: they are of a time when a
    log had one topic only.
    """
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    schema = pa.schema(
        [("_cdc_partition", pa.int64()), ("_cdc_offset", pa.int64()), ("_cdc_topic", pa.string())]
    )
    for events in remaining_rows(source, schema):
        topic = events["_cdc_topic"]
        is_of_topic = pc.or_kleene(pc.is_null(topic), pc.equal(topic, topic_id))
        rows = events if topic_id is None else events.filter(is_of_topic)
        partitions = rows["_cdc_partition"].to_numpy().astype(np.int64)
        yield (partitions << OFFSET_BITS) | rows["_cdc_offset"].to_numpy()


decode_staged = msgspec.json.Decoder(Staged).decode


@dataclass(frozen=True, eq=False)
class BatchCommit:
    """What a batch commits.

    steps: by table, those that bring something; there is one at least.
    """

    tables: Tables
    cleanups: Cleanups
    batch: Batch
    steps: Mapping[str, TableCommit]

    def apply(self) -> Outcome:
        """Have the executors write the files of all tables, then commit them.

        Raises:
            Fenced, RowsRejected, SinkUnavailable: see `Sink.apply`.
        """
        for step in self.steps.values():
            for kind in step.pending:
                place(self.tables.folder(step.table, kind)).make()
        try:
            outcome = self._write_files()
            self._find_superseded()
            self._rewrite()
        except BaseException:
            for step in self.steps.values():
                step.discard(committed=False)
            raise
        failures: list[CdcError] = []
        for name, step in self.steps.items():
            try:
                self._commit(step, outcome.applied[name])
            except CdcError as error:
                step.discard(committed=True)
                failures.append(error)
        # The others are committed before the first error is raised.
        if failures:
            raise failures[0]
        return outcome

    @property
    def _spark(self) -> "SparkSession":
        from pyspark.sql import SparkSession

        return SparkSession.active()

    def _write_files(self) -> Outcome:
        (names,) = {step.names for step in self.steps.values()}
        writer = WarehouseWriter(
            {step.table.topic: step.view for step in self.steps.values()},
            names,
            archives="changes" in self.tables.kinds,
            limits=executor.LIMITS,
        )
        lane = self.batch.lane(writer, [step.advance for step in self.steps.values()])
        hints = {"unavailable": write_hint(self.tables.path)}
        outcome = lane_run.run_on_executors(lane, self.batch.records, self.tables.sink, hints)
        for name, step in self.steps.items():
            for message in outcome.writer_results.get(name, ()):
                step.staged.add(decode_staged(message))
        return outcome

    def _find_superseded(self) -> None:
        """Find the rows of large mirrors that the batch supersedes."""
        searches = [search for step in self.steps.values() if (search := step.search())]
        for name, bitmaps in find_superseded(self._spark, searches).items():
            self.steps[name].staged.superseded = bitmaps

    def _rewrite(self) -> None:
        """Write files of mirrors again whose readers don't support deletion vectors."""
        planned = {name: step.rewrites() for name, step in self.steps.items()}
        requests = [request for entries in planned.values() for _, request in entries]
        results = iter(rewrite(self._spark, requests))
        for name, entries in planned.items():
            self.steps[name].rewritten = [(path, next(results)) for path, _ in entries]

    def _commit(self, step: TableCommit, applied: Applied) -> None:
        """Append the events first, then merge the rows; each only where it gains something."""
        for kind in step.pending:
            checkpoint = positions.next_checkpoint(
                self.batch.writer,
                step.advance,
                step.pending[kind].checkpoint,
                applied,
                self.tables.generation(step.table),
            )
            if kind == "changes":
                step.append(self._spark, checkpoint)
            else:
                step.merge(checkpoint)
            self.tables.fence.record(self.tables.folder(step.table, kind), checkpoint)
        for kind in step.pending:
            self.cleanups.tidy(self._spark, self.tables.folder(step.table, kind))


def begin_steps(tables: Tables, batch: Batch) -> tuple[dict[str, TableCommit], list[CdcError]]:
    """Begin the steps of a batch: return by table those that bring something, and failures."""
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
    return steps, failures
