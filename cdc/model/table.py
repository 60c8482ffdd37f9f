"""A captured table and the ids of its rows, as plain data. Standard library only."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from cdc.model.mask import Mask

CONTROL_TABLES = ("cdc.heartbeat", "cdc.truncation", "cdc.ddl", "cdc.signal")
"""The pipeline's own tables in the source, captured like any other."""


@dataclass(frozen=True)
class Shape:
    """What the JSON of a view's member is made of: an object or a plain value, or a list of them.

    members  the columns of the object; of a plain value, which has no name, the one of its type
    """

    members: tuple["Column", ...]
    is_object: bool
    many: bool


@dataclass(frozen=True)
class Column:
    """One captured column, or a member of a view; `type` is Postgres' text for it, as `format_type`
    prints it: numeric(10,2).

    name  as views have it: the source's name, unless the sink's `rename` gives another
    """

    name: str
    type: str
    shape: Shape | None = None
    """None for what a captured table has: JSON of which nothing is known, and all other types."""
    mask: Mask | None = None
    """What the log has in place of the values."""
    renamed_from: str | None = None
    """The source's name, where a sink has another."""

    @property
    def source_name(self) -> str:
        return self.name if self.renamed_from is None else self.renamed_from


@dataclass(frozen=True)
class IndexOptions:
    """What the pipeline file says about a search index: by column, and for the index as a whole."""

    fields: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Projection:
    """The columns of a captured table that a sink has, beside its key: `columns`, or where that is None all
    but `exclude`.

    rename  by column: the name that the sink has for it
    where   the condition of the rows that it has, as the pipeline file has it; None for all rows
    form    how it keeps a row; None for the sink's usual way
    """

    columns: tuple[str, ...] | None = None
    exclude: tuple[str, ...] = ()
    rename: Mapping[str, str] = field(default_factory=dict)
    where: str | None = None
    form: str | None = None

    @property
    def named(self) -> tuple[str, ...]:
        """All columns that the pipeline file names."""
        return (*(self.columns or ()), *self.exclude, *self.rename)

    def keeps(self, column: str) -> bool:
        """Whether the sink has a column that isn't of the key."""
        return column not in self.exclude and (self.columns is None or column in self.columns)

    def shape(self, key: Sequence[str]) -> str:
        """The same text for the same columns and rows, in whichever order the file has the columns, with
        or without columns of the key.
        """
        kept = None if self.columns is None else sorted({*self.columns} - {*key})
        parts: list[object] = [kept, sorted(self.exclude)]
        # Views that are older than these two have stored a text without them.
        if self.rename or self.where:
            parts += [sorted(self.rename.items()), self.where]
        if self.form:
            parts.append(self.form)
        text = json.dumps(parts)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


class Expression(Protocol):
    """A condition on the values of a row, in the document form: `cdc.scalar.operators.Term`."""

    @property
    def evaluate(self) -> Callable[[Mapping[str, Any]], Any]: ...


@dataclass(frozen=True)
class RowCondition:
    """Which rows of a captured table a sink has: those for which it is true.

    sql         over the columns of the table
    expression  the same for executors
    columns     those that it reads, whether the sink has them or not
    """

    sql: str
    expression: Expression
    columns: tuple[Column, ...]


@dataclass(frozen=True)
class Derivation:
    """What the rows of a view are made of.

    query   the same rows as Postgres selects them, with the columns of the view's table
    clock   the setting of a session from which the query takes the time; None if it needs none
    tables  the captured tables that it reads: their names and topics
    sinks   names of the sinks that hold the view
    closes  whether rows whose `final` is true change no more: the query leaves them out
    events  the captured tables that it reads whose rows are events
    """

    query: str
    tables: tuple[tuple[str, str], ...]
    sinks: tuple[str, ...]
    clock: str | None = None
    closes: bool = False
    events: tuple["Table", ...] = ()


@dataclass(frozen=True)
class RowEstimate:
    """What Postgres takes a table for without reading it: how many rows there are, and by column how
    many bytes a value takes there on average.
    """

    rows: int
    widths: Mapping[str, int]


@dataclass(frozen=True)
class Table:
    """A captured table, or a view of several; `key` names the columns that identify a row, in the
    order of the primary key. A row's key in the log has these names, whatever a sink calls them.
    """

    schema: str
    name: str
    columns: tuple[Column, ...]
    key: tuple[str, ...]
    topic: str
    reshaped: bool = False
    """Whether the topic holds rows with columns that the table has lost; these columns are left
    out.
    """
    index: IndexOptions = field(default=IndexOptions(), hash=False)
    derivation: Derivation | None = None
    """None for a captured table."""
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict, compare=False, repr=False)
    """The labels of each column that has an enum type."""
    has_children: bool = field(default=False, compare=False, repr=False)
    """Whether other tables may inherit from it. The log has their rows under their own names, so
    `SELECT ... FROM ONLY` gives this table's rows.
    """
    events: bool = False
    """Whether the rows are events: views keep those that the table has no longer."""
    unlisted_by: tuple[str, ...] = field(default=(), compare=False, repr=False)
    """The sinks that have no view of a captured table."""
    projections: Mapping[str, Projection] = field(default_factory=dict, compare=False, repr=False)
    """By sink: what it has of a captured table, of sinks that don't have all of it."""
    conditions: Mapping[str, RowCondition] = field(default_factory=dict, compare=False, repr=False)
    """By sink: which rows of a captured table it has, of sinks that don't have all."""
    where: RowCondition | None = None
    """Which rows a sink's view has; None for all rows, and for a table that is no sink's."""
    misnamed: Mapping[str, tuple[str, str]] = field(default_factory=dict, compare=False, repr=False)
    """By sink whose list of columns doesn't fit the table: what is wrong, and a hint."""
    shape: str = ""
    """What a sink's view stores beside its position, to be known for one of these columns and rows. Empty for
    all of a table."""

    def __hash__(self) -> int:
        """Hash once: a table is looked up for each of its rows."""
        if (number := self.__dict__.get("_hash")) is None:
            number = hash((self.qualified, self.columns, self.key, self.topic, self.reshaped))
            object.__setattr__(self, "_hash", number)
        return int(number)

    def __getstate__(self) -> dict[str, Any]:
        # Another process has other hashes of texts.
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}

    @property
    def qualified(self) -> str:
        """The name with its schema: public.orders."""
        return f"{self.schema}.{self.name}"

    def is_in(self, sink: str) -> bool:
        """Whether a sink has a view of the table. Every part of the pipeline asks here."""
        if self.derivation is None:
            return sink not in self.unlisted_by
        return sink in self.derivation.sinks

    def for_sink(self, sink: str) -> "Table":
        """The table with the columns that a sink has, by its names for them, and the condition of its rows."""
        projection = self.projections.get(sink)
        if projection is None or self.shape:
            return self
        names = {
            column.name: projection.rename.get(column.name, column.name)
            for column in self.columns
            if column.name in self.key or projection.keeps(column.name)
        }
        columns = tuple(
            column
            if names[column.name] == column.name
            else replace(column, name=names[column.name], renamed_from=column.name)
            for column in self.columns
            if column.name in names
        )
        fields = {
            names[name]: options for name, options in self.index.fields.items() if name in names
        }
        return replace(
            self,
            columns=columns,
            index=replace(self.index, fields=fields),
            where=self.conditions.get(sink),
            shape=projection.shape(self.key),
            # The topic has the other columns.
            reshaped=True,
        )

    def column(self, name: str) -> Column:
        """The column that the source has by that name. Raises StopIteration if the table has none."""
        return next(column for column in self.columns if column.source_name == name)


def row_id(values: list[Any]) -> str:
    """The id of a row in every view: the text of its key column, or a JSON array of several.

    The twin of `TableCodec.row_id`, for clients and tests. Takes the values of the topic's key.
    """
    if len(values) == 1:
        value = values[0]
        return value if isinstance(value, str) else json.dumps(value)
    return json.dumps(values, separators=(",", ":"), ensure_ascii=False)
