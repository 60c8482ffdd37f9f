"""The query of a view: Postgres computes what `assemble` computes, in the same form.

One row per document: the root's columns as they are, aggregates of its children under their names,
and each nested member as json in the form of documents (docs/use/types.md). So it stands wherever
a table's rows are read from. Text is ordered by COLLATE "C", NULL comes last, ids decide what is
equal: the order of `assemble`.
"""

from collections.abc import Sequence
from itertools import count

from cdc.codec.types import kind
from cdc.config.view_settings import ENDS, Order
from cdc.documents.plan import (
    FINAL,
    LISTED,
    WINDOW_END,
    WINDOW_START,
    Aggregate,
    Grouping,
    Node,
    Session,
    View,
    Window,
)
from cdc.model.table import Column, Table
from cdc.scalar.operators import (
    COLLATION,
    NOW,
    Term,
    quoted,
    quoted_name,
    quoted_table,
    sql_text,
)
from cdc.scalar.type_groups import TEXTS, TIMESTAMPTZ, group

Member = tuple[str, str]
"""A name, and SQL for the text of a value as JSON; its NULL is JSON's null."""


def document_query(view: View) -> str:
    """Write the query of a view's documents, without a semicolon at its end.

    The session's time zone doesn't matter; `extra_float_digits` is 1 or more.
    """
    if view.grouping is not None:
        return _grouped_query(view, view.grouping)
    root = view.root
    query = _Query()
    alias = query.alias()
    parts = query.parts(root, alias)
    query.add_pattern(root, alias, parts)
    clock = _clock(view)
    columns = {column.name: f"{alias}.{quoted_name(column.name)}" for column in root.shown}
    numbers = {column.name: value for column, value in parts.numbers}
    conditions = [*parts.conditions]
    if root.where:
        conditions.append(_expression(root.where, alias, clock))
    if view.having is not None:
        named = {**numbers, **parts.named, **columns, NOW: clock}
        conditions.append(sql_text(view.having, named.__getitem__))
    selected = [
        *columns.values(),
        *(f"{value} AS {quoted_name(name)}" for name, value in numbers.items()),
        *(f"({text})::json AS {quoted_name(name)}" for name, text in parts.nested),
    ]
    return _select(selected, root.table, alias, parts.joins, conditions)


def _grouped_query(view: View, grouping: Grouping) -> str:
    query = (
        _session_query(view.root.table, grouping, grouping.window)
        if isinstance(grouping.window, Session)
        else _window_query(view.root.table, grouping, grouping.window, _clock(view))
    )
    if view.having is None:
        return query
    return f"SELECT * FROM ({query}) AS g WHERE {_expression(view.having, 'g', _clock(view))}"


def _session_query(table: Table, grouping: Grouping, session: Session) -> str:
    """Write the query of sessions: a row begins one if none is within the gap before it."""
    values = [_expression(value, "t0") for value in grouping.values]
    places = [f'"_cdc {number}"' for number in range(len(values))]
    time = f"t0.{quoted_name(session.time)}"
    groups = f"PARTITION BY {', '.join(values)} " if values else ""
    pause = f"{time} - lag({time}) OVER ({groups}ORDER BY {time})"
    begin = f"CASE WHEN {pause} <= {_interval(session.gap)} THEN NULL ELSE {time} END"
    conditions = [
        *_counted(grouping, values),
        f"{time} BETWEEN {_years(table.column(session.time).type)}",
    ]
    named = [f"{value} AS {place}" for value, place in zip(values, places, strict=True)]
    rows = _select(["t0.*", *named, f'{begin} AS "_cdc begin"'], table, "t0", (), conditions)
    group_columns = [f"t1.{place}" for place in places]
    of_group = f"PARTITION BY {', '.join(group_columns)} " if places else ""
    over = f"({of_group}ORDER BY t1.{quoted_name(session.time)} RANGE UNBOUNDED PRECEDING)"
    marked = f'SELECT *, max(t1."_cdc begin") OVER {over} AS "_cdc run" FROM ({rows}) AS t1'
    names = [quoted_name(column.name) for column in grouping.columns]
    columns = [f"t2.{place} AS {name}" for place, name in zip(places, names, strict=True)]
    columns.append(f't2."_cdc run" AS {quoted_name(WINDOW_START)}')
    grouped_by = ", ".join(str(number + 1) for number in range(len(columns)))
    columns.append(f"max(t2.{quoted_name(session.time)}) AS {quoted_name(WINDOW_END)}")
    columns += _aggregates(grouping.aggregates, table, grouping.order_by, "t2")
    return f"SELECT {', '.join(columns)} FROM ({marked}) AS t2 GROUP BY {grouped_by}"


def _counted(grouping: Grouping, values: Sequence[str]) -> list[str]:
    """Write which rows count: those that have all of what they are grouped by."""
    conditions = [_expression(grouping.where, "t0")] if grouping.where else []
    return conditions + [f"{value} IS NOT NULL" for value in values]


def _aggregates(
    aggregates: Sequence[Aggregate], table: Table, order_by: str, alias: str
) -> list[str]:
    """Write aggregates as columns. `order_by`: the column that says which row is the first."""
    return [
        f"{_aggregate(part, table, order_by, alias)} AS {quoted_name(part.name)}"
        for part in aggregates
    ]


def _window_query(table: Table, grouping: Grouping, window: Window | None, clock: str) -> str:
    alias = "t0"
    values = [_expression(value, alias) for value in grouping.values[: len(grouping.columns)]]
    names = [quoted_name(column.name) for column in grouping.columns]
    conditions = _counted(grouping, values)
    columns = [f"{value} AS {name}" for value, name in zip(values, names, strict=True)]
    joins = []
    if window is not None:
        type_ = table.column(window.time).type
        pane = _expression(grouping.values[-1], alias)
        first = f"{pane} - {_interval(window.size - window.every)}"
        begins = f"generate_series({first}, {pane}, {_interval(window.every)})"
        joins.append(f"CROSS JOIN LATERAL {begins} AS w(begin)")
        end = f"w.begin + {_interval(window.size)}"
        columns += [
            f"w.begin AS {quoted_name(WINDOW_START)}",
            f"{end} AS {quoted_name(WINDOW_END)}",
        ]
        conditions.append(f"{alias}.{quoted_name(window.time)} BETWEEN {_years(type_)}")
        conditions += [f"{time} BETWEEN {_years(type_)}" for time in ("w.begin", end)]
        if grouping.closing is not None:
            columns.append(f"false AS {quoted_name(FINAL)}")
            now = clock if group(type_) == TIMESTAMPTZ else f"{clock} AT TIME ZONE 'UTC'"
            conditions.append(f"w.begin + {_interval(grouping.closing.after)} > {now}")
    grouped_by = ", ".join(str(number + 1) for number in range(len(columns)))
    columns += _aggregates(grouping.aggregates, table, grouping.order_by, alias)
    return f"{_select(columns, table, alias, joins, conditions)} GROUP BY {grouped_by}"


def _clock(view: View) -> str:
    return f"current_setting({quoted(clock_setting(view.name))})::timestamptz"


def clock_setting(view: str) -> str:
    """Name the setting of a session that has the time of a view's clock."""
    return f"cdc.now_{view}"


def _select(
    columns: Sequence[str],
    table: Table,
    alias: str,
    joins: Sequence[str],
    conditions: Sequence[str],
) -> str:
    only = "ONLY " if table.has_children else ""
    name = f"{only}{quoted_table(table)}"
    if any(column.mask for column in table.columns):
        as_in_log = ", ".join(map(_as_in_log, table.columns))
        name = f"(SELECT {as_in_log} FROM {name})"
    where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    return f"SELECT {', '.join(columns)} FROM {' '.join([f'{name} AS {alias}', *joins])}{where}"


def _as_in_log(column: Column) -> str:
    name = quoted_name(column.name)
    return f"{column.mask.sql(column.type, name)} AS {name}" if column.mask else name


class _Parts:
    """What a row's document gets from its children, and the joins that it comes from.

    numbers     aggregates as columns, SQL for their values
    named       SQL for what `having` may name of objects, see `View.shown_types`
    conditions  without which there is no document
    """

    def __init__(self) -> None:
        self.joins: list[str] = []
        self.numbers: list[tuple[Column, str]] = []
        self.nested: list[Member] = []
        self.named: dict[str, str] = {}
        self.conditions: list[str] = []

    @property
    def members(self) -> list[Member]:
        numbers = [(column.name, _json_text(column, value)) for column, value in self.numbers]
        return [*numbers, *self.nested]


class _Query:
    def __init__(self) -> None:
        self._numbers = count()

    def alias(self) -> str:
        return f"t{next(self._numbers)}"

    def parts(self, node: Node, alias: str) -> _Parts:
        """Build what a row of the node, called `alias`, gets from its children."""
        parts = _Parts()
        for child in node.children:
            if child.aggregates:
                numbers = self.alias()
                parts.joins.append(_lateral(self._aggregates(node, child, alias), numbers))
                for part in child.aggregates:
                    column = Column(part.name, part.result_type(child.table))
                    parts.numbers.append((column, f"{numbers}.{quoted_name(part.name)}"))
            if child.shows:
                member = self.alias()
                parts.joins.append(_lateral(self._member(node, child, alias), member))
                parts.nested.append((child.field, f"{member}.value"))
                parts.named[child.field] = f"{member}.value"
                for number, name in enumerate(child.columns):
                    own = child.field if child.flatten == name else f"{child.field}.{name}"
                    parts.named[own] = f"{member}.c{number}"
        return parts

    def add_pattern(self, root: Node, alias: str, parts: _Parts) -> None:
        """Add what a pattern requires of the rows before and after the root's row, called `alias`."""
        parent = root
        parent_alias = alias
        rows: list[str] = []
        joins = []
        for node in root.earlier:
            selected = self.alias()
            earlier = self.alias()
            conditions = _conditions(parent, node, parent_alias, selected)
            columns = [f"{selected}.{quoted_name(name)}" for name in sorted(node.columns_in_use)]
            query = _select(columns, node.table, selected, (), conditions)
            time = quoted_name(node.time_join.child)
            within = _interval(node.time_join.before or 0)
            met = [_expression(node.meets, earlier)] if node.meets else []
            required = [*met, f"{earlier}.{time} >= {alias}.{time} - {within}"]
            joins.append(
                f"JOIN LATERAL ({query} ORDER BY {_ordering(node, selected)} LIMIT 1)"
                f" AS {earlier} ON {' AND '.join(required)}"
            )
            rows.append(earlier)
            parent = node
            parent_alias = earlier
        # First, so that what is included is read of few rows.
        parts.joins[:0] = joins
        for step, places in root.steps.items():
            texts = [_document(root.earlier[place], rows[place], _Parts()) for place in places]
            if len(places) > 1:
                listed = " || ',' || ".join(texts)
                parts.nested.append((step, f"'[' || {listed} || ']'"))
                continue
            parts.nested.append((step, texts[0]))
            parts.named[step] = texts[0]
            for name in root.earlier[0].columns:
                parts.named[f"{step}.{name}"] = f"{rows[places[0]]}.{quoted_name(name)}"
        if root.absent is not None:
            later = self.alias()
            conditions = _conditions(root, root.absent, alias, later)
            parts.conditions.append(
                f"NOT EXISTS ({_select(['1'], root.table, later, (), conditions)})"
            )

    def _aggregates(self, parent_node: Node, node: Node, parent: str) -> str:
        alias = self.alias()
        order = node.time.child if node.time else ""
        columns = _aggregates(node.aggregates, node.table, order, alias)
        conditions = _conditions(parent_node, node, parent, alias)
        return _select(columns, node.table, alias, (), conditions)

    def _member(self, parent_node: Node, node: Node, parent: str) -> str:
        """Write the query of a node's value, of one row with one column `value`; no row is NULL."""
        alias = self.alias()
        parts = self.parts(node, alias)
        document = _document(node, alias, parts)
        conditions = _conditions(parent_node, node, parent, alias)
        order = _ordering(node, alias)
        if not node.many:
            named = [
                f"{alias}.{quoted_name(name)} AS c{number}"
                for number, name in enumerate(node.columns)
            ]
            query = _select(
                [f"{document} AS value", *named], node.table, alias, parts.joins, conditions
            )
            return f"{query} ORDER BY {order} LIMIT 1"
        columns = [f"{document} AS value", f"row_number() OVER (ORDER BY {order}) AS place"]
        rows = _select(columns, node.table, alias, parts.joins, conditions)
        listed = self.alias()
        values = f"string_agg({listed}.value, ',' ORDER BY {listed}.place)"
        return (
            f"SELECT '[' || coalesce({values}, '') || ']' AS value"
            f" FROM ({rows} ORDER BY place LIMIT {node.limit}) AS {listed}"
        )


def _lateral(query: str, alias: str) -> str:
    return f"LEFT JOIN LATERAL ({query}) AS {alias} ON true"


def _conditions(parent_node: Node, node: Node, parent: str, alias: str) -> list[str]:
    """Write which rows a join may select; of a join in time, the ordering selects among them."""
    pairs = zip(node.join.parent, node.join.child, strict=True)
    conditions = [
        f"{_expression(left, parent)} = {_expression(right, alias)}" for left, right in pairs
    ]
    where = [_expression(node.where, alias)] if node.where else []
    time = node.time
    if time is None:
        return [*conditions, *where]
    left = f"{parent}.{quoted_name(time.parent)}"
    right = f"{alias}.{quoted_name(time.child)}"
    years = _years(node.table.column(time.child).type)
    conditions += [f"{side} BETWEEN {years}" for side in (left, right)]
    own_right = f"({right}, {_id(node.table, alias)}{COLLATION})"
    own_left = f"({left}, {_id(parent_node.table, parent)}{COLLATION})"
    is_own = node.is_same_time(parent_node)
    if time.kind == "as_of":
        conditions.append(f"{right} <= {left}")
    elif time.kind == "previous":
        conditions.append(f"{own_right} < {own_left}" if is_own else f"{right} < {left}")
    elif time.kind == "next":
        conditions.append(f"{own_right} > {own_left}" if is_own else f"{right} > {left}")
    if time.before is not None and time.kind != "next":
        conditions.append(f"{right} >= {left} - {_interval(time.before)}")
    if time.after is not None and time.kind in ("next", "during"):
        conditions.append(f"{right} <= {left} + {_interval(time.after)}")
    return [*conditions, *where]


def _years(type_: str) -> str:
    zone = "Z" if group(type_) == TIMESTAMPTZ else ""
    first = f"0001-01-01 00:00:00{zone}"
    last = f"9999-12-31 23:59:59.999999{zone}"
    return f"{quoted(first)}::{type_} AND {quoted(last)}::{type_}"


def _interval(microseconds: int) -> str:
    return f"interval '{microseconds} microseconds'"


def _expression(expression: Term, alias: str, clock: str = "") -> str:
    def column(name: str) -> str:
        return clock if name == NOW else f"{alias}.{quoted_name(name)}"

    # An enum stays one, for an index.
    if expression.operator == "column":
        return column(expression.text)
    return sql_text(expression, column)


def _ordering(node: Node, alias: str) -> str:
    """Write the order of a node's rows, of which no two are equal."""
    columns = node.order_by
    is_last = False
    if node.time is not None and not columns:
        is_last = node.time.kind in ("as_of", "previous")
        columns = (Order(node.time.child, is_last),)
    orders = [
        f"{_collated(node.table, order.column, alias)}{' DESC' if order.descending else ''} NULLS LAST"
        for order in columns
    ]
    # The last row of one time is the one with the greatest id.
    by_id = f"{_id(node.table, alias)}{COLLATION}{' DESC' if is_last else ''}"
    return ", ".join([*orders, by_id])


def _collated(table: Table, column: str, alias: str) -> str:
    collation = COLLATION if group(table.column(column).type) == TEXTS else ""
    return f"{alias}.{quoted_name(column)}{collation}"


def _end(part: Aggregate, table: Table, order_column: str, alias: str) -> str:
    direction = " DESC" if part.function == "last" else ""
    order = f"{_collated(table, order_column, alias)}{direction}"
    by_id = f"{_id(table, alias)}{COLLATION}{direction}"
    value = f"array_agg({alias}.{quoted_name(part.argument)} ORDER BY {order}, {by_id})"
    conditions = [_expression(part.filter, alias)] if part.filter else []
    conditions.append(f"{alias}.{quoted_name(order_column)} IS NOT NULL")
    return f"({value} FILTER (WHERE {' AND '.join(conditions)}))[1]"


def _aggregate(part: Aggregate, table: Table, order_by: str, alias: str) -> str:
    only = f" FILTER (WHERE {_expression(part.filter, alias)})" if part.filter else ""
    if not part.argument:
        return f"count(*){only}"
    if part.function in ENDS:
        return _end(part, table, order_by, alias)
    argument = f"{alias}.{quoted_name(part.argument)}"
    if part.function == "distinct":
        return f"count(DISTINCT {argument}){only}"
    if part.function not in LISTED:
        return f"{part.function}({argument}){only}"
    ordered = _collated(table, part.argument, alias)
    value = (
        f"percentile_disc({part.fraction!r}) WITHIN GROUP (ORDER BY {ordered}){only}"
        if part.function == "percentile_disc"
        else f"{part.function}({ordered}){only}"
    )
    # Of equal numerics any may come; without the zeros at their end they have one text.
    return f"trim_scale({value})" if table.column(part.argument).type == "numeric" else value


def _document(node: Node, alias: str, parts: _Parts) -> str:
    """Write the text of a row's document, or of the member that stands for it."""
    columns = [
        (column.name, _json_text(column, f"{alias}.{quoted_name(column.name)}"))
        for column in sorted(node.table.columns, key=lambda column: kind(column.type).raw)
        if column.name in node.columns
    ]
    members = [*columns, *parts.members]
    if node.flatten is not None:
        return f"coalesce({dict(members)[node.flatten]}, 'null')"
    texts = [
        f"to_json({quoted(name)}::text)::text || ':' || coalesce({text}, 'null')"
        for name, text in members
    ]
    array = f"ARRAY[{', '.join(texts)}]::text[]"
    return f"'{{' || array_to_string({array}, ',') || '}}'"


def _json_text(column: Column, value: str) -> str:
    return f"to_json({kind(column.type).source.format(value)})::text"


def _id(table: Table, alias: str) -> str:
    """Write the id of a row, as `TableCodec.row_id` computes it."""
    values = [
        kind(table.column(name).type).source.format(f"{alias}.{quoted_name(name)}")
        for name in table.key
    ]
    if len(values) == 1:
        return f"({values[0]})::text"
    texts = ", ".join(f"to_json({value})::text" for value in values)
    return f"('[' || array_to_string(ARRAY[{texts}], ',') || ']')"
