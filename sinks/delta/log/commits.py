"""Our commits in a Delta table: each has the checkpoint that it leads to, and a number."""

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deltalake

from cdc.model.position import ViewCheckpoint
from cdc.sinks.delta.files.failures import (
    committing,
    reading,
    require_absent,
)
from cdc.sinks.delta.log import history
from cdc.sinks.delta.log.history import Commit, Standing

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

APPLICATION = "cdc"
"""The name under which our commits are numbered in a Delta table (its `txn` actions)."""
METADATA = "spark.databricks.delta.commitInfo.userMetadata"
NUMBER = ("spark.databricks.delta.write.txnAppId", "spark.databricks.delta.write.txnVersion")
_SETTINGS = threading.Lock()


@dataclass(frozen=True)
class LastCommit:
    """Our last commit in one Delta table.

    number: orders our commits; 0 where there is none.
    trouble: why the checkpoint isn't true of the table's rows (`history`); empty when it is.
    """

    checkpoint: ViewCheckpoint | None
    number: int
    trouble: str = ""


@dataclass(frozen=True)
class CommitInfo:
    """What a commit of ours stores besides its files.

    number: one more than that of our last commit. properties: texts by name, for the history.
    """

    checkpoint: ViewCheckpoint
    number: int
    properties: Mapping[str, str] = field(default_factory=dict)


class Commits:
    """The Delta tables of one sink by their folders, opened once and kept up to date."""

    def __init__(self) -> None:
        self._tables: dict[str, deltalake.DeltaTable] = {}

    def close(self) -> None:
        """Drop the opened tables; each is opened again when it is asked for."""
        self._tables.clear()

    def last_commit(self, folder: str) -> LastCommit:
        """Find our last commit; commits of others (OPTIMIZE, VACUUM, RESTORE) may lie above it."""
        for depth in (1, 100, None):
            commits = self.history(folder, depth)
            if not commits:
                return LastCommit(None, 0)
            number = self._tables[folder].transaction_version(APPLICATION) or 0
            if standing := self.standing(folder, commits):
                return LastCommit(standing.checkpoint, number, standing.trouble)
        return LastCommit(None, number, "its log has lost the commit that held its position")

    def standing(self, folder: str, commits: Sequence[Commit]) -> Standing | None:
        """Find where a view stands by some commits of a table; see `history.standing`."""
        return history.standing(
            commits, partial(_changed_rows, folder), partial(_restored_version, folder)
        )

    def history(self, folder: str, depth: int | None = None) -> list[dict[str, Any]]:
        """Return the last commits of a table, the newest first; empty where there is no table.

        The table is left open at the newest of them. deltalake reports what the log has by now, but
        numbers it as if it ended where the table was opened. A commit in between would give its
        position to files that lack its rows (delta-rs issue 4488). So the table is opened again
        until nothing came in between.
        """
        while table := self.table(folder):
            with reading(folder):
                version, commits = table.version(), table.history(depth)
            if self.table(folder) is table and table.version() == version:
                return commits
        return []

    def opened_table(self, folder: str) -> deltalake.DeltaTable | None:
        """Return the table in the version that `last_commit` has seen."""
        return self._tables.get(folder)

    def table(self, folder: str) -> deltalake.DeltaTable | None:
        """Return the table in its newest version; None where there is no table.

        Raises SinkUnavailable where that can't be read.
        """
        if folder in self._tables:
            try:
                with reading(folder):
                    self._tables[folder].update_incremental()
                return self._tables[folder]
            except deltalake.exceptions.DeltaError:
                # Its log has been removed, or removed and created again.
                self._tables.pop(folder)
        try:
            with reading(folder):
                self._tables[folder] = deltalake.DeltaTable(folder)
        except deltalake.exceptions.TableNotFoundError:
            require_absent(folder)
            return None
        return self._tables[folder]


@contextmanager
def number_commits(
    spark: "SparkSession", checkpoint: ViewCheckpoint, number: int
) -> Iterator[None]:
    """Put the checkpoint and our number into the commits that Spark makes inside the block.

    They go through settings of the session, because Delta's transactions take no options. So one
    table is written this way at a time, whatever the thread.

    Raises:
        SinkUnavailable: another commit came in between.
    """
    settings = {METADATA: checkpoint.to_json(), NUMBER[0]: APPLICATION, NUMBER[1]: str(number)}
    with _SETTINGS:
        for name, value in settings.items():
            spark.conf.set(name, value)
        try:
            with committing():
                yield
        finally:
            for name in settings:
                spark.conf.unset(name)


def _changed_rows(folder: str, version: int) -> bool:
    """Tell whether a commit added or removed rows; one whose own file is missing may have."""
    try:
        log = Path(folder, "_delta_log", f"{version:020}.json").read_bytes()
    except FileNotFoundError:
        return True
    actions = [json.loads(line) for line in log.splitlines() if line.strip()]
    file_actions = (
        action[kind] for action in actions for kind in ("add", "remove") if kind in action
    )
    return any(file_action.get("dataChange", True) for file_action in file_actions)


def _restored_version(folder: str, version: int) -> int | None:
    """Find the newest version below one that has the same files.

    None where deletion vectors may make a difference, or there is no such version.
    """
    from cdc.sinks.delta.log import add_files

    table = deltalake.DeltaTable(folder, version=version)
    if add_files.has_deleted_rows(table):
        return None
    files = sorted(add_files.paths(table))
    for earlier in range(version - 1, -1, -1):
        try:
            candidate = deltalake.DeltaTable(folder, version=earlier)
        except deltalake.exceptions.DeltaError:
            return None
        if (
            not add_files.has_deleted_rows(candidate)
            and sorted(add_files.paths(candidate)) == files
        ):
            return earlier
    return None
