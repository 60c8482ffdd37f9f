"""A dict per table: the reference that the other sinks are tested against. For tests only, it fills the driver."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from cdc.change import Applied, Form, Stored, Table
from cdc.sink import Batch, check, stored_after

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class Memory:
    """Views as {table: {id: document text}}."""

    form: Form = "documents"

    def __init__(self, name: str) -> None:
        self.name = name
        self.views: dict[str, dict[str, str]] = {}
        self.stored: dict[str, Stored] = {}

    def prepare(self, table: Table) -> None:
        self.views.setdefault(table.qualified, {})

    def position(self, table: Table) -> Stored | None:
        return self.stored.get(table.qualified)

    def apply(self, batch: Batch) -> Mapping[str, Applied]:
        pending = [a for a in batch.advances if check(a, self.position(a.table), batch.writer)]
        rows = batch.changes.collect() if pending else []
        result = {}
        for advance in pending:
            applied = Applied()
            view = self.views[advance.table.qualified]
            for row in (row for row in rows if row["topic"] == advance.table.topic):
                if row["document"] is None:
                    view.pop(row["id"], None)
                    applied.deleted += 1
                else:
                    view[row["id"]] = row["document"]
                    applied.written += 1
            name = advance.table.qualified
            self.stored[name] = stored_after(advance, self.stored.get(name), applied, batch.writer)
            result[name] = applied
        return result

    def scan(self, table: Table, spark: "SparkSession") -> "DataFrame":
        rows = list(self.views.get(table.qualified, {}).items())
        return spark.createDataFrame(rows, "id string, document string")

    def close(self) -> None:
        """Nothing is open."""

    def rows(self, table: Table) -> dict[str, object]:
        """The view, parsed."""
        return {key: json.loads(text) for key, text in self.views[table.qualified].items()}
