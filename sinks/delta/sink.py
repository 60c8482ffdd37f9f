"""Delta Lake: per table a folder <path>/<schema>.<table> with `changes` and `mirror`.

`changes` is the log of all events, `mirror` has the current rows.

Each of the two has its own position, in the metadata of the very commit that brought its rows.
Events below it are filtered out before the write. Executors write the files of a batch
(`executor`), the driver commits them (`table_commit`). The commit is a compare-and-set on a
transaction number of the table: the commit of a second writer either conflicts or is skipped, and
reading the position again tells which.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from cdc.errors import CdcError
from cdc.model.generation import new_generation
from cdc.model.outcome import Applied
from cdc.model.position import ViewCheckpoint
from cdc.model.table import RowFormat, Table
from cdc.sink import lane_run
from cdc.sink.contract import Batch, Outcome, SchemaMismatch, wait_until_caught_up
from cdc.sink.fencing import mismatch
from sinks.delta import executor, table_commit
from sinks.delta.commit_pool import run_all
from sinks.delta.executor import Staged, WarehouseWriter
from sinks.delta.files.columns import refusals
from sinks.delta.files.failures import WRITE_HINT
from sinks.delta.files.parquet import DataFile, FileNames
from sinks.delta.log import add_files, writer_fence
from sinks.delta.log.commits import Commits
from sinks.delta.mirror import group_scan
from sinks.delta.mirror.rewrite import Rewrite, rewrite_mirrors
from sinks.delta.mirror.scan import ROW_ID, SCANNED, document_reader
from sinks.delta.table_commit import TableCommit
from sinks.delta.tables import Tables

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

REWRITE_BYTES = 4 * 2**20
"""A mirror smaller than this is written again by each batch.

That costs less than deletion vectors.
"""
CLEANUP_S = 3600.0
"""Seconds between two removals of files that merges have replaced in a mirror.

A query may read a replaced file for as long.
"""
_decode_staged = msgspec.json.Decoder(Staged).decode


@dataclass(frozen=True, eq=False)
class _StagedBatch:
    """A batch whose files the executors have written.

    staged: files by table; rewritten: by table of a small mirror, the file of all its rows.
    """

    batch: Batch
    outcome: Outcome
    names: FileNames
    staged: Mapping[str, Staged]
    rewritten: Mapping[str, list[DataFile]]


class Delta:
    """A warehouse as a destination; see `cdc.sink.contract.Sink` for the methods.

    name: of the sink in the pipeline file.
    path: folder of the warehouse.
    generation_names: by table, of the generation that is written; None for the live one.
    without_deletion_vectors: tables, or patterns of them, whose mirror is for readers that don't
    support deletion vectors.
    """

    row_format: RowFormat = "events"
    promotes_all_tables = False

    def __init__(
        self,
        name: str,
        path: str,
        pipeline: str,
        generation_names: Mapping[str, str] | None = None,
        without_deletion_vectors: Collection[str] = (),
    ) -> None:
        self.name, self.pipeline = name, pipeline
        self._without_deletion_vectors = without_deletion_vectors
        self._tables = Tables(name, path, generation_names)
        self._commits = self._tables.commits
        self._cleanups: dict[str, tuple[float, set[str]]] = {}

    @property
    def path(self) -> str:
        """The warehouse's folder, absolute."""
        return self._tables.path

    def folder(self, table: Table, kind: str) -> str:
        """Return where `changes` or `mirror` of a table lies."""
        return self._tables.folder(table, kind)

    def refusals(self, table: Table) -> list[str]:
        """List why a table can't be stored, one sentence a column."""
        return refusals(table)

    def prepare(self, table: Table) -> None:
        """Create what doesn't exist, without rows: readers find all captured tables and columns.

        Raises SchemaMismatch: a table can't be stored, or what exists can't take it.
        """
        if reasons := refusals(table):
            raise SchemaMismatch(
                table,
                self.name,
                f"{table.qualified} can't be held in {self.name}: {'; '.join(reasons)}.",
                hint=f"rename it, or write exclude: [COLUMN] for {table.qualified} in the pipeline file, then run"
                " cdc -p FILE migrate and cdc -p FILE register",
            )
        for kind in self._tables.kinds:
            self._tables.create(table, kind)

    def position(self, table: Table) -> ViewCheckpoint | None:
        """Return the older of the two positions, where reading has to start again.

        Raises SchemaMismatch: it is lost, see `table_commit.load_position`.
        """
        return table_commit.load_position(self._tables, table)

    def archived(self, table: Table) -> ViewCheckpoint | None:
        """Return where the log of changes stands, wherever the mirror does."""
        return self._commits.last_commit(self.folder(table, "changes")).checkpoint

    def apply(self, batch: Batch) -> Outcome:
        """Commit a batch's events and rows. A table that fails doesn't keep the others from it."""
        steps, failures = self._begin(batch)
        outcome = self._apply(batch, steps) if steps else Outcome()
        if failures:
            raise failures[0]
        applied = {advance.table.qualified: Applied() for advance in batch.advances}
        return replace(outcome, applied=applied | outcome.applied, writer_results={})

    def clear(self, table: Table) -> None:
        """Empty a table's mirror."""
        self._tables.clear(table)

    def scan(
        self, table: Table, spark: "SparkSession", ids: Sequence[str] | None = None
    ) -> "DataFrame":
        """Read a mirror's rows as documents: SCANNED."""
        from pyspark.sql import functions as F

        from cdc.sink.lane_run import freeze_gc_after

        folder = self.folder(table, "mirror")
        if self._commits.table(folder) is None:
            return spark.createDataFrame([], SCANNED)
        mirror = spark.read.format("delta").load(folder)
        if ids is not None:
            requested = spark.createDataFrame([(row_id,) for row_id in ids], f"{ROW_ID} string")
            mirror = mirror.join(F.broadcast(requested), ROW_ID, "left_semi")
        needed = {ROW_ID, *(column.name for column in table.columns)}
        names = {f"c{number}": name for number, name in enumerate(mirror.columns)}
        # By number: Spark parses a dot or a backtick in a name.
        columns = [number for number, name in names.items() if name in needed]
        rows = mirror.toDF(*names).select(*columns)
        return rows.mapInArrow(freeze_gc_after(document_reader(table, names)), SCANNED)

    def scan_group(self, tables: Sequence[Table], spark: "SparkSession") -> "DataFrame":
        """Read the rows of many small mirrors in one job."""
        folders = {table: self.folder(table, "mirror") for table in tables}
        return group_scan.scan_mirrors(spark, folders, self._commits)

    def close(self) -> None:
        """Close the Delta tables."""
        self._commits.close()

    def for_generation(self, names: Mapping[str, str]) -> "Delta":
        """Return a sink that writes the generations of these names, by table."""
        return Delta(
            self.name, self.path, self.pipeline, dict(names), self._without_deletion_vectors
        )

    def check_capacity(self, tables: Sequence[Table]) -> None:
        """Check the space for the files, and for the rows as text where Spark spills.

        Raises SinkRejected when there is too little.
        """
        from sinks.delta import capacity

        mirrors = (self._commits.table(self.folder(table, "mirror")) for table in tables)
        size_bytes = sum(add_files.size_bytes(mirror) for mirror in mirrors if mirror)
        capacity.require_capacity(size_bytes, self.path, self.name)

    def promote(self, tables: Sequence[Table], names: Mapping[str, str]) -> Mapping[str, str]:
        """Make generations live in one commit a view.

        The previous ones are retained after all of these commits. Returns their names by table.
        """
        from pyspark.sql import SparkSession

        from sinks.delta import generations

        spark, retained = SparkSession.active(), {}
        for table in tables:
            self._tables.repair_changes(table)
            live, name = self.folder(table, "mirror"), names[table.qualified]
            checkpoint = self._commits.last_commit(live).checkpoint
            if checkpoint is None or checkpoint.generation != name:
                wait_until_caught_up(
                    partial(generations.switch, spark, self._commits, live, f"{live}@{name}"),
                    self.name,
                )
        for table in tables:
            live, name = self.folder(table, "mirror"), new_generation()
            if add_files.matches_any(table.qualified, self._without_deletion_vectors):
                wait_until_caught_up(
                    partial(generations.drop_deletion_vectors, spark, self._commits, live),
                    self.name,
                )
            if generations.retain_previous(spark, self._commits, live, f"{live}@{name}"):
                retained[table.qualified] = name
        return retained

    def generations(self, table: Table) -> list[str]:
        """List the generations of a view, the live one first."""
        from pyspark.sql import SparkSession

        from sinks.delta import generations

        live = self.folder(table, "mirror")
        checkpoint = self._commits.last_commit(live).checkpoint
        live_name = [checkpoint.generation] if checkpoint else []
        return live_name + [
            name for name in generations.names(SparkSession.active(), live) if name not in live_name
        ]

    def drop_unreferenced(self, tables: Sequence[Table], keep: Mapping[str, str]) -> None:
        """Remove the folders of generations that are neither live nor in `keep`.

        A folder in which a remaining generation names files, as earlier versions did, stays until
        it names none there.
        """
        from pyspark.sql import SparkSession

        from sinks.delta import generations

        # Not the commits of a stream at work: the versions that it has opened mustn't move on.
        spark, commits = SparkSession.active(), Commits()
        for table in tables:
            live = self.folder(table, "mirror")
            folders = {f"{live}@{name}" for name in generations.names(spark, live)}
            remaining = (live, f"{live}@{keep.get(table.qualified)}")
            opened = {folder: commits.table(folder) for folder in remaining}
            used = {folder: delta_table for folder, delta_table in opened.items() if delta_table}
            referenced = {
                f"{self.path}/{table.qualified}/{name}"
                for folder, delta_table in used.items()
                for name in generations.referenced_folders(spark, delta_table, folder)
            }
            generations.remove_paths(spark, folders - used.keys() - referenced)

    def _begin(self, batch: Batch) -> tuple[dict[str, TableCommit], list[CdcError]]:
        """Begin the steps of a batch: return by table those that bring something, and failures."""
        steps: dict[str, TableCommit] = {}
        failures: list[CdcError] = []
        for advance in batch.advances:
            try:
                step = table_commit.begin(self._tables, batch.writer, advance)
            except CdcError as error:
                failures.append(error)
                continue
            if step.pending:
                steps[advance.table.qualified] = step
        return steps, failures

    def _apply(self, batch: Batch, steps: Mapping[str, TableCommit]) -> Outcome:
        """Have the executors write the files of all tables, then commit them."""
        names, spark = FileNames(), batch.records.sparkSession
        for step in steps.values():
            for kind in step.pending:
                self._tables.create_folder(self.folder(step.table, kind))
        try:
            outcome = self._write_files(batch, steps, names)
        except BaseException:
            for step in steps.values():
                step.discard(names, committed=False)
            raise
        staged = {table: _staged_files(outcome, table) for table in steps}
        try:
            rewritten = rewrite_mirrors(spark, self._plan_rewrites(steps, staged, names))
        except BaseException:
            for step in steps.values():
                step.discard(names, committed=True)
            raise
        run_all(
            spark,
            steps,
            partial(self._commit, _StagedBatch(batch, outcome, names, staged, rewritten)),
        )
        return outcome

    def _write_files(
        self, batch: Batch, steps: Mapping[str, TableCommit], names: FileNames
    ) -> Outcome:
        writer = WarehouseWriter(
            {step.table.topic: step.view for step in steps.values()},
            names,
            archives="changes" in self._tables.kinds,
            limits=executor.LIMITS,
        )
        lane = batch.lane(writer, [step.advance for step in steps.values()])
        return lane_run.run_on_executors(
            lane, batch.records, self.name, {"unavailable": WRITE_HINT}
        )

    def _plan_rewrites(
        self, steps: Mapping[str, TableCommit], staged: Mapping[str, Staged], names: FileNames
    ) -> dict[str, Rewrite]:
        """Plan by table the rewrites of small mirrors, which one Spark job does."""
        rewrites = {}
        for table, step in steps.items():
            vectors = self._may_have_deletion_vectors(table)
            if rewrite := step.plan_rewrite(
                staged[table], names, REWRITE_BYTES, deletion_vectors=vectors
            ):
                rewrites[table] = rewrite
        return rewrites

    def _commit(self, files: _StagedBatch, step: TableCommit) -> None:
        """Append the events first, then merge the rows; each only where it gains something."""
        table, batch, spark = step.table, files.batch, files.batch.records.sparkSession
        staged, applied = files.staged[table.qualified], files.outcome.applied[table.qualified]
        try:
            for kind, previous in step.pending.items():
                checkpoint = writer_fence.next_checkpoint(
                    batch.writer,
                    step.advance,
                    previous.checkpoint,
                    applied,
                    self._tables.generation(table),
                )
                if kind == "changes":
                    self._append(spark, step, staged, checkpoint)
                else:
                    self._merge(
                        spark, step, staged, checkpoint, files.rewritten.get(table.qualified)
                    )
                self._confirm(step, kind, checkpoint)
        except CdcError:
            step.discard(files.names, committed=True)
            raise
        self._clean_up(self.folder(table, "mirror"), spark)

    def _confirm(self, step: TableCommit, kind: str, checkpoint: ViewCheckpoint) -> None:
        """Check that the newest commit is the one just made. Raises Fenced: it is another's."""
        folder, number = self.folder(step.table, kind), step.pending[kind].number + 1
        last_commit = self._commits.last_commit(folder)
        stored = last_commit.checkpoint
        if stored is None or (last_commit.number, stored.position) != (number, checkpoint.position):
            raise mismatch(
                step.table, step.advance.end, writer_fence.position_of(stored), ours=False
            )
        self._tables.fence.record(folder, stored)

    def _append(
        self, spark: "SparkSession", step: TableCommit, staged: Staged, checkpoint: ViewCheckpoint
    ) -> None:
        step.append(spark, staged, checkpoint)

    def _merge(
        self,
        spark: "SparkSession",
        step: TableCommit,
        staged: Staged,
        checkpoint: ViewCheckpoint,
        rewritten: list[DataFile] | None,
    ) -> None:
        vectors = self._may_have_deletion_vectors(step.table.qualified)
        step.merge(spark, staged, checkpoint, rewritten, deletion_vectors=vectors)

    def _may_have_deletion_vectors(self, table: str) -> bool:
        return not add_files.matches_any(table, self._without_deletion_vectors)

    def _clean_up(self, folder: str, spark: "SparkSession") -> None:
        """Remove files that no generation has any more, every CLEANUP_S at most."""
        from sinks.delta import generations

        now = time.monotonic()
        if folder not in self._cleanups:
            generations.link_foreign_files(spark, self._commits, folder)
        last_cleanup, candidates = self._cleanups.setdefault(folder, (now, set()))
        if now - last_cleanup >= CLEANUP_S:
            unused = generations.remove_unreferenced(spark, self._commits, folder, candidates)
            self._cleanups[folder] = now, unused


def _staged_files(outcome: Outcome, table: str) -> Staged:
    """Collect the files that the tasks have written for a table."""
    staged = Staged()
    for message in outcome.writer_results.get(table, ()):
        staged.add(_decode_staged(message))
    return staged
