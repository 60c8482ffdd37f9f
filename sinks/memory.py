"""A dict per table: the reference that the other sinks are tested against. For tests only, it fills the driver."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cdc.change import Advance, Applied, Form, Stored, Table, new_generation
from cdc.report import Report, Row
from cdc.sink import UNKNOWN, Batch, Refused, check, level, stored_after, wait_for

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class Memory:
    """Views as {table: {id: document text}}."""

    form: Form = "documents"
    whole = False

    def __init__(self, name: str, generation: str | None = None) -> None:
        self.name, self.generation = name, generation
        self.views: dict[str, dict[str, str]] = {}
        self.stored: dict[str, Stored] = {}
        self.others: dict[str, Memory] = {}
        """By the name of the generation."""

    def refusals(self, table: Table) -> list[str]:  # noqa: ARG002  # a document may have any names
        return []

    def prepare(self, table: Table) -> None:
        self.views.setdefault(table.qualified, {})

    def position(self, table: Table) -> Stored | None:
        return self.stored.get(table.qualified)

    def apply(self, batch: Batch) -> Mapping[str, Applied]:
        found = [row.asDict(recursive=True) for row in batch.changes.collect()]
        # Looked at once the rows are there: from here on nobody else can come in between.
        pending = [a for a in batch.advances if check(a, self.position(a.table), batch.writer)]
        planned = {
            a.table.qualified: self._plan(a, [row for row in found if row["topic"] == a.table.topic]) for a in pending
        }
        for advance in pending:
            name = advance.table.qualified
            view, said = planned[name]
            self.views[name] = view
            self.stored[name] = stored_after(advance, self.stored.get(name), said, batch.writer, self.generation)
        return {name: said.applied for name, (_, said) in planned.items()}

    def clear(self, table: Table) -> None:
        self.views[table.qualified] = {}
        self.stored.pop(table.qualified, None)

    def beside(self, names: Mapping[str, str]) -> "Memory":
        (name,) = set(names.values())
        return self.others.setdefault(name, Memory(self.name, name))

    def require_room(self, tables: Sequence[Table]) -> None:
        """There is."""

    def promote(self, tables: Sequence[Table], names: Mapping[str, str]) -> Mapping[str, str]:
        if self.others.keys().isdisjoint(names.values()):
            return {}
        wait_for(lambda: level(self, self.beside(names), tables), self.name)
        kept, other = new_generation(), self.others.pop(next(iter(names.values())))
        for table in tables:
            name = table.qualified
            self.views[name], other.views[name] = other.views[name], self.views[name]
            ours, theirs = self.stored.pop(name, None), other.stored.pop(name, None)
            self.stored |= {name: theirs} if theirs else {}
            other.stored |= {name: ours} if ours else {}
        other.generation = None
        self.others[kept] = other
        return {table.qualified: kept for table in tables}

    def generations(self, table: Table) -> list[str]:
        return ["", *(name for name, other in self.others.items() if table.qualified in other.views)]

    def sweep(self, tables: Sequence[Table], keep: Mapping[str, str]) -> None:
        for table in tables:
            for name, other in self.others.items():
                if keep.get(table.qualified) != name:
                    other.views.pop(table.qualified, None)
                    other.stored.pop(table.qualified, None)

    def _plan(self, advance: Advance, rows: list[dict[str, Any]]) -> tuple[dict[str, str], Report]:
        table = advance.table
        view, said = dict(self.views[table.qualified]), Report(topic=table.topic)
        for told in rows:
            row = Row._make(map(told.get, Row._fields))
            if not row.book(said):
                continue
            if not advance.repairs and (row.offset or 0) < advance.start_offsets[told["partition"]]:
                said.stale += 1
                continue
            document = row.document if row.kept is None else row.complete(view.get(row.id) if row.asks_view else None)
            if row.kept is not None and document is None:
                said.refused.append((row.id, UNKNOWN))
            elif document is None:
                view.pop(row.id, None)
                said.deleted += 1
            else:
                view[row.id] = document
                said.written += 1
        if said.refused:
            raise Refused({(table.topic, key): reason for key, reason in said.refused}, self.name)
        return view, said

    def scan(self, table: Table, spark: "SparkSession", ids: Sequence[str] | None = None) -> "DataFrame":
        held = self.views.get(table.qualified, {})
        rows = list(held.items()) if ids is None else [(key, held[key]) for key in ids if key in held]
        return spark.createDataFrame(rows, "id string, document string")

    def close(self) -> None:
        """Nothing is open."""

    def rows(self, table: Table) -> dict[str, object]:
        """The view, parsed."""
        return {key: json.loads(text) for key, text in self.views[table.qualified].items()}
