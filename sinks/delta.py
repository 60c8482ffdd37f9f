"""Delta Lake: per table a folder <path>/<schema>.<table> with `changes` (every event) and `mirror` (current rows).

Each of the two has its own position, in the metadata of the very commit that brought its rows; what lies below it is
filtered out before the write. The commit is a compare-and-set on a transaction number of the table: a second writer's
commit either conflicts or is skipped, and is told apart by reading the position again.
"""

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cdc.change import Advance, Applied, Form, Position, Stored, Table, new_generation
from cdc.errors import SinkRejected, SinkUnavailable
from cdc.sink import Batch, Misfit, mismatch, require, stored_after, wait_for
from sinks import delta_files, delta_write
from sinks.delta_commits import CLEARED, Commits, Found, numbered
from sinks.delta_tables import each
from sinks.delta_types import column_type, misfits

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

    def __init__(self, name: str, path: str, pipeline: str, beside: Mapping[str, str] | None = None) -> None:
        self.name, self.path, self.pipeline, self._beside = name, path.rstrip("/"), pipeline, beside
        # The log of changes has one generation: a compacted topic couldn't give it back.
        self._kinds = KINDS if beside is None else KINDS[-1:]
        self._commits = Commits(name)
        self._left: dict[str, Stored | None] = {}
        self._tidied: dict[str, tuple[float, set[str]]] = {}

    def prepare(self, table: Table) -> None:
        """Refuse a folder that can't be written; the Delta tables themselves come with their first commit."""
        try:
            if "://" not in self.path:
                Path(self.path, table.qualified).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SinkRejected(
                f"The warehouse folder {self.path} can't be written: {error.strerror}.",
                hint="see the sink's path",
            ) from None
        if any(self._misfits(table, kind) for kind in self._kinds):
            raise Misfit(table, self.name)

    def position(self, table: Table) -> Stored | None:
        """The older of the two positions: where reading has to start again."""
        found = {kind: self._commits.found(self.folder(table, kind)).stored for kind in self._kinds}
        self._left |= {self.folder(table, kind): stored for kind, stored in found.items()}
        return _oldest([found[kind] for kind in self._kinds])

    def apply(self, batch: Batch) -> Mapping[str, Applied]:
        ours = not batch.events.is_cached
        batch.events.persist()
        try:
            return each(batch, partial(self._apply_table, batch, delta_write.counts(batch)))
        finally:
            if ours:
                batch.events.unpersist()

    def clear(self, table: Table) -> None:
        """Empty the mirror in one commit. The log of changes stays, unless its columns can't take the table's."""
        from pyspark.errors import PySparkException

        for kind in self._kinds:
            folder = self.folder(table, kind)
            if self._commits.table(folder) is None or (kind == "changes" and not self._misfits(table, kind)):
                continue
            try:
                self._empty(folder, CLEARED)
            except (SinkUnavailable, PySparkException):
                # A running stream that finds a view without a position clears it as well; either will do.
                if self._commits.found(folder).stored is not None:
                    raise

    def scan(self, table: Table, spark: "SparkSession", ids: Sequence[str] | None = None) -> "DataFrame":
        from pyspark.sql import functions as F

        from cdc import rows

        folder = self.folder(table, "mirror")
        if self._commits.found(folder).stored is None:
            return spark.createDataFrame([], "id string, document string")
        mirror = spark.read.format("delta").load(folder)
        if ids is not None:
            wanted = spark.createDataFrame([(key,) for key in ids], "_cdc_id string")
            mirror = mirror.join(F.broadcast(wanted), "_cdc_id", "left_semi")
        # A column that has been added since is there once a row brings it.
        later = [column.name for column in table.columns if column.name not in mirror.columns]
        mirror = mirror.select("*", *(F.lit(None).cast(column_type(table, name)).alias(name) for name in later))
        return mirror.select(F.col("_cdc_id").alias("id"), rows.document_of_columns(table).alias("document"))

    def close(self) -> None:
        self._commits.close()

    def beside(self, names: Mapping[str, str]) -> "Delta":
        return Delta(self.name, self.path, self.pipeline, dict(names))

    def require_room(self, tables: Sequence[Table]) -> None:
        if "://" in self.path:
            return
        mirrors = (self._commits.table(self.folder(table, "mirror")) for table in tables)
        needed = sum(delta_files.size(mirror) for mirror in mirrors if mirror)
        Path(self.path).mkdir(parents=True, exist_ok=True)
        require(needed, shutil.disk_usage(self.path).free, self.path, self.name)

    def promote(self, tables: Sequence[Table], names: Mapping[str, str]) -> Mapping[str, str]:
        """One commit a view; the clones of what readers saw come after all of them."""
        from pyspark.sql import SparkSession

        from sinks import delta_generations

        spark, kept = SparkSession.active(), {}
        for table in tables:
            self._fit_changes(table, names)
            live, name = self.folder(table, "mirror"), names[table.qualified]
            stored = self._commits.found(live).stored
            if stored is None or stored.generation != name:
                switch = partial(delta_generations.switch, spark, self._commits, live, f"{live}@{name}")
                wait_for(switch, self.name)
        for table in tables:
            live, name = self.folder(table, "mirror"), new_generation()
            if delta_generations.keep(spark, self._commits, live, f"{live}@{name}"):
                kept[table.qualified] = name
        return kept

    def generations(self, table: Table) -> list[str]:
        from pyspark.sql import SparkSession

        from sinks import delta_generations

        live = self.folder(table, "mirror")
        stored = self._commits.found(live).stored
        seen = [stored.generation] if stored else []
        # The folder in which a promoted generation was made holds its files.
        return seen + [name for name in delta_generations.others(SparkSession.active(), live) if name not in seen]

    def sweep(self, tables: Sequence[Table], keep: Mapping[str, str]) -> None:
        """Folders that a kept generation has files in stay until it has none there."""
        from pyspark.sql import SparkSession

        from sinks import delta_generations

        # Not those of a stream that is at work: what it has opened must stay what it has looked at.
        spark, commits = SparkSession.active(), Commits(self.name)
        for table in tables:
            live = self.folder(table, "mirror")
            found = {f"{live}@{name}" for name in delta_generations.others(spark, live)}
            opened = {one: commits.table(one) for one in (live, f"{live}@{keep.get(table.qualified)}")}
            used = {folder: one for folder, one in opened.items() if one}
            needed = {
                f"{self.path}/{table.qualified}/{name}"
                for folder, one in used.items()
                for name in delta_generations.needed(spark, one, folder)
            }
            delta_generations.remove(spark, found - used.keys() - needed)

    def _fit_changes(self, table: Table, names: Mapping[str, str]) -> None:
        """A log of changes whose columns can't take the table's begins again where the new mirror stands.

        What it held is in its earlier versions, until VACUUM.
        """
        stored = self.beside(names).position(table)
        if stored and self._misfits(table, "changes"):
            self._empty(self.folder(table, "changes"), stored)

    def _empty(self, folder: str, stored: Stored) -> None:
        """Take all rows and columns out of a Delta table, in one commit."""
        from pyspark.sql import SparkSession

        spark = SparkSession.active()
        self._left.pop(folder, None)
        empty = spark.read.format("delta").load(folder).limit(0).select("_cdc_id")
        with numbered(spark, stored, self._commits.found(folder).number + 1):
            empty.write.format("delta").mode("overwrite").option("overwriteSchema", "true").save(folder)

    def folder(self, table: Table, kind: str) -> str:
        generation = f"@{self._beside[table.qualified]}" if self._beside and kind == "mirror" else ""
        return f"{self.path}/{table.qualified}/{kind}{generation}"

    def _apply_table(self, batch: Batch, counts: delta_write.Counts, advance: Advance) -> Applied:
        """Append the events first, then merge the rows, so that the older position is never ahead of either."""
        table = advance.table
        counted, lacking = counts.get(table.topic, delta_write.NOTHING)
        found = {kind: self._commits.found(self.folder(table, kind)) for kind in self._kinds}
        done = (batch.writer, advance.until)
        left = {kind: (one.stored.writer, one.stored.position) for kind, one in found.items() if one.stored}
        due = [kind for kind in self._kinds if advance.repairs or left.get(kind) != done]
        if not due:
            return Applied()
        if self.folder(table, "mirror") not in self._left:
            self.position(table)
        expected = _oldest([self._left[self.folder(table, kind)] for kind in self._kinds])
        if _position(expected) != advance.start:
            raise mismatch(table, advance.start, _position(expected), ours=False)
        for kind in due:
            folder, before = self.folder(table, kind), found[kind]
            self._unmoved(folder, advance, before.stored, batch.writer)
            generation = self._beside[table.qualified] if self._beside else None
            stored = stored_after(advance, before.stored, counted, batch.writer, generation)
            # A repair leaves no trace in the position: the stream that owns it goes on undisturbed.
            stored = before.stored if advance.repairs and before.stored else stored
            if kind == "changes":
                self._append(folder, delta_write.events(batch, advance, before.stored), before, stored)
            else:
                self._merge(folder, self._rows(batch, advance, before.stored, lacking), before, stored)
            after = self._commits.found(folder)
            if after.stored is None or (after.number, after.stored.position) != (before.number + 1, stored.position):
                raise mismatch(table, advance.until, _position(after.stored), ours=False)
            self._left[folder] = after.stored
        self._tidy(self.folder(table, "mirror"), batch.events.sparkSession)
        return counted

    def _append(self, folder: str, rows: "DataFrame", before: Found, stored: Stored) -> None:
        # As `before` saw it: a switch since then has to be a conflict.
        table = self._commits.opened(folder)
        if table is None:
            delta_files.begin(folder, rows, stored, before.number + 1)
        else:
            delta_files.write(table, rows, "append", stored, before.number + 1)

    def _merge(self, folder: str, rows: "DataFrame", before: Found, stored: Stored) -> None:
        table = self._commits.opened(folder)
        if table is None or before.stored is None:
            self._append(folder, delta_write.first(rows), before, stored)
        elif delta_files.size(table) < MADE_ANEW_BYTES and (
            mirror := delta_files.plain(table, folder, rows.sparkSession)
        ):
            delta_files.write(table, delta_write.merged(mirror, rows), "overwrite", stored, before.number + 1)
        else:
            from sinks import delta_marks

            delta_marks.merge(table, folder, rows, stored, before.number + 1)

    def _tidy(self, folder: str, spark: "SparkSession") -> None:
        from sinks import delta_generations

        now = time.monotonic()
        last, unused = self._tidied.setdefault(folder, (now, set()))
        if self._beside is None and now - last >= TIDY_S:
            self._tidied[folder] = now, delta_generations.tidy(spark, self._commits, folder, unused)

    def _unmoved(self, folder: str, advance: Advance, stored: Stored | None, writer: str) -> None:
        left = self._left[folder]
        if stored != left:
            ours = stored is None or stored.writer == writer
            raise mismatch(advance.table, _position(left), _position(stored), ours=ours)

    def _rows(self, batch: Batch, advance: Advance, stored: Stored | None, lacking: bool) -> "DataFrame":
        """What to merge, completed where changes lack values."""
        from sinks import delta_partial

        changes = delta_write.unseen(batch.changes, advance, stored).where("offset IS NOT NULL")
        if lacking:
            folder = None if stored is None else self.folder(advance.table, "mirror")
            return delta_partial.completed(changes, advance.table, folder, self.name)
        return delta_write.changed(changes, advance.table)

    def _misfits(self, table: Table, kind: str) -> bool:
        found = self._commits.table(self.folder(table, kind))
        return found is not None and misfits(found, table)


def _position(stored: Stored | None) -> Position | None:
    return stored.position if stored else None


def _oldest(kinds: Sequence[Stored | None]) -> Stored | None:
    """Where reading has to start so that neither the log of changes, if it is asked for, nor the mirror misses one."""
    changes, mirror = kinds[0], kinds[-1]
    if changes is None or mirror is None:
        return None
    if changes.position.topic_id != mirror.position.topic_id:
        return mirror
    offsets = tuple(map(min, changes.position.offsets, mirror.position.offsets))
    return replace(mirror, position=Position(mirror.position.topic_id, offsets))
