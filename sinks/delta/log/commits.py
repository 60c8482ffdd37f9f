"""Our commits in a Delta table: each has the checkpoint that it leads to."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from cdc.model.position import ViewCheckpoint
from cdc.sinks.delta.log import history
from cdc.sinks.delta.log.history import Commit, Standing
from cdc.sinks.delta.log.table_log import TableLog, TableState

SEARCHED_VERSIONS = 50
"""Each takes some milliseconds, in which the stream waits."""


@dataclass(frozen=True)
class LastCommit:
    """Our last commit in one Delta table.

    trouble: why the checkpoint isn't true of the table's rows (`history`); empty when it is.
    """

    checkpoint: ViewCheckpoint | None
    trouble: str = ""


class Commits:
    """The logs of the Delta tables of one sink by their folders, read once and kept up to date."""

    def __init__(self) -> None:
        self._logs: dict[str, TableLog] = {}

    def close(self) -> None:
        """Drop the logs; each is read again when it is asked for."""
        self._logs.clear()

    def log(self, folder: str) -> TableLog:
        """Return the log of a table, which may not exist."""
        return self._logs.setdefault(folder, TableLog(folder))

    def state(self, folder: str) -> TableState | None:
        """Return a table in its newest version; None where there is no table.

        Raises SinkUnavailable where that can't be read.
        """
        return self.log(folder).refresh()

    def last_commit(self, folder: str) -> LastCommit:
        """Find our last commit; commits of others (OPTIMIZE, VACUUM, RESTORE) may be above it.

        `state` has been read then.
        """
        log = self.log(folder)
        if log.refresh() is None:
            return LastCommit(None)
        if standing := self.standing(folder, log.history()):
            return LastCommit(standing.checkpoint, standing.trouble)
        return LastCommit(None, "its log has lost the commit that held its position")

    def standing(self, folder: str, commits: Iterable[Commit]) -> Standing | None:
        """Find the position of a view by some commits of its table; see `history.standing`."""
        log = self.log(folder)
        return history.standing(commits, log.changed_rows, partial(_restored_version, log))


def _restored_version(log: TableLog, version: int) -> int | None:
    """Find the newest version below one that has the same files with the same marks; None where it is
    further back than SEARCHED_VERSIONS, or than the log.
    """
    restored = log.state_at(version)
    if restored is None:
        return None
    for earlier in range(version - 1, max(version - SEARCHED_VERSIONS, 0) - 1, -1):
        candidate = log.state_at(earlier)
        if candidate is None:
            return None
        if _content(candidate) == _content(restored):
            return earlier
    return None


def _content(state: TableState) -> dict[str, object]:
    return {path: file.get("deletionVector") for path, file in state.files.items()}
