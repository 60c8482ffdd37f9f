"""Delta Lake: per table a folder <path>/<schema>.<table> with `changes` (every event) and `mirror` (current rows).

Each of the two has its own position, in the metadata of the very commit that brought its rows; what lies below it is
filtered out before the write. The commit is a compare-and-set on a transaction number of the table: a second writer's
commit either conflicts or is skipped, and is told apart by reading the position again.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cdc.change import Advance, Applied, Form, Position, Stored, Table, new_generation
from cdc.errors import SinkRejected, SinkUnavailable
from cdc.sink import Batch, Misfit, Rewound, mismatch, stored_after, wait_for
from sinks.delta import add_files, frames, group_scan, positions
from sinks.delta.commits import Commits, Found
from sinks.delta.history import CLEARED
from sinks.delta.parallel import each
from sinks.delta.types import column_type, features, misfits, refusals, schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

KINDS = ("changes", "mirror")
MADE_ANEW_BYTES = 4 * 2**20
"""A mirror smaller than this is made anew by each merge, in one task: less than marks cost."""
TIDY_S = 3600.0
"""How often a mirror is rid of files that its merges have replaced, and how long a query may still read them."""


class Delta:
    form: Form = "events"
    whole = False

    def __init__(
        self,
        name: str,
        path: str,
        pipeline: str,
        beside: Mapping[str, str] | None = None,
        rewritten: Collection[str] = (),
    ) -> None:
        """rewritten: tables, or patterns of them, whose mirror is for readers that can't have deletion vectors."""
        self.name, self.path, self.pipeline, self._beside = name, path.rstrip("/"), pipeline, beside
        self._rewritten = rewritten
        # The log of changes has one generation: a compacted topic couldn't give it back.
        self._kinds = KINDS if beside is None else KINDS[-1:]
        self._commits = Commits()
        self._left: dict[str, Stored | None] = {}
        self._begun: dict[str, tuple[str, Position | None, Position]] = {}
        self._tidied: dict[str, tuple[float, set[str]]] = {}

    def refusals(self, table: Table) -> list[str]:
        return refusals(table)

    def prepare(self, table: Table) -> None:
        """Make what isn't there, without rows: a reader finds every captured table, and its columns."""
        if reasons := refusals(table):
            raise Misfit(
                table,
                self.name,
                f"{table.qualified} can't be held in {self.name}: {'; '.join(reasons)}.",
                hint=f"rename it, or write exclude: [COLUMN] for {table.qualified} in the pipeline file, then run"
                " cdc -p FILE migrate and cdc -p FILE register",
            )
        for kind in self._kinds:
            self._make(table, kind)
            if (found := self._commits.found(self.folder(table, kind))).trouble:
                raise self._untrue(table, kind, found)

    def position(self, table: Table) -> Stored | None:
        """The older of the two positions: where reading has to start again.

        Raises:
            Misfit: it is lost. One that isn't true of the rows any more is told, so that these can be looked at.
        """
        found = {kind: self._standing(table, kind).stored for kind in self._kinds}
        self._left |= {self.folder(table, kind): stored for kind, stored in found.items()}
        return self._oldest(found)

    def archived(self, table: Table) -> Stored | None:
        """Where the log of changes stands, wherever the mirror does."""
        return self._commits.found(self.folder(table, "changes")).stored

    def apply(self, batch: Batch) -> Mapping[str, Applied]:
        # A mirror alone needs the newest of each row, not all that have been.
        shared = batch.events if "changes" in self._kinds else batch.changes
        ours = not shared.is_cached
        shared.persist()
        try:
            return each(batch, partial(self._apply_table, batch, frames.counts(batch)))
        finally:
            if ours:
                shared.unpersist()

    def clear(self, table: Table) -> None:
        """Empty the mirror in one commit. The log of changes stays, unless its columns can't take the table's."""
        if refusals(table):
            return
        for kind in self._kinds:
            folder = self.folder(table, kind)
            held = self._commits.table(folder)
            if held is None:
                continue
            fits = not misfits(held, table)
            if fits and (kind == "changes" or self._is_nothing(folder)):
                continue
            try:
                self._empty(table, kind, CLEARED)
            except SinkUnavailable:
                # A running stream that finds a view without a position clears it as well; either will do.
                if self._commits.found(folder).stored is not None:
                    raise

    def scan(self, table: Table, spark: "SparkSession", ids: Sequence[str] | None = None) -> "DataFrame":
        from pyspark.sql import functions as F

        from cdc import rows

        folder = self.folder(table, "mirror")
        if self._commits.table(folder) is None:
            return spark.createDataFrame([], "id string, document string")
        mirror = spark.read.format("delta").load(folder)
        if ids is not None:
            wanted = spark.createDataFrame([(key,) for key in ids], "_cdc_id string")
            mirror = mirror.join(F.broadcast(wanted), "_cdc_id", "left_semi")
        # A column that has been added since is there once a row brings it.
        later = [column.name for column in table.columns if column.name not in mirror.columns]
        mirror = mirror.select("*", *(F.lit(None).cast(column_type(table, name)).alias(name) for name in later))
        return mirror.select(F.col("_cdc_id").alias("id"), rows.document_of_columns(table).alias("document"))

    def scan_group(self, tables: Sequence[Table], spark: "SparkSession") -> "DataFrame":
        return group_scan.frame(spark, {table: self.folder(table, "mirror") for table in tables}, self._commits)

    def close(self) -> None:
        self._commits.close()

    def beside(self, names: Mapping[str, str]) -> "Delta":
        return Delta(self.name, self.path, self.pipeline, dict(names), rewritten=self._rewritten)

    def require_room(self, tables: Sequence[Table]) -> None:
        """Room for the files, and for the rows as text on the disk of this machine's Spark."""
        from sinks.delta import room

        mirrors = (self._commits.table(self.folder(table, "mirror")) for table in tables)
        room.require_room(sum(add_files.size(mirror) for mirror in mirrors if mirror), self.path, self.name)

    def promote(self, tables: Sequence[Table], names: Mapping[str, str]) -> Mapping[str, str]:
        """One commit a view; the clones of what readers saw come after all of them."""
        from pyspark.sql import SparkSession

        from sinks.delta import generations

        spark, kept = SparkSession.active(), {}
        for table in tables:
            self._mend_changes(table)
            live, name = self.folder(table, "mirror"), names[table.qualified]
            stored = self._commits.found(live).stored
            if stored is None or stored.generation != name:
                wait_for(partial(generations.switch, spark, self._commits, live, f"{live}@{name}"), self.name)
        for table in tables:
            live, name = self.folder(table, "mirror"), new_generation()
            if add_files.named(table.qualified, self._rewritten):
                wait_for(partial(generations.unmark, spark, self._commits, live), self.name)
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

    def sweep(self, tables: Sequence[Table], keep: Mapping[str, str]) -> None:
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

    def _make(self, table: Table, kind: str) -> None:
        """A Delta table of the columns that the source's has, if there is none."""
        folder = self.folder(table, kind)
        try:
            if "://" not in self.path:
                Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SinkRejected(
                f"The warehouse folder {self.path} can't be written: {error.strerror}.",
                hint="see the sink's path",
            ) from None
        held = self._commits.table(folder)
        if held is None:
            try:
                add_files.create(folder, [], schema(table, kind), CLEARED, 1)
            except SinkUnavailable:
                # Another process may have made it.
                if self._commits.table(folder) is None:
                    raise
        elif misfits(held, table):
            if not self._is_nothing(folder):
                raise Misfit(table, self.name)
            self._empty(table, kind, CLEARED)

    def _is_nothing(self, folder: str) -> bool:
        """Whether a Delta table has neither rows nor a position."""
        found, held = self._commits.found(folder), self._commits.opened(folder)
        return not (found.stored or found.trouble or (held and add_files.paths(held)))

    def _standing(self, table: Table, kind: str) -> Found:
        """Our last commit. Raises Misfit when there is one, and it can't be told which."""
        found = self._commits.found(self.folder(table, kind))
        if found.trouble and found.stored is None:
            raise self._untrue(table, kind, found)
        return found

    def _untrue(self, table: Table, kind: str, found: Found) -> Misfit:
        """The mirror has to be made again."""
        folder = self.folder(table, kind)
        return Misfit(table, self.name, f"The Delta table {folder} can't be gone on with: {found.trouble}.")

    def _mend_changes(self, table: Table) -> None:
        """Make a log of changes go on that can't: beside a mirror that is made again, nothing else could.

        One whose columns can't take the table's begins again, for the events that come after those it holds; what it
        held is in its earlier versions, until VACUUM. Of one that somebody else has changed the rows stay as they are.
        """
        folder = self.folder(table, "changes")
        found = self._commits.found(folder)
        held = self._commits.opened(folder)
        if held is None:
            return
        if misfits(held, table) or (found.trouble and found.stored is None):
            self._empty(table, "changes", found.stored or CLEARED)
        elif found.trouble and found.stored:
            add_files.commit(held, [], "append", held.schema(), found.stored, found.number + 1)

    def _empty(self, table: Table, kind: str, stored: Stored) -> None:
        """Take all rows out of a Delta table and give it the columns of the source's, in one commit."""
        folder, columns = self.folder(table, kind), schema(table, kind)
        self._left.pop(folder, None)
        found, held = self._commits.found(folder), self._commits.opened(folder)
        if held is None:
            return
        if needed := features(columns) - add_files.features(held):
            from pyspark.sql import SparkSession

            from sinks.delta import vectors

            vectors.ask(SparkSession.active(), folder, needed)
            held.update_incremental()
        add_files.commit(held, [], "overwrite", columns, stored, found.number + 1)

    def folder(self, table: Table, kind: str) -> str:
        generation = f"@{self._beside[table.qualified]}" if self._beside and kind == "mirror" else ""
        return f"{self.path}/{table.qualified}/{kind}{generation}"

    def _apply_table(self, batch: Batch, counts: frames.Counts, advance: Advance) -> Applied:
        """Append the events first, then merge the rows; each to what has something to gain by them."""
        counted, lacking = counts.get(advance.table.topic, frames.NOTHING)
        found = {kind: self._commits.found(self.folder(advance.table, kind)) for kind in self._kinds}
        self._begin(batch.writer, advance, found)
        due = {kind: before for kind, before in found.items() if self._is_due(batch.writer, advance, kind, before)}
        for kind, before in due.items():
            folder = self.folder(advance.table, kind)
            stored = self._stored_after(batch.writer, advance, before, counted)
            if kind == "changes":
                self._append(folder, self._events(batch, advance, before), before, stored)
            else:
                marks = not add_files.named(advance.table.qualified, self._rewritten)
                self._merge(folder, self._rows(batch, advance, before.stored, lacking), before, stored, marks)
            after = self._commits.found(folder)
            if after.stored is None or (after.number, after.stored.position) != (before.number + 1, stored.position):
                raise mismatch(advance.table, advance.until, _position(after.stored), ours=False)
            self._left[folder] = after.stored
        self._tidy(self.folder(advance.table, "mirror"), batch.events.sparkSession)
        return counted if due else Applied()

    def _begin(self, writer: str, advance: Advance, found: Mapping[str, Found]) -> None:
        """Take note of a step; it may be tried again when one of the two has gone further by it.

        Raises:
            Fenced, Rewound: see `Sink.apply`.
        """
        table = advance.table
        for kind, standing in found.items():
            if standing.trouble:
                raise Rewound(
                    f"The Delta table {self.folder(table, kind)} can't be gone on with: {standing.trouble}.",
                    hint=f"cdc -p FILE rebuild {self.name} --table {table.qualified}",
                    table=table.qualified,
                )
        step = (writer, advance.start, advance.until)
        if any(self.folder(table, kind) not in self._left for kind in self._kinds):
            self.position(table)
        elif self._begun.get(table.topic) == step:
            return
        expected = _position(self._oldest({kind: self._left[self.folder(table, kind)] for kind in self._kinds}))
        if expected != advance.start:
            raise mismatch(table, advance.start, expected, ours=False)
        self._begun[table.topic] = step

    def _is_due(self, writer: str, advance: Advance, kind: str, before: Found) -> bool:
        """Whether a part of the view gains something by a step. Raises Fenced, Rewound: see `Sink.apply`."""
        folder, stored = self.folder(advance.table, kind), before.stored
        gains = advance.repairs or positions.further(stored, advance.until) != _position(stored)
        if not gains and stored and stored.writer == writer:
            # Perhaps of this very step, whose answer was lost.
            self._left[folder] = stored
        left = self._left[folder]
        if stored != left:
            ours = stored is None or stored.writer == writer
            raise mismatch(advance.table, _position(left), _position(stored), ours=ours)
        return gains

    def _stored_after(self, writer: str, advance: Advance, before: Found, counted: Applied) -> Stored:
        if advance.repairs and before.stored:
            # A repair leaves no trace in the position: the stream that owns it goes on undisturbed.
            return before.stored
        generation = self._beside[advance.table.qualified] if self._beside else None
        further = replace(advance, until=positions.further(before.stored, advance.until))
        return stored_after(further, before.stored, counted, writer, generation)

    def _events(self, batch: Batch, advance: Advance, before: Found) -> "DataFrame":
        """What to append."""
        events = frames.events(batch, advance, before.stored)
        if not advance.repairs:
            return events
        log = events.sparkSession.read.format("delta").load(self.folder(advance.table, "changes"))
        return frames.lacking(events, log, advance.until.topic_id)

    def _append(self, folder: str, rows: "DataFrame", before: Found, stored: Stored) -> None:
        # As `before` saw it: a switch since then has to be a conflict.
        table = self._commits.opened(folder)
        if table is None:
            add_files.begin(folder, rows, stored, before.number + 1)
        else:
            add_files.write(table, rows, "append", stored, before.number + 1)

    def _merge(self, folder: str, rows: "DataFrame", before: Found, stored: Stored, marks: bool) -> None:
        table = self._commits.opened(folder)
        if table is None or before.stored is None:
            self._append(folder, frames.first(rows), before, stored)
        elif add_files.size(table) < MADE_ANEW_BYTES and (
            mirror := add_files.plain(table, folder, rows.sparkSession, marks)
        ):
            add_files.write(table, frames.merged(mirror, rows), "overwrite", stored, before.number + 1)
        else:
            from sinks.delta.marks import merge

            merge(table, folder, rows, stored, before.number + 1, marks)

    def _tidy(self, folder: str, spark: "SparkSession") -> None:
        from sinks.delta import generations

        now = time.monotonic()
        if folder not in self._tidied:
            generations.gather(spark, self._commits, folder)
        last, unused = self._tidied.setdefault(folder, (now, set()))
        if now - last >= TIDY_S:
            self._tidied[folder] = now, generations.tidy(spark, self._commits, folder, unused)

    def _rows(self, batch: Batch, advance: Advance, stored: Stored | None, lacking: bool) -> "DataFrame":
        """What to merge, completed where changes lack values."""
        from sinks.delta import complete

        changes = frames.unseen(batch.changes, advance, stored).where("offset IS NOT NULL")
        if lacking:
            folder = None if stored is None else self.folder(advance.table, "mirror")
            return complete.completed(changes, advance.table, folder, self.name)
        return frames.changed(changes, advance.table)

    def _oldest(self, found: Mapping[str, Stored | None]) -> Stored | None:
        mirror = found["mirror"]
        return positions.oldest(found["changes"], mirror) if "changes" in found else mirror


def _position(stored: Stored | None) -> Position | None:
    return stored.position if stored else None
