"""Our commits in a Delta table: each carries the position that it leads to, and a number that orders it among ours."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import deltalake

from cdc.change import Position, Stored
from cdc.errors import SinkRejected, SinkUnavailable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

APPLICATION = "cdc"
"""The name under which our commits are numbered in a Delta table (its `txn` actions)."""
METADATA = "spark.databricks.delta.commitInfo.userMetadata"
NUMBER = ("spark.databricks.delta.write.txnAppId", "spark.databricks.delta.write.txnVersion")
_SETTINGS = threading.Lock()
CLEARED = Stored(Position("", ()))
"""What a commit says that emptied a table: the view stands nowhere."""


@dataclass(frozen=True)
class Found:
    """What the last commit of ours says of one Delta table; number orders our commits."""

    stored: Stored | None
    number: int


class Commits:
    """The Delta tables of one sink, opened once and kept up to date."""

    def __init__(self, sink: str) -> None:
        self._sink = sink
        self._open: dict[str, deltalake.DeltaTable] = {}

    def close(self) -> None:
        self._open.clear()

    def found(self, folder: str) -> Found:
        """Our last commit; commits of others (OPTIMIZE, VACUUM) may lie above it."""
        number = 0
        for depth in (1, 100, None):
            told = self.history(folder, depth)
            if not told:
                return Found(None, 0)
            number = self._open[folder].transaction_version(APPLICATION) or 0
            for commit in told:
                text = commit.get("userMetadata") or ""
                if text.startswith(Stored.MARK):
                    stored = Stored.from_json(text)
                    return Found(None if stored.position == CLEARED.position else stored, number)
        if number == 0:
            return Found(None, 0)
        raise SinkRejected(
            f"The Delta table {folder} has lost the commit that held its position.",
            hint=f"cdc -p FILE rebuild {self._sink}",
            sink=self._sink,
        )

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
def numbered(spark: "SparkSession", stored: Stored, number: int) -> Iterator[None]:
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


def contended() -> SinkUnavailable:
    return SinkUnavailable(
        "Somebody else committed to the Delta table at the same time.", hint="nothing to do: it is tried again"
    )


def conflicting(error: Exception) -> bool:
    """Whether a commit failed because of another. In Python these errors have no class in common, but their module."""
    return type(error).__module__.startswith("delta.exceptions")
