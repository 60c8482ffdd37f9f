"""Delta Lake: per table a folder <path>/<schema>.<table> with `changes` (every event) and `mirror` (current rows).

Each of the two has its own position, in the metadata of the very commit that brought its rows; what lies below it is
filtered out before the write. Executors write the files of a batch (`executor`), the driver commits them
(`table_commit`). The
commit is a compare-and-set on a transaction number of the table: a second writer's commit either conflicts or is
skipped, and is told apart by reading the position again.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from cdc.errors import CdcError
from cdc.model.generation import new_generation
from cdc.model.outcome import Applied
from cdc.model.position import ViewCheckpoint
from cdc.model.table import RowFormat, Table
from cdc.sink import lane_run
from cdc.sink.contract import Batch, Outcome, SchemaMismatch, mismatch, wait_until_caught_up
from sinks.delta import executor, table_commit
from sinks.delta.commit_pool import each
from sinks.delta.executor import Staged, WarehouseWriter
from sinks.delta.files.columns import refusals
from sinks.delta.files.failures import WRITABLE
from sinks.delta.files.parquet import File, Name
from sinks.delta.log import add_files, writer_fence
from sinks.delta.log.commits import Commits
from sinks.delta.mirror import group_scan
from sinks.delta.mirror.rewrite import Rewrite, rewritten
from sinks.delta.mirror.scan import ROW_ID, SCANNED, reader
from sinks.delta.table_commit import Step
from sinks.delta.tables import Tables

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

MADE_ANEW_BYTES = 4 * 2**20
"""A mirror smaller than this is made anew by each batch: less than marks cost."""
TIDY_S = 3600.0
"""How often a mirror is rid of files that its merges have replaced, and how long a query may still read them."""
_staged = msgspec.json.Decoder(Staged).decode


class Delta:
    row_format: RowFormat = "events"
    promotes_all_tables = False

    def __init__(
        self,
        name: str,
        path: str,
        pipeline: str,
        beside: Mapping[str, str] | None = None,
        rewritten: Collection[str] = (),
    ) -> None:
        """rewritten: tables, or patterns of them, whose mirror is for readers that can't have deletion vectors."""
        self.name, self.pipeline = name, pipeline
        self._rewritten = rewritten
        self._tables = Tables(name, path, beside)
        self._commits = self._tables.commits
        self._tidied: dict[str, tuple[float, set[str]]] = {}

    @property
    def path(self) -> str:
        return self._tables.path

    def folder(self, table: Table, kind: str) -> str:
        return self._tables.folder(table, kind)

    def refusals(self, table: Table) -> list[str]:
        return refusals(table)

    def prepare(self, table: Table) -> None:
        """Make what isn't there, without rows: a reader finds every captured table, and its columns."""
        if reasons := refusals(table):
            raise SchemaMismatch(
                table,
                self.name,
                f"{table.qualified} can't be held in {self.name}: {'; '.join(reasons)}.",
                hint=f"rename it, or write exclude: [COLUMN] for {table.qualified} in the pipeline file, then run"
                " cdc -p FILE migrate and cdc -p FILE register",
            )
        for kind in self._tables.kinds:
            self._tables.make(table, kind)

    def position(self, table: Table) -> ViewCheckpoint | None:
        """The older of the two positions: where reading has to start again.

        Raises SchemaMismatch, see `table_commit.look`.
        """
        return table_commit.look(self._tables, table)

    def archived(self, table: Table) -> ViewCheckpoint | None:
        """Where the log of changes stands, wherever the mirror does."""
        return self._commits.found(self.folder(table, "changes")).stored

    def apply(self, batch: Batch) -> Outcome:
        steps, failures = self._begin(batch)
        outcome = self._apply(batch, steps) if steps else Outcome()
        if failures:
            raise failures[0]
        applied = {advance.table.qualified: Applied() for advance in batch.advances}
        return replace(outcome, applied=applied | outcome.applied, writer_results={})

    def clear(self, table: Table) -> None:
        self._tables.clear(table)

    def scan(self, table: Table, spark: "SparkSession", ids: Sequence[str] | None = None) -> "DataFrame":
        from pyspark.sql import functions as F

        from cdc.sink.lane_run import freeze_gc_after

        folder = self.folder(table, "mirror")
        if self._commits.table(folder) is None:
            return spark.createDataFrame([], SCANNED)
        mirror = spark.read.format("delta").load(folder)
        if ids is not None:
            wanted = spark.createDataFrame([(key,) for key in ids], f"{ROW_ID} string")
            mirror = mirror.join(F.broadcast(wanted), ROW_ID, "left_semi")
        needed = {ROW_ID, *(column.name for column in table.columns)}
        names = {f"c{number}": name for number, name in enumerate(mirror.columns)}
        # By number: Spark takes a dot or a backtick in a name for its own.
        held = mirror.toDF(*names).select(*(number for number, name in names.items() if name in needed))
        return held.mapInArrow(freeze_gc_after(reader(table, names)), SCANNED)

    def scan_group(self, tables: Sequence[Table], spark: "SparkSession") -> "DataFrame":
        return group_scan.frame(spark, {table: self.folder(table, "mirror") for table in tables}, self._commits)

    def close(self) -> None:
        self._commits.close()

    def for_generation(self, names: Mapping[str, str]) -> "Delta":
        return Delta(self.name, self.path, self.pipeline, dict(names), rewritten=self._rewritten)

    def check_capacity(self, tables: Sequence[Table]) -> None:
        """Room for the files, and for the rows as text on the disk of this machine's Spark."""
        from sinks.delta import capacity

        mirrors = (self._commits.table(self.folder(table, "mirror")) for table in tables)
        capacity.require_room(sum(add_files.size(mirror) for mirror in mirrors if mirror), self.path, self.name)

    def promote(self, tables: Sequence[Table], names: Mapping[str, str]) -> Mapping[str, str]:
        """One commit a view; the clones of what readers saw come after all of them."""
        from pyspark.sql import SparkSession

        from sinks.delta import generations

        spark, kept = SparkSession.active(), {}
        for table in tables:
            self._tables.mend_changes(table)
            live, name = self.folder(table, "mirror"), names[table.qualified]
            stored = self._commits.found(live).stored
            if stored is None or stored.generation != name:
                wait_until_caught_up(
                    partial(generations.switch, spark, self._commits, live, f"{live}@{name}"), self.name
                )
        for table in tables:
            live, name = self.folder(table, "mirror"), new_generation()
            if add_files.named(table.qualified, self._rewritten):
                wait_until_caught_up(partial(generations.unmark, spark, self._commits, live), self.name)
            if generations.keep(spark, self._commits, live, f"{live}@{name}"):
                kept[table.qualified] = name
        return kept

    def generations(self, table: Table) -> list[str]:
        from pyspark.sql import SparkSession

        from sinks.delta import generations

        live = self.folder(table, "mirror")
        stored = self._commits.found(live).stored
        seen = [stored.generation] if stored else []
        return seen + [name for name in generations.others(SparkSession.active(), live) if name not in seen]

    def drop_unreferenced(self, tables: Sequence[Table], keep: Mapping[str, str]) -> None:
        """Folders that a generation names files in, as earlier versions did, stay until it names none there."""
        from pyspark.sql import SparkSession

        from sinks.delta import generations

        # Not those of a stream that is at work: what it has opened must stay what it has looked at.
        spark, commits = SparkSession.active(), Commits()
        for table in tables:
            live = self.folder(table, "mirror")
            found = {f"{live}@{name}" for name in generations.others(spark, live)}
            opened = {one: commits.table(one) for one in (live, f"{live}@{keep.get(table.qualified)}")}
            used = {folder: one for folder, one in opened.items() if one}
            needed = {
                f"{self.path}/{table.qualified}/{name}"
                for folder, one in used.items()
                for name in generations.needed(spark, one, folder)
            }
            generations.remove(spark, found - used.keys() - needed)

    def _begin(self, batch: Batch) -> tuple[dict[str, Step], list[CdcError]]:
        """The steps by table that bring something, and what keeps others from being begun."""
        steps: dict[str, Step] = {}
        failures: list[CdcError] = []
        for advance in batch.advances:
            try:
                begun = table_commit.begin(self._tables, batch.writer, advance)
            except CdcError as error:
                failures.append(error)
                continue
            if begun.due:
                steps[advance.table.qualified] = begun
        return steps, failures

    def _apply(self, batch: Batch, steps: Mapping[str, Step]) -> Outcome:
        """Have the executors write the files of all tables, then commit them."""
        name, spark = Name(), batch.records.sparkSession
        for begun in steps.values():
            for kind in begun.due:
                self._tables.make_folder(self.folder(begun.table, kind))
        writer = WarehouseWriter(
            {begun.table.topic: begun.view for begun in steps.values()},
            name,
            archives="changes" in self._tables.kinds,
            limits=executor.LIMITS,
        )
        lane = batch.lane(writer, [begun.advance for begun in steps.values()])
        try:
            outcome = lane_run.run_on_executors(lane, batch.records, self.name, {"unavailable": WRITABLE})
        except BaseException:
            for begun in steps.values():
                begun.discard(name, committed=False)
            raise
        written = {table: _staged_of(outcome, table) for table in steps}
        try:
            made = rewritten(spark, self._rewrites(steps, written, name))
        except BaseException:
            for begun in steps.values():
                begun.discard(name, committed=True)
            raise
        each(spark, steps, partial(self._commit, batch, outcome, name, written, made))
        return outcome

    def _rewrites(self, steps: Mapping[str, Step], written: Mapping[str, Staged], name: Name) -> dict[str, Rewrite]:
        """What is to be done to small mirrors, all of them in one job of Spark's."""
        rewrites = {}
        for table, begun in steps.items():
            if rewrite := begun.rewrite(written[table], name, MADE_ANEW_BYTES, marks=self._marks(table)):
                rewrites[table] = rewrite
        return rewrites

    def _commit(
        self,
        batch: Batch,
        outcome: Outcome,
        name: Name,
        written: Mapping[str, Staged],
        made: Mapping[str, list[File]],
        begun: Step,
    ) -> None:
        """Append the events first, then merge the rows; each to what has something to gain by them."""
        table, spark = begun.table, batch.records.sparkSession
        staged = written[table.qualified]
        try:
            for kind, before in begun.due.items():
                applied, generation = outcome.applied[table.qualified], self._tables.generation(table)
                stored = writer_fence.after(batch.writer, begun.advance, before.stored, applied, generation)
                if kind == "changes":
                    self._append(spark, begun, staged, stored)
                else:
                    self._merge(spark, begun, staged, stored, made.get(table.qualified))
                folder = self.folder(table, kind)
                now = self._commits.found(folder)
                if now.stored is None or (now.number, now.stored.position) != (before.number + 1, stored.position):
                    raise mismatch(table, begun.advance.end, writer_fence.position(now.stored), ours=False)
                self._tables.fence.leave(folder, now.stored)
        except CdcError:
            begun.discard(name, committed=True)
            raise
        self._tidy(self.folder(table, "mirror"), spark)

    def _append(self, spark: "SparkSession", begun: Step, staged: Staged, stored: ViewCheckpoint) -> None:
        begun.append(spark, staged, stored)

    def _merge(
        self, spark: "SparkSession", begun: Step, staged: Staged, stored: ViewCheckpoint, made: list[File] | None
    ) -> None:
        begun.merge(spark, staged, stored, made, marks=self._marks(begun.table.qualified))

    def _marks(self, table: str) -> bool:
        """Whether rows of a table's mirror may be marked as deleted."""
        return not add_files.named(table, self._rewritten)

    def _tidy(self, folder: str, spark: "SparkSession") -> None:
        from sinks.delta import generations

        now = time.monotonic()
        if folder not in self._tidied:
            generations.gather(spark, self._commits, folder)
        last, unused = self._tidied.setdefault(folder, (now, set()))
        if now - last >= TIDY_S:
            self._tidied[folder] = now, generations.tidy(spark, self._commits, folder, unused)


def _staged_of(outcome: Outcome, table: str) -> Staged:
    """What the executors have written for a table."""
    staged = Staged()
    for told in outcome.writer_results.get(table, ()):
        staged.add(_staged(told))
    return staged
