"""Resolve the views of a pipeline file with the tables that it captures, as Postgres describes
them. What can't be kept right is refused, with its line in the file.
"""

import difflib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import NamedTuple

from cdc.config.durations import microseconds
from cdc.config.mistakes import InvalidSetting
from cdc.config.settings import Pipeline
from cdc.config.view_settings import (
    COMMIT,
    ENDS,
    AggregateCall,
    AnyView,
    GroupedViewSettings,
    IncludeSettings,
    Order,
    PatternSettings,
    PatternViewSettings,
    ViewSettings,
    WindowSettings,
    aggregate,
    ordering,
    selected,
)
from cdc.documents.plan import (
    FINAL,
    WINDOW_END,
    WINDOW_START,
    Aggregate,
    Closing,
    Grouping,
    Join,
    Node,
    Session,
    TimeJoin,
    View,
    Window,
)
from cdc.errors import SettingsError
from cdc.model.mask import SURE, hash_length
from cdc.model.table import Column, Table
from cdc.scalar.instants import EPOCH
from cdc.scalar.operators import Term, quoted_name
from cdc.scalar.parser import UnknownColumn, parse, parse_condition, parse_over
from cdc.scalar.type_groups import (
    BOOLEAN,
    ENUM,
    INTEGERS,
    JOINED,
    NUMERIC,
    TEXTS,
    TIMESTAMP,
    TIMESTAMPTZ,
    UUID,
    comparison,
    group,
    is_ordered,
)

Keys = tuple[str, ...]
OPERATORS = re.compile(r"[-+*/%|&<>=():,]")
"""What expressions have, and hardly a column's name."""
GROUPED = (INTEGERS, TEXTS, UUID, BOOLEAN, ENUM, TIMESTAMPTZ)
"""Groups of the types of columns that rows are grouped by: a document's key has their values."""
COMPUTED = {TEXTS: "text", UUID: UUID, BOOLEAN: BOOLEAN, TIMESTAMPTZ: TIMESTAMPTZ}
"""The type of an expression that rows are grouped by."""
A_TIME = "name a column of type timestamptz or timestamp"


class Resolution(NamedTuple):
    """The views of a file, with the tables as they are.

    views    the plans of those that can be kept
    refused  why the others can't, by name: they name what isn't captured, or can't be kept as they
             are declared
    """

    views: tuple[View, ...]
    refused: Mapping[str, SettingsError]


def resolve(pipeline: Pipeline, tables: Sequence[Table]) -> Resolution:
    """Resolve each view of the file by itself. `tables` are those that it captures."""
    resolver = _Resolver(pipeline, {table.qualified: table for table in tables})
    views = []
    refused = {}
    for name, settings in pipeline.views.items():
        try:
            views.append(resolver.view(name, settings))
        except SettingsError as error:
            refused[name] = error
    return Resolution(tuple(views), refused)


def resolve_views(pipeline: Pipeline, tables: Sequence[Table]) -> tuple[View, ...]:
    """Return the plans of all views. Raises SettingsError: the first that can't be kept."""
    views, refused = resolve(pipeline, tables)
    for error in refused.values():
        raise error
    return views


@dataclass(frozen=True)
class _Resolver:
    pipeline: Pipeline
    tables: dict[str, Table]

    def view(self, name: str, settings: AnyView) -> View:
        if isinstance(settings, GroupedViewSettings):
            return self._grouped_view(name, settings)
        keys = ("views", name)
        pattern = settings.pattern if isinstance(settings, PatternViewSettings) else None
        table = self._table(settings.root, (*keys, "from" if pattern else "root"))
        node = Node(
            field=name,
            table=table,
            columns=self._columns(table, settings.columns, (*keys, "columns")),
            where=self._condition(table, settings.where, (*keys, "where"), has_clock=True),
            children=self._children(table, settings, keys),
        )
        if pattern is not None:
            node = self._completing(node, pattern, (*keys, "pattern"))
        self._refuse_collisions(node, keys)
        alerts = settings.alerts or pattern is not None
        view = View(name, node, (), alerts=alerts)
        return self._completed(view, settings, keys)

    def _completed(self, view: View, settings: AnyView, keys: Keys) -> View:
        """Add what every view may have."""
        sinks = tuple(sink for sink in settings.to if sink in self.pipeline.sinks)
        having = self._having(view.shown_types, settings.having, (*keys, "having"))
        view = replace(view, sinks=sinks, having=having)
        return replace(view, clock=self._clock(view, settings, (*keys, "clock")))

    def _grouped_view(self, name: str, settings: GroupedViewSettings) -> View:
        keys = ("views", name)
        table = self._table(settings.root, (*keys, "from"))
        where = self._condition(table, settings.where, (*keys, "where"))
        if settings.window is not None and settings.window.sliding is not None:
            return self._sliding_view(name, settings, settings.window, where)
        columns = []
        values = []
        for column, text in settings.group_by.items():
            value, type_ = self._grouped_by(table, text, (*keys, "group_by", column))
            columns.append(Column(column, type_))
            values.append(value)
        window: Window | Session | None = None
        closing = None
        if settings.window is not None:
            time = settings.window.time
            type_ = self._require_time(table, "time", time, (*keys, "window", "time"))
            if settings.window.session is not None:
                window = Session(time, settings.window.size)
            else:
                start = (settings.window.start - EPOCH.date()) // timedelta(microseconds=1)
                window = Window(time, settings.window.size, settings.window.step, start)
                own_time = Term("column", group(type_), (), time)
                values.append(Term("bin", group(type_), (own_time,), f"{window.every} {start}"))
            if settings.window.lateness is not None:
                lateness = microseconds(settings.window.lateness)
                closing = Closing(name, settings.window.size + lateness)
        windows = {WINDOW_START, WINDOW_END} if window is not None else set()
        windows |= {FINAL} if closing is not None else set()
        for member in windows.intersection(settings.group_by):
            raise self._name_taken((*keys, "group_by"), name, member)
        order_by = "" if window is None else window.time
        if settings.order_by is not None:
            place = (*keys, "order_by")
            order = self._order(table, settings.order_by, place)
            if order.descending:
                raise self.pipeline.mistake(
                    place, "the first row is the one with the least value", "name the column alone"
                )
            order_by = order.column
        node = Node(name, table, (), where=where)
        grouping = Grouping(
            tuple(values),
            self._selected(node, settings, {*settings.group_by, *windows}, keys),
            order_by,
            closing,
            columns=tuple(columns),
            where=where,
            window=window,
        )
        view = View(name, node, (), alerts=settings.alerts, grouping=grouping)
        return self._completed(view, settings, keys)

    def _sliding_view(
        self, name: str, settings: GroupedViewSettings, window: WindowSettings, where: Term | None
    ) -> View:
        """Resolve a view with a document for each row, of the rows in the time before it."""
        keys = ("views", name)
        table = self._table(settings.root, (*keys, "from"))
        self._require_time(table, "time", window.time, (*keys, "window", "time"))
        values = []
        for column, text in settings.group_by.items():
            place = (*keys, "group_by", column)
            self._require_plain_column(table, "group_by with a sliding window", text, place)
            value, _ = self._grouped_by(table, text, place)
            values.append(value)
            if column != text:
                raise self.pipeline.mistake(
                    place,
                    "the document of a row has the names of its columns",
                    f"group_by: [{text}]",
                )
        shown = {*table.key, *settings.group_by, window.time}
        root = Node(name, table, (), where=where)
        aggregates = self._selected(root, settings, shown, keys)
        filters = tuple(part.filter for part in aggregates if part.filter)
        counts = Term("or", BOOLEAN, filters) if len(filters) == len(aggregates) else None
        child = Node(
            field="sliding",
            table=table,
            columns=(),
            join=Join(
                tuple(values),
                tuple(values),
                TimeJoin("during", window.time, window.time, window.size, 0),
            ),
            many=True,
            where=_both(where, counts),
            aggregates=aggregates,
            shows=False,
        )
        # A row without a value, or beyond the years that count, is in no window: not even in its own.
        zone = "Z" if group(table.column(window.time).type) == TIMESTAMPTZ else ""
        own_time = quoted_name(window.time)
        conditions = [
            *(f"{quoted_name(column)} IS NOT NULL" for column in settings.group_by),
            f"{own_time} >= '0001-01-01 00:00:00{zone}'",
            f"{own_time} <= '9999-12-31 23:59:59.999999{zone}'",
        ]
        counted = self._met(table, " AND ".join(conditions), (*keys, "window"))
        columns = tuple(column.name for column in table.columns if column.name in shown)
        root = replace(root, columns=columns, where=_both(where, counted), children=(child,))
        view = View(name, root, (), alerts=settings.alerts)
        return self._completed(view, settings, keys)

    def _grouped_by(self, table: Table, text: str, keys: Keys) -> tuple[Term, str]:
        value = self._expression(table, text, keys)
        type_ = _type_name(table, value)
        if value.operator == "column" and value.group in GROUPED:
            return value, type_
        if value.operator != "column" and value.group in COMPUTED:
            return value, COMPUTED[value.group]
        raise self.pipeline.mistake(
            keys,
            f"{text} is {type_}, and rows can't be grouped by it exactly",
            "group by integers, texts, uuid, boolean, enums or timestamptz; by what is computed"
            " of these, but integers: let Postgres keep it in a column",
        )

    def _selected(
        self, root: Node, settings: GroupedViewSettings, taken: Collection[str], keys: Keys
    ) -> tuple[Aggregate, ...]:
        """Resolve what a document shows beside the members in `taken`."""
        aggregates = []
        for name, text in settings.select.items():
            place = (*keys, "select", name)
            if name in taken:
                raise self._name_taken(place, root.field, name)
            call = selected(text)
            aggregates.append(self._aggregate(root.table, root.where, name, call, place))
        return tuple(aggregates)

    def _clock(self, view: View, settings: AnyView, keys: Keys) -> str | None:
        if settings.clock == COMMIT:
            return None
        self._require_time(view.root.table, "clock", settings.clock, keys, f"{A_TIME}, or commit")
        if not view.has_clock:
            is_pattern = isinstance(settings, PatternViewSettings)
            waiting = "there is no unless" if is_pattern else "neither where"
            raise self.pipeline.mistake(
                keys,
                f"{waiting} nor having compares with now()",
                "take out clock, or for example: having: now() > placed + interval '2 days'",
            )
        return settings.clock

    def _require_time(
        self, table: Table, setting: str, name: str, keys: Keys, hint: str = A_TIME
    ) -> str:
        """Return the type of a column, which is a time stamp's."""
        self._require_plain_column(table, setting, name, keys)
        type_ = table.column(name).type
        if group(type_) not in (TIMESTAMP, TIMESTAMPTZ):
            raise self.pipeline.mistake(
                keys, f"{name} is {type_}, and a time is a time stamp", hint
            )
        return type_

    def _completing(self, root: Node, settings: PatternSettings, keys: Keys) -> Node:
        """Make the root the last row of a pattern: each row before it is a child of the one after it."""
        table = root.table
        time = settings.order_by
        values = []
        for number, text in enumerate(settings.by):
            place = (*keys, "by", str(number))
            value = self._expression(table, text, place)
            self._require_comparable((table, value), (table, value), place)
            values.append(value)
        hint = "order by a column of type timestamptz or timestamp"
        type_ = self._require_time(table, "order_by", time, (*keys, "order_by"), hint)
        within = microseconds(settings.within)
        conditions = []
        for name, step in settings.steps.items():
            condition = self._met(table, step.where, (*keys, "steps", name))
            conditions += [(name, condition)] * step.times
        columns = tuple(column.name for column in root.shown)
        row = Node(field="", table=table, columns=columns, shows=False)
        before = Join(tuple(values), tuple(values), TimeJoin("previous", time, time, within, 0))
        earlier: tuple[Node, ...] = ()
        for name, condition in conditions[:-1]:
            node = replace(row, field=name, join=before, presence=True, children=earlier)
            is_any = settings.rows == "any"
            earlier = (
                replace(node, where=condition) if is_any else replace(node, meets=condition),
            )
        _, last = conditions[-1]
        if settings.unless is None:
            return replace(root, where=last, children=(*root.children, *earlier))
        if group(type_) != TIMESTAMPTZ:
            raise self.pipeline.mistake(
                (*keys, "unless"),
                f"{time} is {type_}, and now() is a time with a zone",
                "ALTER TABLE ... ALTER COLUMN ... TYPE timestamptz, or take out unless",
            )
        absent = replace(
            row,
            field="unless",
            columns=(),
            join=Join(before.parent, before.child, TimeJoin("next", time, time, 0, within)),
            where=self._condition(table, settings.unless, (*keys, "unless")),
            presence=False,
        )
        end = Term("shift", TIMESTAMPTZ, (Term("column", TIMESTAMPTZ, (), time),), within)
        over = Term(">", BOOLEAN, (Term("now", TIMESTAMPTZ), end))
        # A row without such a value has no later one, and is in no sequence either.
        null = [Term("is null", BOOLEAN, (value,)) for value in values]
        known = [Term("not", BOOLEAN, (term,)) for term in null]
        where = Term("and", BOOLEAN, (last, *known, over))
        return replace(root, where=where, children=(*root.children, *earlier, absent))

    def _having(self, types: Mapping[str, str], text: str | None, keys: Keys) -> Term | None:
        if text is None:
            return None
        try:
            term = parse(text, types, has_clock=True)
        except UnknownColumn as error:
            names = ", ".join(types)
            raise self.pipeline.mistake(
                keys,
                f"having names {error.name}, which the document doesn't show",
                f"one of: {names}",
            ) from None
        except InvalidSetting as error:
            raise self.pipeline.mistake(keys, str(error), error.hint) from None
        if term.group != BOOLEAN:
            raise self.pipeline.mistake(keys, "isn't a condition", "for example: having: late > 3")
        return term

    def _children(
        self, parent: Table, settings: ViewSettings | IncludeSettings, keys: Keys
    ) -> tuple[Node, ...]:
        return tuple(
            self._child(parent, name, include, (*keys, "include", name))
            for name, include in settings.include.items()
        )

    def _child(self, parent: Table, name: str, settings: IncludeSettings, keys: Keys) -> Node:
        table = self._table(settings.table, (*keys, "table"))
        columns = self._columns(table, settings.columns, (*keys, "columns"))
        if settings.flatten is not None:
            columns = tuple(column for column in columns if column == settings.flatten)
        where = self._condition(table, settings.where, (*keys, "where"))
        node = Node(
            field=name,
            table=table,
            columns=columns if settings.show else (),
            join=self._join(parent, table, settings, keys),
            many=settings.many,
            order_by=tuple(
                self._order(table, text, (*keys, "order_by", str(number)))
                for number, text in enumerate(settings.order_by)
            ),
            limit=settings.limit,
            flatten=settings.flatten,
            where=where,
            aggregates=tuple(
                self._aggregate(
                    table, where, member, aggregate(text), (*keys, "aggregates", member)
                )
                for member, text in settings.aggregates.items()
            ),
            shows=settings.show,
            children=self._children(table, settings, keys),
        )
        self._refuse_collisions(node, keys)
        self._check_flatten(node, keys)
        return node

    def _table(self, name: str, keys: Keys) -> Table:
        if name in self.tables:
            return self.tables[name]
        raise self.pipeline.mistake(
            keys, f"{name} isn't captured", f"one of: {', '.join(sorted(self.tables))}"
        )

    def _columns(self, table: Table, names: Sequence[str] | None, keys: Keys) -> tuple[str, ...]:
        for number, name in enumerate(names or ()):
            self._require_column(table, name, (*keys, str(number)))
        return tuple(
            column.name for column in table.columns if names is None or column.name in names
        )

    def _require_column(self, table: Table, name: str, keys: Keys) -> None:
        captured = [column.name for column in table.columns]
        if name in captured:
            return
        entries = (entry for entry in self.pipeline.source.tables if entry.table == table.qualified)
        if any(name in entry.exclude for entry in entries):
            raise self.pipeline.mistake(
                keys,
                f"{table.qualified} excludes {name}",
                f"take {name} out of exclude in source.tables, or out of the view",
            )
        near = difflib.get_close_matches(name, captured, n=1)
        raise self.pipeline.mistake(
            keys,
            f"{table.qualified} has no column {name}",
            f"did you mean {near[0]}?" if near else f"its columns: {', '.join(captured)}",
        )

    def _expression(self, table: Table, text: str, keys: Keys) -> Term:
        with self._placed(table, keys):
            return parse_over(table, text)

    @contextmanager
    def _placed(self, table: Table, keys: Keys) -> Iterator[None]:
        """Give what the parser refuses its line in the file."""
        try:
            yield
        except InvalidSetting as error:
            if isinstance(error, UnknownColumn):
                self._require_column(table, error.name, keys)
            raise self.pipeline.mistake(keys, str(error), error.hint) from None

    def _condition(
        self, table: Table, text: str | None, keys: Keys, *, has_clock: bool = False
    ) -> Term | None:
        return None if text is None else self._met(table, text, keys, has_clock=has_clock)

    def _met(self, table: Table, text: str, keys: Keys, *, has_clock: bool = False) -> Term:
        with self._placed(table, keys):
            return parse_condition(table, text, has_clock=has_clock)

    def _join(self, parent: Table, table: Table, settings: IncludeSettings, keys: Keys) -> Join:
        parents = []
        children = []
        for left, right in settings.on.items():
            place = (*keys, "on", left)
            parents.append(self._expression(parent, left, place))
            children.append(self._expression(table, right, place))
            self._require_comparable((parent, parents[-1]), (table, children[-1]), place)
            self._require_same_masks((parent, parents[-1]), (table, children[-1]), place)
        time = self._time_join(parent, table, settings, keys)
        return Join(tuple(parents), tuple(children), time)

    def _time_join(
        self, parent: Table, table: Table, settings: IncludeSettings, keys: Keys
    ) -> TimeJoin | None:
        if settings.time is None:
            return None
        kind, left, right = settings.time
        place = (*keys, kind)
        types = []
        hint = "compare columns of type timestamptz, or both of type timestamp"
        for side, name in ((parent, left), (table, right)):
            types.append(self._require_time(side, kind, name, (*place, left), hint))
        if group(types[0]) != group(types[1]):
            raise self.pipeline.mistake(
                (*place, left),
                f"{left} is {types[0]} and {right} is {types[1]}",
                "ALTER TABLE ... ALTER COLUMN ... TYPE timestamptz, or compare with a generated column",
            )
        within = microseconds(settings.within) if settings.within else None
        if kind == "during":
            before = microseconds(settings.before) if settings.before else 0
            after = microseconds(settings.after) if settings.after else 0
            return TimeJoin(kind, left, right, before, after)
        if kind == "next":
            return TimeJoin(kind, left, right, 0, within)
        return TimeJoin(kind, left, right, within, 0)

    def _require_comparable(
        self, left: tuple[Table, Term], right: tuple[Table, Term], keys: Keys
    ) -> None:
        """Refuse sides whose equal values wouldn't have equal texts."""
        types = [_type_name(table, term) for table, term in (left, right)]
        groups = [_joined_as(table, term) for table, term in (left, right)]
        if None not in groups and groups[0] == groups[1]:
            return
        accepted = (
            "both sides have one type: integers, texts, uuid, boolean, date, time stamps,"
            " numerics of one scale, the same enum"
        )
        for type_, side in zip(types, groups, strict=True):
            if side is None:
                raise self.pipeline.mistake(
                    keys, f"values of type {type_} can't be compared exactly", accepted
                )
        raise self.pipeline.mistake(keys, f"{types[0]} can't be compared with {types[1]}", accepted)

    def _require_same_masks(
        self, left: tuple[Table, Term], right: tuple[Table, Term], keys: Keys
    ) -> None:
        """Refuse a join of masked values, except hash = hash, whole and with one salt."""
        hashes = []
        for table, term in (left, right):
            masked = [table.column(name) for name in term.columns if table.column(name).mask]
            forms = [
                (column.mask.hash, hash_length(column.type))
                for column in masked
                if column.mask and column.mask.hash and term.operator == "column"
            ]
            if masked and (not forms or forms[0][1] < SURE):
                raise self.pipeline.mistake(
                    keys,
                    f"{table.qualified}.{masked[0].name} is masked: values that differ may be equal in the log",
                    "join on another column, or hash both columns, each of type text",
                )
            hashes.append(forms)
        if hashes[0] != hashes[1]:
            raise self.pipeline.mistake(
                keys,
                "only one side is hashed, or their salts or declared lengths differ: no rows would match",
                "hash both columns with the same salt, each of type text",
            )

    def _require_plain_column(self, table: Table, setting: str, name: str, keys: Keys) -> None:
        if OPERATORS.search(name) and name not in (column.name for column in table.columns):
            raise self.pipeline.mistake(
                keys,
                f"{setting} takes columns, not expressions: {table.qualified} has no column {name}",
                "let Postgres keep it in one: ADD COLUMN ... GENERATED ALWAYS AS (...) STORED",
            )
        self._require_column(table, name, keys)

    def _order(self, table: Table, text: str, keys: Keys) -> Order:
        order = ordering(text)
        self._require_plain_column(table, "order_by", order.column, keys)
        type_ = table.column(order.column).type
        if not is_ordered(type_):
            raise self.pipeline.mistake(
                keys,
                f"values of type {type_} can't be ordered exactly",
                "order by integers, numerics, texts, uuid, boolean, date, time or timestamps",
            )
        return order

    def _aggregate(
        self, table: Table, where: Term | None, name: str, call: AggregateCall, keys: Keys
    ) -> Aggregate:
        if call.argument:
            written = "count(DISTINCT)" if call.function == "distinct" else call.function
            self._require_plain_column(table, written, call.argument, keys)
            type_ = table.column(call.argument).type
            type_group = group(type_)
            # An aggregate has the form of documents, in which the connector writes no date, no time and
            # no time stamp without a zone.
            has_extremes = type_group in (INTEGERS, TEXTS, NUMERIC, TIMESTAMPTZ)
            accepted = {
                "count": True,
                **dict.fromkeys(("sum", "avg"), type_group in (INTEGERS, NUMERIC)),
                **dict.fromkeys(ENDS, has_extremes or type_group in (BOOLEAN, UUID, ENUM)),
                # Equal values have equal texts, or get them by `trimmed`.
                "distinct": comparison(type_) is not None or type_group == NUMERIC,
            }
            if not accepted.get(call.function, has_extremes):
                raise self.pipeline.mistake(
                    keys,
                    f"{written} of a {type_} can't be computed exactly",
                    "sum and avg take integers and numerics; min, max and percentile_disc also texts and"
                    " timestamptz; first and last also uuid, boolean and enums; count(DISTINCT ...)"
                    " also char(n), dates, times and time stamps",
                )
        own = self._condition(table, call.condition, keys)
        return Aggregate(name, call.function, call.argument, call.fraction, own, _both(where, own))

    def _refuse_collisions(self, node: Node, keys: Keys) -> None:
        """Refuse two members with one name: a document would silently lose one."""
        shown = {column.name for column in node.shown}
        for child in node.children:
            place = (*keys, "include", child.field)
            members = [((*place, "aggregates", part.name), part.name) for part in child.aggregates]
            if child.shows:
                members.insert(0, (place, child.field))
            for member_keys, member in members:
                if member in shown:
                    hint = "give it another name, or leave the column out: columns: [...]"
                    raise self._name_taken(member_keys, node.field, member, hint)
                shown.add(member)
        for step in node.steps:
            if step in shown:
                place = (*keys, "pattern", "steps", step)
                raise self._name_taken(place, node.field, step, "give the step another name")

    def _name_taken(
        self, keys: Keys, name: str, member: str, hint: str = "give it another name"
    ) -> SettingsError:
        return self.pipeline.mistake(keys, f"{name} has another member {member}", hint)

    def _check_flatten(self, node: Node, keys: Keys) -> None:
        if node.flatten is None or node.flatten in node.columns:
            return
        members = [
            name
            for child in node.children
            for name in [child.field, *(part.name for part in child.aggregates)]
        ]
        if node.flatten not in members:
            names = [*(column.name for column in node.table.columns), *members]
            raise self.pipeline.mistake(
                (*keys, "flatten"),
                f"{node.field} has no member {node.flatten}",
                f"one of: {', '.join(names)}",
            )


def _both(first: Term | None, second: Term | None) -> Term | None:
    if first is None or second is None:
        return first or second
    return Term("and", BOOLEAN, (first, second))


def _joined_as(table: Table, term: Term) -> str | None:
    """Return what a join compares an expression over a table's row as; None where it can't."""
    if term.operator == "column":
        return comparison(table.column(term.text).type)
    return term.group if term.group in JOINED else None


def _type_name(table: Table, term: Term) -> str:
    return table.column(term.text).type if term.operator == "column" else term.group
