"""The Delta tables of a warehouse's views: where they are, whether they can be gone on with; made, emptied, mended."""

from collections.abc import Mapping
from pathlib import Path

from cdc.errors import SinkRejected, SinkUnavailable
from cdc.model.position import ViewCheckpoint
from cdc.model.table import Table
from cdc.sink.contract import SchemaMismatch
from sinks.delta.files import links
from sinks.delta.files.columns import features, misfits, refusals, schema
from sinks.delta.log import add_files
from sinks.delta.log.commits import Commits, Found
from sinks.delta.log.history import CLEARED
from sinks.delta.log.writer_fence import Fence

KINDS = ("changes", "mirror")


class Tables:
    """Those of one sink: `changes` and `mirror` of each view, or the mirror beside, of the generations of these names.

    The log of changes has one generation: a compacted topic couldn't give it back.
    """

    def __init__(self, sink: str, path: str, beside: Mapping[str, str] | None) -> None:
        self.sink, self._beside = sink, beside
        whole = path.rstrip("/")
        # Executors have a working directory of their own.
        self.path = whole if links.absolute(whole) else str(Path(whole).absolute())
        self.kinds = KINDS if beside is None else KINDS[-1:]
        self.commits, self.fence = Commits(), Fence()

    def folder(self, table: Table, kind: str) -> str:
        generation = f"@{self._beside[table.qualified]}" if self._beside and kind == "mirror" else ""
        return f"{self.path}/{table.qualified}/{kind}{generation}"

    def folders(self, table: Table) -> dict[str, str]:
        """By kind."""
        return {kind: self.folder(table, kind) for kind in self.kinds}

    def generation(self, table: Table) -> str | None:
        """The name of the one that is written, when it isn't the live one."""
        return self._beside[table.qualified] if self._beside else None

    def make(self, table: Table, kind: str) -> None:
        """A Delta table of the columns that the source's has, if there is none. Raises SchemaMismatch."""
        folder = self.folder(table, kind)
        self.make_folder(folder)
        held = self.commits.table(folder)
        if held is None:
            try:
                add_files.create(folder, [], schema(table, kind), CLEARED, 1)
            except SinkUnavailable:
                # Another process may have made it.
                if self.commits.table(folder) is None:
                    raise
        elif misfits(held, table):
            if not self.is_nothing(folder):
                raise SchemaMismatch(table, self.sink)
            self.empty(table, kind, CLEARED)
        if (found := self.commits.found(folder)).trouble:
            raise self._untrue(table, kind, found)

    def make_folder(self, folder: str) -> None:
        try:
            if "://" not in folder:
                Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SinkRejected(
                f"The warehouse folder {self.path} can't be written: {error.strerror}.",
                hint="see the sink's path",
            ) from None

    def is_nothing(self, folder: str) -> bool:
        """Whether a Delta table has neither rows nor a position."""
        found, held = self.commits.found(folder), self.commits.opened(folder)
        return not (found.stored or found.trouble or (held and add_files.paths(held)))

    def standing(self, table: Table, kind: str) -> Found:
        """Our last commit. Raises SchemaMismatch when there is one, and it can't be told which."""
        found = self.commits.found(self.folder(table, kind))
        if found.trouble and found.stored is None:
            raise self._untrue(table, kind, found)
        return found

    def clear(self, table: Table) -> None:
        """Empty the mirror in one commit. The log of changes stays, unless its columns can't take the table's."""
        if refusals(table):
            return
        for kind, folder in self.folders(table).items():
            held = self.commits.table(folder)
            if held is None:
                continue
            fits = not misfits(held, table)
            if fits and (kind == "changes" or self.is_nothing(folder)):
                continue
            try:
                self.empty(table, kind, CLEARED)
            except SinkUnavailable:
                # A running stream that finds a view without a position clears it as well; either will do.
                if self.commits.found(folder).stored is not None:
                    raise

    def mend_changes(self, table: Table) -> None:
        """Make a log of changes go on that can't: beside a mirror that is made again, nothing else could.

        One whose columns can't take the table's begins again, for the events that come after those it holds; what it
        held is in its earlier versions, until VACUUM. Of one that somebody else has changed the rows stay as they are.
        """
        folder = self.folder(table, "changes")
        found = self.commits.found(folder)
        held = self.commits.opened(folder)
        if held is None:
            return
        if misfits(held, table) or (found.trouble and found.stored is None):
            self.empty(table, "changes", found.stored or CLEARED)
        elif found.trouble and found.stored:
            add_files.commit(held, [], "append", held.schema(), found.stored, found.number + 1)

    def empty(self, table: Table, kind: str, stored: ViewCheckpoint) -> None:
        """Take all rows out of a Delta table and give it the columns of the source's, in one commit."""
        folder, columns = self.folder(table, kind), schema(table, kind)
        self.fence.forget(folder)
        found, held = self.commits.found(folder), self.commits.opened(folder)
        if held is None:
            return
        if needed := features(columns) - add_files.features(held):
            from pyspark.sql import SparkSession

            from sinks.delta.log import spark_generations

            spark_generations.ask(SparkSession.active(), folder, needed)
            held.update_incremental()
        add_files.commit(held, [], "overwrite", columns, stored, found.number + 1)

    def _untrue(self, table: Table, kind: str, found: Found) -> SchemaMismatch:
        """The mirror has to be made again."""
        folder = self.folder(table, kind)
        return SchemaMismatch(table, self.sink, f"The Delta table {folder} can't be gone on with: {found.trouble}.")
