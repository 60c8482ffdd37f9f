"""The query of a view: Postgres computes what `assemble` computes, in the same form.

One row per document: the root's columns as they are, aggregates of its children under their names,
and each nested member as json in the form of documents (docs/use/types.md). So it stands wherever
a table's rows are read from. Text is ordered by COLLATE "C", NULL comes last, ids decide what is
equal: the order of `assemble`.
"""

from collections.abc import Sequence
from itertools import count

from cdc.codec.types import kind
from cdc.model.table import Column, Table
from cdc.views.aggregates import result_type
from cdc.views.plan import Aggregate, Node, Order, View
from cdc.views.scalar.expression import Expression
from cdc.views.scalar.operators import COLLATION, quoted, quoted_name, sql_text
from cdc.views.scalar.terms import TEXTS, group

Member = tuple[str, str]
"""A name, and SQL for the text of a value as JSON; its NULL is JSON's null."""


def document_query(view: View) -> str:
    """Write the query of a view's documents, without a semicolon at its end.

    The session's time zone doesn't matter; `extra_float_digits` is 1 or more.
    """
    root, query = view.root, _Query()
    alias = query.alias()
    parts = query.parts(root, alias)
    shown = {*root.columns, *root.table.key}
    columns = [
        f"{alias}.{quoted_name(column.name)}"
        for column in root.table.columns
        if column.name in shown
    ]
    numbers = [f"{value} AS {quoted_name(part.name)}" for part, _, value in parts.numbers]
    nested = [f"({text})::json AS {quoted_name(name)}" for name, text in parts.nested]
    conditions = [_expression(root.where, alias)] if root.where else []
    return _select([*columns, *numbers, *nested], root.table, alias, parts.joins, conditions)


def _select(
    columns: Sequence[str],
    table: Table,
    alias: str,
    joins: Sequence[str],
    conditions: Sequence[str],
) -> str:
    only = "ONLY " if table.has_children else ""
    name = f"{only}{quoted_name(table.schema)}.{quoted_name(table.name)}"
    where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    return f"SELECT {', '.join(columns)} FROM {' '.join([f'{name} AS {alias}', *joins])}{where}"


class _Parts:
    """What a row's document gets from its children, and the joins that it comes from.

    numbers  an aggregate, its Postgres type, SQL for its value
    """

    def __init__(self) -> None:
        self.joins: list[str] = []
        self.numbers: list[tuple[Aggregate, str, str]] = []
        self.nested: list[Member] = []

    @property
    def members(self) -> list[Member]:
        """The members in their order in a document."""
        numbers = [
            (part.name, _json_text(Column(part.name, type_), value))
            for part, type_, value in self.numbers
        ]
        return [*numbers, *self.nested]


class _Query:
    def __init__(self) -> None:
        self._numbers = count()

    def alias(self) -> str:
        """Return a name that the query doesn't use yet."""
        return f"t{next(self._numbers)}"

    def parts(self, node: Node, alias: str) -> _Parts:
        """Build what a row of the node, called `alias`, gets from its children."""
        parts = _Parts()
        for child in node.children:
            if child.aggregates:
                numbers = self.alias()
                parts.joins.append(_lateral(self._aggregates(child, alias), numbers))
                parts.numbers += [
                    (part, result_type(part, child.table), f"{numbers}.{quoted_name(part.name)}")
                    for part in child.aggregates
                ]
            if child.shows:
                member = self.alias()
                parts.joins.append(_lateral(self._member(child, alias), member))
                parts.nested.append((child.field, f"{member}.value"))
        return parts

    def _aggregates(self, node: Node, parent: str) -> str:
        alias = self.alias()
        columns = [
            f"{_aggregate(part, node.table, alias)} AS {quoted_name(part.name)}"
            for part in node.aggregates
        ]
        return _select(columns, node.table, alias, (), _conditions(node, parent, alias))

    def _member(self, node: Node, parent: str) -> str:
        """Write the query of a node's value, of one row with one column `value`; no row is NULL."""
        alias = self.alias()
        parts = self.parts(node, alias)
        document = _document(node, alias, parts)
        conditions = _conditions(node, parent, alias)
        order = ", ".join([*_ordering(node, alias), f"{_id(node.table, alias)}{COLLATION}"])
        if not node.many:
            query = _select([f"{document} AS value"], node.table, alias, parts.joins, conditions)
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


def _conditions(node: Node, parent: str, alias: str) -> list[str]:
    assert node.join is not None
    pairs = zip(node.join.parent, node.join.child, strict=True)
    conditions = [
        f"{_expression(left, parent)} = {_expression(right, alias)}" for left, right in pairs
    ]
    return [*conditions, *([_expression(node.where, alias)] if node.where else [])]


def _expression(expression: Expression, alias: str) -> str:
    if expression.term is None:
        return f"{alias}.{quoted_name(expression.text)}"
    return sql_text(expression.term, lambda name: f"{alias}.{quoted_name(name)}")


def _ordering(node: Node, alias: str) -> list[str]:
    return [_order(order, node.table, alias) for order in node.order_by]


def _order(order: Order, table: Table, alias: str) -> str:
    collation = COLLATION if _is_text(table, order.column) else ""
    direction = " DESC" if order.descending else ""
    return f"{alias}.{quoted_name(order.column)}{collation}{direction} NULLS LAST"


def _is_text(table: Table, column: str) -> bool:
    return group(table.column(column).type) == TEXTS


def _aggregate(part: Aggregate, table: Table, alias: str) -> str:
    if part.argument is None:
        return "count(*)"
    argument = f"{alias}.{quoted_name(part.argument)}"
    if part.function not in ("min", "max"):
        return f"{part.function}({argument})"
    collation = COLLATION if _is_text(table, part.argument) else ""
    value = f"{part.function}({argument}{collation})"
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
    """Write the text of a value as JSON, in the form of documents."""
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
