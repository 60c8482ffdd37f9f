"""The plan of a view: a tree of tables, whose edges are joins. Plain data; can be pickled.

view    one document per row of its root table, or per group of its rows
node    a table in the tree; the same table may be at several nodes
join    the values that are equal in the parent's row and in the child's row
slot    the values of a table's rows that a join compares, other than the key: the state keeps an
        index of the rows by each slot, shared by all views
list    the rows of a `many` that belong to a parent, in their order: a document reads the first. A
        least or a greatest value is read from a list that is ordered by it
tally   numbers over them: a document reads no row for them
pane    a cut of time that no window cuts again: of hopping windows each has several
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, TypeVar

from cdc.config.view_settings import (
    ENDS,
    SCHEMA,
    AnyView,
    Function,
    IncludeSettings,
    Order,
    TimeKind,
)
from cdc.model.table import Column, Table
from cdc.scalar.amounts import INTEGERS
from cdc.scalar.operators import Term
from cdc.scalar.type_groups import DATE, TEXTS, TIMESTAMP, TIMESTAMPTZ, UUID, group

T = TypeVar("T")
Values = tuple[Term, ...]
"""Expressions over one row, which a join compares one by one."""
TEXT_FORMS = (TEXTS, UUID, DATE, TIMESTAMP, TIMESTAMPTZ)
"""Groups of types whose values are texts in documents."""
EXTREMES = ("min", "max")
LISTED = (*EXTREMES, *ENDS, "percentile_disc")
"""Aggregates that are the value of a row, which is found by its place in a list."""
WINDOW_START = "window_start"
WINDOW_END = "window_end"
"""Members of a document with a window."""
FINAL = "final"
"""Whether the window is closed: a member where windows close."""
OBJECT = "object"
"""The type of a member that is an object."""


@dataclass(frozen=True)
class TimeJoin:
    """Which of the rows with equal values belong to a row of the parent, by a time of each.

    as_of       the last one that isn't after the parent's time
    previous    the last one before it; of the same table and column, the last before its row
    next        the first one after it; of the same table and column, the first after its row
    during      all in an interval around it, both ends included

    parent, child   names of columns
    before, after   how much earlier and later the child may be, in microseconds; None: any time
    """

    kind: TimeKind
    parent: str
    child: str
    before: int | None
    after: int | None


@dataclass(frozen=True)
class Join:
    """Which rows of the child belong to a row of the parent: those with equal values, and of these
    the ones that `time` selects.

    NULL equals nothing, as in SQL.
    """

    parent: Values
    child: Values
    time: TimeJoin | None = None


NO_JOIN = Join((), ())
"""What leads to a root."""


@dataclass(frozen=True)
class Aggregate:
    """A number over rows, and the name of the member that shows it.

    argument  the column; "" for count(*)
    fraction  of percentile_disc, from 0 to 1
    filter    the condition of its FILTER
    where     the one that rows have to meet to count: the table's condition, and the FILTER's
    """

    name: str
    function: Function
    argument: str = ""
    fraction: float | None = None
    filter: Term | None = None
    where: Term | None = None

    def result_type(self, table: Table) -> str:
        """Name its Postgres type, over rows of a table."""
        if self.function in ("count", "distinct"):
            return "bigint"
        argument_type = table.column(self.argument).type
        if self.function in LISTED:
            return argument_type
        return "bigint" if argument_type in INTEGERS and self.function == "sum" else "numeric"


@dataclass(frozen=True)
class Closing:
    """When the windows of a view close, see `cdc.documents.closing`.

    view   the name of the view, whose clock it is
    after  how long after its beginning a window closes, in microseconds
    """

    view: str
    after: int


@dataclass(frozen=True)
class Listing:
    """Lists of a table's rows, one for each text of `values`: of those that meet `where`. The last of
    the values is the beginning of a pane where panes close.
    """

    values: Values
    where: Term | None
    order_by: tuple[Order, ...]
    closing: Closing | None = None


@dataclass(frozen=True)
class Tally:
    """Numbers over the rows of such lists: how many there are, of each column how many have a value,
    the sum of the columns in `summed`, and of those in `distinct` how many have which value.
    """

    values: Values
    where: Term | None
    columns: tuple[str, ...]
    summed: tuple[str, ...]
    distinct: tuple[str, ...] = ()
    closing: Closing | None = None


def tally_of(
    values: Values,
    where: Term | None,
    aggregates: Iterable[Aggregate],
    closing: Closing | None = None,
) -> Tally:
    """Return the numbers over the rows that meet a condition which these aggregates are made of."""
    parts = [(part.argument, part.function) for part in aggregates if part.argument]
    uncounted = ("distinct", *EXTREMES, *ENDS)
    columns = {name for name, function in parts if function not in uncounted}
    summed = {name for name, function in parts if function in ("sum", "avg")}
    distinct = {name for name, function in parts if function == "distinct"}
    return Tally(
        values,
        where,
        tuple(sorted(columns)),
        tuple(sorted(summed)),
        tuple(sorted(distinct)),
        closing,
    )


@dataclass(frozen=True)
class Totals:
    """Aggregates over the rows that have the same values, and what the state keeps for them.

    order_by    the column that says which row is the first; "" where none does
    closing     when the windows close whose panes these rows are; None where they are corrected for ever
    """

    values: Values
    aggregates: tuple[Aggregate, ...]
    order_by: str = ""
    closing: Closing | None = None

    def tally(self, where: Term | None) -> Tally:
        """Return the numbers that counts, sums and means are made of, of all with one condition."""
        parts = [part for part in self.aggregates if part.where == where]
        return tally_of(self.values, where, parts, self.closing)

    def listing(self, part: Aggregate) -> Listing:
        """Return the list in which the row is that has the value of an aggregate of `LISTED`."""
        column = self.order_by if part.function in ENDS else part.argument
        return Listing(
            self.values, part.where, (Order(column, part.function == "max"),), self.closing
        )

    @property
    def tallies(self) -> Sequence[Tally]:
        untallied = (*EXTREMES, *ENDS)
        return [
            self.tally(part.where) for part in self.aggregates if part.function not in untallied
        ]

    @property
    def listings(self) -> Sequence[Listing]:
        return [self.listing(part) for part in self.aggregates if part.function in LISTED]


@dataclass(frozen=True)
class Node:
    """A table at one place of a document.

    field       the member of the parent's document; the view's name for the root
    table       as Postgres describes it
    columns     the members that the document shows of each row, in this order
    join        `NO_JOIN` for the root
    many        whether the member is a list; else it is one object or null
    order_by    of a list; rows that are equal in it are ordered by their ids
    limit       the longest that a list gets
    flatten     the child's member whose value stands for the whole child, if any
    where       the condition that a row has to meet; others are as if they weren't there
    aggregates  numbers over all children that meet `where`, whatever the limit
    shows       whether the member itself is in the document; false where only aggregates are
    presence    of a pattern: whether there has to be such a row, or none (false); else the root has no
                document. None: there may be one
    meets       the condition that such a row has to meet
    """

    field: str
    table: Table
    columns: tuple[str, ...]
    join: Join = NO_JOIN
    many: bool = False
    order_by: tuple[Order, ...] = ()
    limit: int = 1000
    flatten: str | None = None
    where: Term | None = None
    aggregates: tuple[Aggregate, ...] = ()
    shows: bool = True
    presence: bool | None = None
    meets: Term | None = None
    children: tuple["Node", ...] = ()

    def walk(self) -> Iterator["Node"]:
        """Yield the node and all below it, parents first."""
        yield self
        for child in self.children:
            yield from child.walk()

    def paths(self) -> Iterator[tuple["Node", ...]]:
        """Yield the way from this node down to each node of its tree, itself first."""
        yield (self,)
        for child in self.children:
            for path in child.paths():
                yield (self, *path)

    @cached_property
    def totals(self) -> Totals | None:
        """What the state keeps for its aggregates; None where it has none. In a join in time, each parent
        has other rows: the state keeps nothing for them.
        """
        if self.time is not None or not self.aggregates:
            return None
        return Totals(self.join.child, self.aggregates)

    @cached_property
    def listing(self) -> Listing | None:
        """The list that its rows are read from, if any are shown; for a join in time, it is ordered by the time."""
        if self.is_root or (self.time is None and not (self.many and self.shows)):
            return None
        order_by = self.order_by if self.time is None else (Order(self.time.child),)
        return Listing(self.join.child, self.where, order_by)

    @cached_property
    def earlier(self) -> tuple["Node", ...]:
        """The rows of a pattern before this one, from the last one on."""
        for child in self.children:
            if child.presence:
                return (child, *child.earlier)
        return ()

    @cached_property
    def steps(self) -> Mapping[str, Sequence[int]]:
        """The steps of a pattern before its last row, in order: where their rows are in `earlier`, first row first."""
        places: dict[str, list[int]] = {}
        for place, node in reversed([*enumerate(self.earlier)]):
            places.setdefault(node.field, []).append(place)
        return places

    @property
    def absent(self) -> "Node | None":
        return next((child for child in self.children if child.presence is False), None)

    @property
    def is_root(self) -> bool:
        return self.join == NO_JOIN

    @property
    def time(self) -> TimeJoin | None:
        return self.join.time

    @property
    def time_join(self) -> TimeJoin:
        """The join in time that leads to it, of one that has it."""
        assert self.time is not None
        return self.time

    def is_same_time(self, parent: "Node") -> bool:
        """Whether its join in time is of one column of one table: then rows of one time follow each other by ids."""
        is_same_table = parent.table.qualified == self.table.qualified
        return is_same_table and self.time_join.parent == self.time_join.child

    @property
    def shown(self) -> Sequence[Column]:
        """The columns that its documents have, in the table's order; a root always has its key."""
        names = {*self.columns, *(self.table.key if self.is_root else ())}
        return [column for column in self.table.columns if column.name in names]

    @cached_property
    def parent_listing(self) -> Listing | None:
        """The list of the parent's rows by time, if it is a join in time: where a row of this table finds parents."""
        if self.time is None:
            return None
        return Listing(self.join.parent, None, (Order(self.time.parent),))

    @cached_property
    def has_zone(self) -> bool:
        """Whether the times of its join in time have a time zone: then their texts end with Z."""
        return group(self.table.column(self.time_join.child).type) == TIMESTAMPTZ

    @property
    def columns_in_use(self) -> frozenset[str]:
        conditions = [self.where, self.meets, *(part.filter for part in self.aggregates)]
        expressions = [condition for condition in conditions if condition]
        expressions += self.join.child
        times = [self.time.child] if self.time else []
        for child in self.children:
            expressions += child.join.parent
            times += [child.time.parent] if child.time else []
        return frozenset(
            [
                *self.table.key,
                *times,
                *self.columns,
                *(order.column for order in self.order_by),
                *(part.argument for part in self.aggregates if part.argument),
                *(name for expression in expressions for name in expression.columns),
            ]
        )


@dataclass(frozen=True)
class Window:
    """Windows of time, of `size` microseconds each; one begins at `start`, and one after each `every`.

    A row is in those with begin <= time < end. Only windows within the years 1 to 9999 count.
    """

    time: str
    """The column."""
    size: int
    every: int
    start: int

    def begins(self, pane: int) -> range:
        """Return where the windows begin that have the pane that begins there, in microseconds."""
        return range(pane - self.size + self.every, pane + 1, self.every)

    def panes(self, begin: int) -> range:
        """Return where the panes of the window begin that begins there."""
        return range(begin, begin + self.size, self.every)


@dataclass(frozen=True)
class Session:
    """Windows that last as long as rows follow each other: the next row is in the same one if it is at
    most `gap` microseconds later.

    A window begins with its first row, and ends with its last one.
    """

    time: str
    """The column."""
    gap: int


@dataclass(frozen=True, kw_only=True)
class Grouping(Totals):
    """Which rows of a table have a document together, and what it shows of them.

    values      expressions for `columns`, then, with a `Window`, for the beginning of the pane
    order_by    with a window, its time
    columns     what the rows have in common: members of the document, and its key with the beginning
                of the window
    where       the condition that rows have to meet: without one, there is no document
    """

    columns: tuple[Column, ...]
    where: Term | None
    window: Window | Session | None

    @property
    def tallies(self) -> Sequence[Tally]:
        """How many rows there are, and the numbers of aggregates. Of a session none, since others belong to
        it when it merges with the one before it.
        """
        if isinstance(self.window, Session):
            return ()
        return [self.tally(self.where), *super().tallies]

    @property
    def listings(self) -> Sequence[Listing]:
        """Lists for aggregates, or of a session's rows by their times."""
        return [self.by_time] if isinstance(self.window, Session) else super().listings

    @property
    def by_time(self) -> Listing:
        assert self.window is not None
        return Listing(self.values, self.where, (Order(self.window.time),))

    @property
    def columns_in_use(self) -> frozenset[str]:
        conditions = [self.where, *(part.where for part in self.aggregates)]
        expressions = [*self.values, *(condition for condition in conditions if condition)]
        names = [self.order_by, *(part.argument for part in self.aggregates)]
        names += (name for expression in expressions for name in expression.columns)
        return frozenset(name for name in names if name)


@dataclass(frozen=True)
class View:
    """A declared view: its name, its tree, and the sinks that it goes to.

    having    the condition that a document has to meet, over `shown_types`
    clock     the column whose latest time `now()` is; None: the time of commits
    alerts    whether each change of a document has to be in its topic exactly once
    grouping  of a grouped view: its root is the table of the rows, and shows none
    """

    name: str
    root: Node
    sinks: tuple[str, ...]
    having: Term | None = None
    clock: str | None = None
    alerts: bool = False
    grouping: Grouping | None = None

    @cached_property
    def keyed(self) -> Table:
        """A table whose rows have the keys of the documents."""
        if self.grouping is None:
            return self.root.table
        columns = list(self.grouping.columns)
        window = self.grouping.window
        if window is not None:
            columns.append(Column(WINDOW_START, self.root.table.column(window.time).type))
        key = tuple(column.name for column in columns)
        return Table(SCHEMA, self.name, tuple(columns), key, "")

    @cached_property
    def shown_types(self) -> dict[str, str]:
        """The Postgres types of what `having` may name, by name.

        name         a member of a group's document; of a row's a column, an aggregate, or a member that
                     `flatten` made a value
        member.name  a column of an object
        member       an object itself: only whether it is NULL can be asked
        """
        root = self.root
        if self.grouping is not None:
            types = {column.name: column.type for column in self.keyed.columns}
            if self.grouping.window is not None:
                types[WINDOW_END] = types[WINDOW_START]
            if self.grouping.closing is not None:
                types[FINAL] = "boolean"
            return types | {
                part.name: part.result_type(root.table) for part in self.grouping.aggregates
            }
        types = {column.name: column.type for column in root.shown}
        for child in root.children:
            types |= {part.name: part.result_type(child.table) for part in child.aggregates}
            if not child.shows or child.many:
                continue
            if child.flatten is not None:
                if child.flatten in child.columns:
                    types[child.field] = child.table.column(child.flatten).type
                continue
            types[child.field] = OBJECT
            for name in child.columns:
                # A column of the root may have the name with a dot.
                types.setdefault(f"{child.field}.{name}", child.table.column(name).type)
        for step, places in root.steps.items():
            if len(places) == 1:
                types[step] = OBJECT
                for name in root.earlier[0].columns:
                    types.setdefault(f"{step}.{name}", root.table.column(name).type)
        return types

    @property
    def sends_once(self) -> bool:
        """Whether the state knows what its topic has: so each change is there once, and no tombstone
        of a document that never was. Most rows of such a view have no document; most rows of a session
        don't begin one.
        """
        has_sessions = self.grouping is not None and isinstance(self.grouping.window, Session)
        return self.alerts or self.having is not None or self.has_clock or has_sessions

    @property
    def has_clock(self) -> bool:
        """Whether its documents change with time, without a change of a row."""
        if self.grouping is not None and self.grouping.closing is not None:
            return True
        conditions = (self.root.where, self.having)
        return any(part and part.reads_clock for part in conditions)

    @property
    def topics(self) -> dict[str, str]:
        return {node.table.qualified: node.table.topic for node in self.root.walk()}


def narrowed(table: Table, columns: Collection[str]) -> Table:
    selected = tuple(column for column in table.columns if column.name in columns)
    return replace(table, columns=selected, reshaped=True)


def is_key(table: Table, values: Values) -> bool:
    """Whether values are the table's key. If so, their text is the row's id, and finds the row.

    False for a key of several columns unless all are texts in documents, since an id has numbers as
    numbers. Other rows with a key of several are found by an index.
    """
    if tuple(value.text for value in values) != table.key:
        return False
    return len(values) == 1 or all(
        group(table.column(name).type) in TEXT_FORMS for name in table.key
    )


@dataclass(frozen=True)
class StatePlan:
    """What the state keeps for all views of a pipeline together."""

    views: tuple[View, ...]

    @cached_property
    def tables(self) -> tuple[Table, ...]:
        """The tables that any view uses, each with the columns in use only, sorted by name."""
        columns: dict[str, set[str]] = {}
        tables: dict[str, Table] = {}
        for view in self.views:
            for node in view.root.walk():
                tables[node.table.qualified] = node.table
                columns.setdefault(node.table.qualified, set()).update(node.columns_in_use)
            if view.clock is not None:
                columns[view.root.table.qualified].add(view.clock)
            if view.grouping is not None:
                columns[view.root.table.qualified] |= view.grouping.columns_in_use
        return tuple(narrowed(tables[name], columns[name]) for name in sorted(tables))

    @cached_property
    def slots(self) -> dict[str, tuple[Values, ...]]:
        """By table name: what its rows are indexed by. The number of a slot is its place here."""
        return self._by_table(
            (node.table.qualified, values)
            for view in self.views
            for *_, parent, child in (path for path in view.root.paths() if len(path) > 1)
            if child.time is None
            for node, values in ((parent, child.join.parent), (child, child.join.child))
            if not is_key(node.table, values)
        )

    @cached_property
    def listings(self) -> dict[str, tuple[Listing, ...]]:
        """By table name: the lists of its rows, numbered by their place here."""
        of_nodes = (
            (node.table.qualified, listing)
            for view in self.views
            for node in view.root.walk()
            for listing in (node.listing, *(child.parent_listing for child in node.children))
            if listing is not None
        )
        of_totals = (
            (name, listing) for name, totals in self._totals() for listing in totals.listings
        )
        return self._by_table(chain(of_nodes, of_totals))

    @cached_property
    def tallies(self) -> dict[str, tuple[Tally, ...]]:
        """By table name: the numbers over its rows, numbered by their place here."""
        return self._by_table(
            (name, tally) for name, totals in self._totals() for tally in totals.tallies
        )

    def _totals(self) -> Iterator[tuple[str, Totals]]:
        for view in self.views:
            for node in view.root.walk():
                if node.totals is not None:
                    yield node.table.qualified, node.totals
            if view.grouping is not None:
                yield view.root.table.qualified, view.grouping

    def _by_table(self, parts: Iterable[tuple[str, T]]) -> dict[str, tuple[T, ...]]:
        by_table: dict[str, dict[T, None]] = {table.qualified: {} for table in self.tables}
        for name, part in parts:
            by_table[name][part] = None
        return {name: tuple(different) for name, different in by_table.items()}

    def roots(self, table: str) -> Sequence[str]:
        """Names of the views that have a document for each row of this table (by qualified name)."""
        return [
            view.name
            for view in self.views
            if view.root.table.qualified == table and view.grouping is None
        ]

    def leads_to_documents(self, table: str) -> bool:
        """Whether a row of this table may change documents that aren't its own: of rows that include it, of groups."""
        return any(
            node.table.qualified == table and (not node.is_root or view.grouping is not None)
            for view in self.views
            for node in view.root.walk()
        )


UNSHOWN = {"root", "table", "include", "show", "clock", "alerts", "to"}


def outline(view: View, settings: AnyView) -> dict[str, Any]:
    """Describe a view as a tree of its tables. What a place doesn't have is left out."""
    place = {
        "key": list(view.keyed.key),
        **_place(view.root, settings),
        "clock": view.clock,
        "alerts": view.sends_once,
    }
    return {"view": view.name, **{name: value for name, value in place.items() if value}}


def _place(node: Node, settings: AnyView | IncludeSettings) -> dict[str, Any]:
    place = {
        "table": node.table.qualified,
        **settings.model_dump(mode="json", exclude=UNSHOWN, exclude_defaults=True),
        "limit": node.limit if node.many and node.shows else None,
        "columns": list(node.columns),
        "include": {
            child.field: _place(child, settings.include[child.field])
            for child in node.children
            if child.field in settings.include
        },
    }
    return {name: value for name, value in place.items() if value}


def state_outline(plan: StatePlan, names: Sequence[str]) -> list[dict[str, Any]]:
    """Describe what the state keeps of these tables, for all views of the file together."""
    return [
        {
            "table": table.qualified,
            "columns": [column.name for column in table.columns],
            "indexes": [[value.text for value in values] for values in plan.slots[table.qualified]],
        }
        for table in plan.tables
        if table.qualified in names
    ]
