"""The reference sink that the others are tested against: a dict per table.

For tests only, it fills the driver.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cdc.codec.forms import Documents
from cdc.model.generation import new_generation
from cdc.model.outcome import Advance
from cdc.model.position import ViewCheckpoint
from cdc.model.table import Table
from cdc.sink.contract import Batch, Outcome
from cdc.sink.fencing import checkpoint_after, must_apply
from cdc.sink.lane import ChunkLimits, FoldedRow, Part, Verdicts, Writer
from cdc.sink.lane_run import run_in_process
from cdc.sink.promotion import is_caught_up, wait_until_caught_up
from cdc.sink.scan import SCANNED

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@dataclass
class MemoryWriter(Writer):
    """Writes to copies of views, by topic."""

    views: dict[str, dict[str, str]]
    form = Documents()
    limits = ChunkLimits(100, 1_000_000)

    def __post_init__(self) -> None:
        self.views = {topic: dict(view) for topic, view in self.views.items()}

    def start_offset(self, advance: Advance, partition: int) -> int:
        return advance.start_offsets[partition]

    def read_stored(self, part: Part, rows: Sequence[FoldedRow]) -> Mapping[str, bytes]:
        view = self.views[part.topic]
        return {row.id: view[row.id].encode() for row in rows if row.id in view}

    def write(self, parts: Sequence[Part]) -> Sequence[Verdicts]:
        for part in parts:
            view = self.views[part.topic]
            for row in part.rows.values():
                if row.value is None:
                    view.pop(row.id, None)
                else:
                    view[row.id] = row.value.decode()
        return [Verdicts()] * len(parts)


class Memory:
    """Views as {table: {id: document text}}."""

    promotes_all_tables = False

    def __init__(self, name: str, generation: str | None = None) -> None:
        self.name = name
        self.generation = generation
        self.views: dict[str, dict[str, str]] = {}
        self.stored: dict[str, ViewCheckpoint] = {}
        self.generations_by_name: dict[str, Memory] = {}
        """By the name of the generation."""

    def refusals(self, table: Table) -> list[str]:  # noqa: ARG002  # a document may have any names
        return []

    def prepare(self, table: Table) -> None:
        self.views.setdefault(table.qualified, {})

    def position(self, table: Table) -> ViewCheckpoint | None:
        return self.stored.get(table.qualified)

    def apply(self, batch: Batch) -> Outcome:
        """Apply the batch to copies, then put them in place together with their positions."""
        writer = MemoryWriter(
            {advance.table.topic: self.views[advance.table.qualified] for advance in batch.advances}
        )
        outcome = run_in_process(batch.lane(writer), batch.records, self.name)
        # Positions are compared after the rows are made: from here on no other writer can come in
        # between.
        pending = [a for a in batch.advances if must_apply(a, self.position(a.table), batch.writer)]
        for advance in pending:
            name = advance.table.qualified
            self.views[name] = writer.views[advance.table.topic]
            applied = outcome.applied[name]
            self.stored[name] = checkpoint_after(
                advance, self.stored.get(name), applied, batch.writer, self.generation
            )
        return replace(
            outcome,
            applied={a.table.qualified: outcome.applied[a.table.qualified] for a in pending},
        )

    def clear(self, table: Table) -> None:
        self.views[table.qualified] = {}
        self.stored.pop(table.qualified, None)

    def for_generation(self, names: Mapping[str, str]) -> "Memory":
        (name,) = set(names.values())
        return self.generations_by_name.setdefault(name, Memory(self.name, name))

    def check_capacity(self, tables: Sequence[Table]) -> None:
        """There is."""

    def promote(self, tables: Sequence[Table], names: Mapping[str, str]) -> Mapping[str, str]:
        """Exchange views and checkpoints with the generation."""
        if self.generations_by_name.keys().isdisjoint(names.values()):
            return {}
        wait_until_caught_up(
            lambda: is_caught_up(self, self.for_generation(names), tables), self.name, tables
        )
        retained_name = new_generation()
        candidate = self.generations_by_name.pop(next(iter(names.values())))
        for table in tables:
            table_name = table.qualified
            self.views[table_name], candidate.views[table_name] = (
                candidate.views[table_name],
                self.views[table_name],
            )
            live_checkpoint = self.stored.pop(table_name, None)
            candidate_checkpoint = candidate.stored.pop(table_name, None)
            self.stored |= {table_name: candidate_checkpoint} if candidate_checkpoint else {}
            candidate.stored |= {table_name: live_checkpoint} if live_checkpoint else {}
        candidate.generation = None
        self.generations_by_name[retained_name] = candidate
        return {table.qualified: retained_name for table in tables}

    def generations(self, table: Table) -> list[str]:
        """List the live generation, "", and the others."""
        return [
            "",
            *(
                name
                for name, generation in self.generations_by_name.items()
                if table.qualified in generation.views
            ),
        ]

    def remains(self, tables: Sequence[Table]) -> list[str]:
        stores = {
            "": self,
            **{f"@{name}": generation for name, generation in self.generations_by_name.items()},
        }
        return [
            f"view {table.qualified}{suffix}"
            for suffix, store in stores.items()
            for table in tables
            if table.qualified in store.views
        ]

    def remove(self, tables: Sequence[Table]) -> None:
        for store in (self, *self.generations_by_name.values()):
            for table in tables:
                store.views.pop(table.qualified, None)
                store.stored.pop(table.qualified, None)

    def drop_unreferenced(self, tables: Sequence[Table], keep: Mapping[str, str]) -> None:
        for table in tables:
            for name, generation in self.generations_by_name.items():
                if keep.get(table.qualified) != name:
                    generation.views.pop(table.qualified, None)
                    generation.stored.pop(table.qualified, None)

    def scan(
        self, table: Table, spark: "SparkSession", ids: Sequence[str] | None = None
    ) -> "DataFrame":
        view = self.views.get(table.qualified, {})
        rows = (
            list(view.items()) if ids is None else [(key, view[key]) for key in ids if key in view]
        )
        return spark.createDataFrame(rows, SCANNED)

    def close(self) -> None:
        """Nothing is open."""

    def rows(self, table: Table) -> dict[str, object]:
        return {key: json.loads(text) for key, text in self.views[table.qualified].items()}
