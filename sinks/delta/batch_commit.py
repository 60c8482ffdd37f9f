"""The commits of one batch: executors write the files of all its tables, then each table is
committed by itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from cdc.errors import CdcError, SinkUnavailable
from cdc.model.outcome import Applied
from cdc.sink import lane_run
from cdc.sink.contract import Batch, Outcome
from cdc.sinks.delta import executor, table_commit
from cdc.sinks.delta.cleanup import Cleanups
from cdc.sinks.delta.executor import Staged, WarehouseWriter
from cdc.sinks.delta.files.failures import write_hint
from cdc.sinks.delta.files.parquet import FileNames
from cdc.sinks.delta.log import writer_fence
from cdc.sinks.delta.mirror.rewrite import rewrite
from cdc.sinks.delta.mirror.superseded import find_superseded
from cdc.sinks.delta.place import is_bucket, place
from cdc.sinks.delta.table_commit import TableCommit
from cdc.sinks.delta.tables import Tables

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

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
            checkpoint = writer_fence.next_checkpoint(
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
            step = table_commit.begin(tables, batch.writer, advance, names)
        except CdcError as error:
            failures.append(error)
            if isinstance(error, SinkUnavailable) and is_bucket(tables.path):
                # A store that doesn't answer would be waited for once a table.
                break
            continue
        if step.pending:
            steps[advance.table.qualified] = step
    return steps, failures
