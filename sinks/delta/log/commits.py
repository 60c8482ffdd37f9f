"""Our commits in a Delta table: each carries the position that it leads to, and a number that orders it among ours."""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deltalake

from cdc.model.position import ViewCheckpoint
from sinks.delta.files.failures import conflicting, contended
from sinks.delta.log import history
from sinks.delta.log.history import Commit, Standing

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

APPLICATION = "cdc"
"""The name under which our commits are numbered in a Delta table (its `txn` actions)."""
METADATA = "spark.databricks.delta.commitInfo.userMetadata"
NUMBER = ("spark.databricks.delta.write.txnAppId", "spark.databricks.delta.write.txnVersion")
_SETTINGS = threading.Lock()


@dataclass(frozen=True)
class Found:
    """What the last commit of ours says of one Delta table; number orders our commits.

    trouble: why that isn't true of the rows that are there (`history`); empty when it is.
    """

    stored: ViewCheckpoint | None
    number: int
    trouble: str = ""


class Commits:
    """The Delta tables of one sink, opened once and kept up to date."""

    def __init__(self) -> None:
        self._open: dict[str, deltalake.DeltaTable] = {}

    def close(self) -> None:
        self._open.clear()

    def found(self, folder: str) -> Found:
        """Our last commit; commits of others (OPTIMIZE, VACUUM, RESTORE) may lie above it."""
        for depth in (1, 100, None):
            told = self.history(folder, depth)
            if not told:
                return Found(None, 0)
            number = self._open[folder].transaction_version(APPLICATION) or 0
            if standing := self.standing(folder, told):
                return Found(standing.stored, number, standing.trouble)
        return Found(None, number, "its log has lost the commit that held its position")

    def standing(self, folder: str, commits: Sequence[Commit]) -> Standing | None:
        """See `history.standing`, of a table's own log."""
        return history.standing(commits, partial(_changed, folder), partial(_restored, folder))

    def history(self, folder: str, depth: int | None = None) -> list[dict[str, Any]]:
        """The last commits of a table, the newest first; the table is left open at that one. Empty: there is none.

        deltalake tells what the log has by now, and numbers it as if it ended where the table was opened. A commit in
        between would lend its position to files that lack its rows (delta-rs issue 4488).
        """
        while table := self.table(folder):
            version, told = table.version(), table.history(depth)
            if self.table(folder) is table and table.version() == version:
                return told
        return []

    def opened(self, folder: str) -> deltalake.DeltaTable | None:
        """The table as the last `found` saw it."""
        return self._open.get(folder)

    def table(self, folder: str) -> deltalake.DeltaTable | None:
        if folder in self._open:
            try:
                self._open[folder].update_incremental()
                return self._open[folder]
            except deltalake.exceptions.DeltaError:
                # Its log isn't there any more: removed, or removed and made anew.
                self._open.pop(folder)
        try:
            self._open[folder] = deltalake.DeltaTable(folder)
        except deltalake.exceptions.TableNotFoundError:
            return None
        return self._open[folder]


@contextmanager
def numbered(spark: "SparkSession", stored: ViewCheckpoint, number: int) -> Iterator[None]:
    """Put the position and our number into the commits made inside.

    Session settings, because Delta's transactions take no options; so one table is written this way at a time.
    """
    import delta.exceptions  # noqa: F401  # gives conflicts classes of their own
    from pyspark.errors import PySparkException

    settings = {METADATA: stored.to_json(), NUMBER[0]: APPLICATION, NUMBER[1]: str(number)}
    with _SETTINGS:
        for name, value in settings.items():
            spark.conf.set(name, value)
        try:
            yield
        except PySparkException as error:
            if not conflicting(error):
                raise
            raise contended() from None
        finally:
            for name in settings:
                spark.conf.unset(name)


def _changed(folder: str, version: int) -> bool:
    """Whether a commit brought or removed rows; one whose own file is gone may have."""
    import pyarrow.fs

    files, root = pyarrow.fs.FileSystem.from_uri(folder if "://" in folder else str(Path(folder).absolute()))
    try:
        with files.open_input_stream(f"{root}/_delta_log/{version:020}.json") as log:
            actions = [json.loads(line) for line in log.read().splitlines() if line.strip()]
    except FileNotFoundError:
        return True
    return any(action[of].get("dataChange", True) for action in actions for of in ("add", "remove") if of in action)


def _restored(folder: str, version: int) -> int | None:
    """The newest version below one that has the same files; None where marks may tell them apart, or there is none."""
    from sinks.delta.log import add_files

    held = deltalake.DeltaTable(folder, version=version)
    if not add_files.unmarked(held):
        return None
    files = sorted(add_files.paths(held))
    for earlier in range(version - 1, -1, -1):
        try:
            before = deltalake.DeltaTable(folder, version=earlier)
        except deltalake.exceptions.DeltaError:
            return None
        if add_files.unmarked(before) and sorted(add_files.paths(before)) == files:
            return earlier
    return None
