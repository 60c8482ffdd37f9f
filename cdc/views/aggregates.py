"""Numbers over the children of a row, as Postgres computes them: exact, in the form of documents."""

from collections.abc import Mapping, Sequence
from decimal import Context, Decimal
from typing import Any

from cdc.model.table import Table
from cdc.views.ordering import sort_key
from cdc.views.plan import Aggregate

EXACT = Context(prec=100_000)
WHOLE = ("smallint", "integer")
"""Types whose sum is a bigint, a number in a document; that of others is a numeric, a text."""


def aggregate(part: Aggregate, table: Table, rows: Sequence[Mapping[str, Any]]) -> Any:
    """Compute an aggregate over rows, given as values in the form of documents; None is NULL."""
    if part.argument is None:
        return len(rows)
    values = [value for row in rows if (value := row[part.argument]) is not None]
    if part.function == "count":
        return len(values)
    return _reduce(part, table.column(part.argument).type, values) if values else None


def _reduce(part: Aggregate, type_: str, values: Sequence[Any]) -> Any:
    if part.function == "min":
        return min(values, key=sort_key(type_))
    if part.function == "max":
        return max(values, key=sort_key(type_))
    if type_ in WHOLE:
        return sum(values)
    total = Decimal(0)
    for value in values:
        total = EXACT.add(total, Decimal(value))
    return format(total, "f")


def result_type(part: Aggregate, table: Table) -> str:
    """Name the Postgres type of an aggregate."""
    if part.function == "count" or part.argument is None:
        return "bigint"
    type_ = table.column(part.argument).type
    if part.function in ("min", "max"):
        return type_
    return "bigint" if type_ in WHOLE else "numeric"
