"""What a destination may offer beside the contract, see `cdc.sink.contract`: each capability is a
protocol, and a caller asks with `isinstance` whether a sink has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from cdc.model.finding import Finding
from cdc.model.position import ViewCheckpoint
from cdc.model.table import Table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@runtime_checkable
class PositionReader(Protocol):
    """A sink that can be asked about many views at once.

    Optional; `positions` falls back to one request a view.
    """

    def positions(self, tables: Sequence[Table]) -> Mapping[str, ViewCheckpoint | None]:
        """Read `Sink.position` of each table, by table name.

        Called as often as `position`, by the same callers.
        """


@runtime_checkable
class GroupScanner(Protocol):
    """A sink that can read many small views in one job. Optional; used by `verify`."""

    def scan_group(self, tables: Sequence[Table], spark: SparkSession) -> DataFrame:
        """Read `Sink.scan` of each table: table string (its name), id string, document string.

        A view that can't be read this way, or not to its end, has a row without an id, whatever
        else there is of it. The caller scans it by itself then, which raises the reason. That
        spoils none of the others.
        """


@runtime_checkable
class FitChecker(Protocol):
    """A sink that can tell whether a view was made for its table as it is now, without changing
    anything.
    """

    def require_fit(self, table: Table) -> None:
        """Raise SchemaMismatch as `prepare` would, of a view that is there.

        Called by `cdc plan`, once per table.
        """


@runtime_checkable
class Examinable(Protocol):
    """A sink that can say whether its server is fit for the pipeline: version, room, settings."""

    def examine(self, tables: Sequence[Table]) -> list[Finding]:
        """Read facts of the server and judge them; changes nothing.

        Called by `cdc doctor`, once for all tables. Needs no Spark.
        """


@runtime_checkable
class Archive(Protocol):
    """A sink that keeps every change, beside its views."""

    def archived(self, table: Table) -> ViewCheckpoint | None:
        """Read how far its log of a table's changes has got; None when there is none yet.

        Called when a plan is loaded, to look for changes that Kafka removed before they were
        archived.
        """
