"""The commits of one batch: executors write the files of all its tables, then each table is
committed by itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from cdc.errors import CdcError
from cdc.model.outcome import Applied
from cdc.model.position import ViewCheckpoint
from cdc.sink import lane_run
from cdc.sink.contract import Batch, Outcome
from cdc.sink.fencing import mismatch
from cdc.sinks.delta import executor, table_commit
from cdc.sinks.delta.cleanup import Cleanups
from cdc.sinks.delta.commit_pool import run_all
from cdc.sinks.delta.executor import Staged, WarehouseWriter
from cdc.sinks.delta.files.failures import WRITE_HINT
from cdc.sinks.delta.files.parquet import DataFile, FileNames
from cdc.sinks.delta.log import writer_fence
from cdc.sinks.delta.mirror.rewrite import Rewrite, rewrite_mirrors
from cdc.sinks.delta.table_commit import TableCommit
from cdc.sinks.delta.tables import Tables

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

REWRITE_BYTES = 4 * 2**20
"""A mirror smaller than this is written again by each batch.

That costs less than deletion vectors.
"""
decode_staged = msgspec.json.Decoder(Staged).decode


@dataclass(frozen=True, eq=False)
class _TableFiles:
    """What executors have written for one table.

    rewritten: of a small mirror, the file of all its rows; None of any other.
    """

    staged: Staged
    rewritten: list[DataFile] | None
    applied: Applied


@dataclass(frozen=True, eq=False)
class BatchCommit:
    """What a batch commits.

    steps: by table, those that bring something; there is one at least.
    """

    tables: Tables
    cleanups: Cleanups
    batch: Batch
    steps: Mapping[str, TableCommit]
    names: FileNames = field(default_factory=FileNames)

    def apply(self) -> Outcome:
        """Have the executors write the files of all tables, then commit them.

        Raises:
            Fenced, RowsRejected, SinkUnavailable: see `Sink.apply`.
        """
        for step in self.steps.values():
            for kind in step.pending:
                self.tables.create_folder(self.tables.folder(step.table, kind))
        try:
            outcome = self._write_files()
        except BaseException:
            self._discard(committed=False)
            raise
        staged = {table: _staged_files(outcome, table) for table in self.steps}
        try:
            rewritten = rewrite_mirrors(self._spark, self._plan_rewrites(staged))
        except BaseException:
            self._discard(committed=True)
            raise
        files = {
            table: _TableFiles(staged[table], rewritten.get(table), outcome.applied[table])
            for table in self.steps
        }
        run_all(self._spark, self.steps, partial(self._commit, files))
        return outcome

    @property
    def _spark(self) -> "SparkSession":
        from pyspark.sql import SparkSession

        return SparkSession.active()

    def _write_files(self) -> Outcome:
        writer = WarehouseWriter(
            {step.table.topic: step.view for step in self.steps.values()},
            self.names,
            archives="changes" in self.tables.kinds,
            limits=executor.LIMITS,
        )
        lane = self.batch.lane(writer, [step.advance for step in self.steps.values()])
        return lane_run.run_on_executors(
            lane, self.batch.records, self.tables.sink, {"unavailable": WRITE_HINT}
        )

    def _plan_rewrites(self, staged: Mapping[str, Staged]) -> dict[str, Rewrite]:
        """Plan by table the rewrites of small mirrors, which one Spark job does."""
        rewrites = {}
        for table, step in self.steps.items():
            if rewrite := step.plan_rewrite(staged[table], self.names, REWRITE_BYTES):
                rewrites[table] = rewrite
        return rewrites

    def _discard(self, *, committed: bool) -> None:
        for step in self.steps.values():
            step.discard(self.names, committed=committed)

    def _commit(self, files: Mapping[str, _TableFiles], step: TableCommit) -> None:
        """Append the events first, then merge the rows; each only where it gains something."""
        try:
            for kind in step.pending:
                self._commit_part(files[step.table.qualified], step, kind)
        except CdcError:
            step.discard(self.names, committed=True)
            raise
        for kind in step.pending:
            self.cleanups.remove_replaced(self._spark, self.tables.folder(step.table, kind))

    def _commit_part(self, files: _TableFiles, step: TableCommit, kind: str) -> None:
        checkpoint = writer_fence.next_checkpoint(
            self.batch.writer,
            step.advance,
            step.pending[kind].checkpoint,
            files.applied,
            self.tables.generation(step.table),
        )
        if kind == "changes":
            step.append(self._spark, files.staged, checkpoint)
        else:
            step.merge(self._spark, files.staged, checkpoint, files.rewritten)
        self._confirm(step, kind, checkpoint)

    def _confirm(self, step: TableCommit, kind: str, checkpoint: ViewCheckpoint) -> None:
        """Check that the newest commit is the one just made. Raises Fenced: it is another's."""
        folder, number = self.tables.folder(step.table, kind), step.pending[kind].number + 1
        last_commit = self.tables.commits.last_commit(folder)
        stored = last_commit.checkpoint
        if stored is None or (last_commit.number, stored.position) != (number, checkpoint.position):
            raise mismatch(
                step.table, step.advance.end, writer_fence.position_of(stored), ours=False
            )
        self.tables.fence.record(folder, stored)


def begin_steps(tables: Tables, batch: Batch) -> tuple[dict[str, TableCommit], list[CdcError]]:
    """Begin the steps of a batch: return by table those that bring something, and failures."""
    steps: dict[str, TableCommit] = {}
    failures: list[CdcError] = []
    for advance in batch.advances:
        try:
            step = table_commit.begin(tables, batch.writer, advance)
        except CdcError as error:
            failures.append(error)
            continue
        if step.pending:
            steps[advance.table.qualified] = step
    return steps, failures


def _staged_files(outcome: Outcome, table: str) -> Staged:
    """Collect the files that the tasks have written for a table."""
    staged = Staged()
    for message in outcome.writer_results.get(table, ()):
        staged.add(decode_staged(message))
    return staged
