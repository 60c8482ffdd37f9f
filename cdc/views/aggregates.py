"""Numbers over the children of a row, as Postgres computes them: exact, in the form of documents."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any

from cdc.config.view_settings import ENDS
from cdc.model.table import Table
from cdc.views.plan import LISTED, Aggregate, Tally
from cdc.views.rows import amounts
from cdc.views.scalar.amounts import EXACT, INTEGERS, count_amounts, total, trimmed
from cdc.views.scalar.ordering import sort_key


def tallied(part: Aggregate, table: Table, tally: Tally, numbers: Mapping[str, int]) -> Any:
    """Compute a count, a sum or a mean from a tally's numbers, see `cdc.views.state.State.tallied`;
    None is NULL.
    """
    if part.argument is None:
        return numbers.get("n", 0)
    if part.function == "distinct":
        place = len(tally.columns) + tally.distinct.index(part.argument)
        return sum(name.startswith(f"s{place}:") for name in numbers)
    place = tally.columns.index(part.argument)
    count = numbers.get(f"c{place}", 0)
    if part.function == "count":
        return count
    if not count:
        return None
    is_whole = table.column(part.argument).type in INTEGERS
    if is_whole and part.function == "sum":
        return numbers.get(f"s{place}", 0)
    prefix = f"s{place}:"
    amount = (
        Decimal(numbers.get(f"s{place}", 0))
        if is_whole
        else total(
            {
                name.removeprefix(prefix): number
                for name, number in numbers.items()
                if name.startswith(prefix)
            }
        )
    )
    return format(amount if part.function == "sum" else _mean(amount, count), "f")


def extreme(type_: str, value: Any) -> Any:
    """Write a value of a column that other rows may have in another form, such as the least one; given
    in the form of documents.
    """
    return trimmed(value) if type_ == "numeric" and value is not None else value


def added(tallies: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Add up the numbers of tallies; what is 0 is left out."""
    sums: dict[str, int] = {}
    for numbers in tallies:
        for name, number in numbers.items():
            sums[name] = sums.get(name, 0) + number
    return {name: number for name, number in sums.items() if number}


class RowAggregates:
    """Aggregates over some of a table's rows at a time. What a row adds is computed once, however often
    it is one of them.

    tally: what counts, sums and means are made of, if there are any
    rows: by id, in the form of documents
    """

    def __init__(
        self,
        parts: Sequence[Aggregate],
        table: Table,
        tally: Tally | None,
        rows: Mapping[str, Mapping[str, Any]],
    ) -> None:
        self._parts = parts
        self._table = table
        self._tally = tally
        self._rows = rows
        self._numbers: Mapping[str, Mapping[str, int]] = {}
        if tally is not None:
            self._numbers = {
                row_id: count_amounts([amounts(tally, table, row)]) for row_id, row in rows.items()
            }

    def over(self, ids: Collection[str]) -> list[Any]:
        """Compute the aggregates over the rows with these ids that there are, in this order; None is NULL."""
        present = [row_id for row_id in ids if row_id in self._rows]
        rows = [self._rows[row_id] for row_id in present]
        numbers: Mapping[str, int] = {}
        if self._tally is not None:
            numbers = added([self._numbers[row_id] for row_id in present])
        values: list[Any] = []
        for part in self._parts:
            if part.function in ENDS:
                assert part.argument is not None
                end = rows[0 if part.function == "first" else -1] if rows else {}
                values.append(end.get(part.argument))
            elif part.function in LISTED:
                values.append(ordered_value(part, self._table, rows))
            else:
                assert self._tally is not None
                values.append(tallied(part, self._table, self._tally, numbers))
        return values


def ordered_value(part: Aggregate, table: Table, rows: Sequence[Mapping[str, Any]]) -> Any:
    """Return the least or the greatest value of some rows, or the percentile; NULL where none has one."""
    assert part.argument is not None
    type_ = table.column(part.argument).type
    present = [row[part.argument] for row in rows if row[part.argument] is not None]
    if not present:
        return None
    if part.function == "percentile_disc":
        assert part.fraction is not None
        present.sort(key=sort_key(type_))
        return extreme(type_, present[rank(part.fraction, len(present)) - 1])
    return extreme(type_, (max if part.function == "max" else min)(present, key=sort_key(type_)))


def rank(fraction: float, count: int) -> int:
    """Return which of so many values, from the smallest on, percentile_disc is: 1 for the first."""
    return max(1, math.ceil(fraction * count))


def _mean(total: Decimal, count: int) -> Decimal:
    """Divide as Postgres divides numerics: with as many decimals as make 16 digits certain, in
    groups of four, and no fewer than the total has.
    """
    if not total.is_finite():
        return total
    weight, first = _leading_group(total)
    count_weight, count_first = _leading_group(Decimal(count))
    quotient_weight = weight - count_weight - (first <= count_first)
    exponent = total.as_tuple().exponent
    assert isinstance(exponent, int)
    decimals = min(max(16 - 4 * quotient_weight, -exponent, 0), 1000)
    numerator, denominator = total.copy_abs().as_integer_ratio()
    rounded = (2 * numerator * 10**decimals + denominator * count) // (2 * denominator * count)
    mean = EXACT.scaleb(Decimal(rounded), -decimals)
    return mean if total >= 0 else mean.copy_negate()


def _leading_group(number: Decimal) -> tuple[int, int]:
    """Return the power of 10,000 of a number's first digits, and these digits as a number."""
    if not number:
        return 0, 0
    weight = number.adjusted() // 4
    return weight, int(EXACT.scaleb(number.copy_abs(), -4 * weight))


def result_type(part: Aggregate, table: Table) -> str:
    """Name the Postgres type of an aggregate."""
    if part.function in ("count", "distinct") or part.argument is None:
        return "bigint"
    type_ = table.column(part.argument).type
    if part.function in LISTED:
        return type_
    return "bigint" if type_ in INTEGERS and part.function == "sum" else "numeric"
