"""Numbers over rows, as Postgres computes them: exact, in the form of documents."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any

from cdc.codec.table import codec
from cdc.config.view_settings import ENDS
from cdc.documents.plan import LISTED, Aggregate, StatePlan, Tally, Totals, narrowed, tally_of
from cdc.documents.rows import NULL_LAST, amounts, meeting
from cdc.documents.state import Place, Span, State, scan_spans
from cdc.model.table import Table
from cdc.scalar.amounts import EXACT, INTEGERS, count_amounts, total, trimmed
from cdc.scalar.operators import Term
from cdc.scalar.ordering import sort_key
from cdc.scalar.type_groups import group


def tallied(part: Aggregate, table: Table, tally: Tally, numbers: Mapping[str, int]) -> Any:
    """Compute a count, a sum or a mean from a tally's numbers, see `State.tallied`; None is NULL."""
    if not part.argument:
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


def added(tallies: Iterable[Mapping[str, int]]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for numbers in tallies:
        for name, number in numbers.items():
            sums[name] = sums.get(name, 0) + number
    return {name: number for name, number in sums.items() if number}


class RowAggregates:
    """Aggregates over some of a table's rows at a time. What a row adds is computed once, however often
    it is one of them.

    rows: by id, in the form of documents
    """

    def __init__(
        self, parts: Sequence[Aggregate], table: Table, rows: Mapping[str, Mapping[str, Any]]
    ) -> None:
        self._names = [part.name for part in parts]
        self._table = table
        self._by_filter = []
        for condition in {part.filter for part in parts}:
            filtered = [part for part in parts if part.filter == condition]
            tally = tally_of((), None, filtered)
            met = meeting(condition, rows)
            numbers = {
                row_id: count_amounts(amounts(tally, table, row)) for row_id, row in met.items()
            }
            self._by_filter.append((filtered, met, tally, numbers))

    def over(self, ids: Collection[str]) -> dict[str, Any]:
        """Compute the aggregates over these rows, in this order, by name. Absent rows are ignored; None is NULL."""
        values: dict[str, Any] = {}
        for parts, rows_by_id, tally, numbers_by_id in self._by_filter:
            present = [row_id for row_id in ids if row_id in rows_by_id]
            rows = [rows_by_id[row_id] for row_id in present]
            numbers = added([numbers_by_id[row_id] for row_id in present])
            for part in parts:
                values[part.name] = (
                    listed_value(part, self._table, rows)
                    if part.function in LISTED
                    else tallied(part, self._table, tally, numbers)
                )
        return {name: values[name] for name in self._names}


class Numbers:
    """What the state has for the rows of some documents: each tally and list is read once, and added up
    once.

    panes: by document, the texts that its rows count for, in the order of time
    """

    def __init__(
        self,
        plan: StatePlan,
        state: State,
        table: Table,
        totals: Totals,
        panes: Mapping[str, Sequence[str]],
    ) -> None:
        self._plan = plan
        self._state = state
        self._table = table
        self._name = table.qualified
        self._totals = totals
        self._panes = panes
        self._texts = {text for texts in panes.values() for text in texts}
        self._tallies: dict[Tally, Mapping[str, Mapping[str, int]]] = {}
        self._sums: dict[Tally, Mapping[str, Mapping[str, int]]] = {}

    def values(self, part: Aggregate) -> Mapping[str, Any]:
        """Return what an aggregate is in each document, in the form of documents."""
        if part.function == "percentile_disc":
            return self._percentiles(part)
        if part.function in LISTED:
            return self._ends(part)
        tally = self._totals.tally(part.where)
        return {
            document_id: tallied(part, self._table, tally, numbers)
            for document_id, numbers in self._added(tally).items()
        }

    def counts(self, where: Term | None) -> Mapping[str, int]:
        """Return how many rows meet a condition, by text; none where there is no such row."""
        numbers = self._read(self._totals.tally(where))
        return {text: tally.get("n", 0) for text, tally in numbers.items()}

    def _read(self, tally: Tally) -> Mapping[str, Mapping[str, int]]:
        if tally not in self._tallies:
            number = self._plan.tallies[self._name].index(tally)
            self._tallies[tally] = self._state.tallied(self._name, number, self._texts)
        return self._tallies[tally]

    def _added(self, tally: Tally) -> Mapping[str, Mapping[str, int]]:
        if tally not in self._sums:
            numbers = self._read(tally)
            self._sums[tally] = {
                document_id: added([numbers[text] for text in texts if text in numbers])
                for document_id, texts in self._panes.items()
            }
        return self._sums[tally]

    def _ends(self, part: Aggregate) -> dict[str, Any]:
        """Find the value of the first or the last row with a value, of each document's lists."""
        texts = list(self._texts)
        spans = [_with_value(text) for text in texts]
        places = self._state.ranged(
            self._name, self._number(part), spans, 1, last_first=part.function == "last"
        )
        end_ids = {text: page[0].id for text, page in zip(texts, places, strict=True) if page}
        values = self._values_of(part, set(end_ids.values()))
        value_by_id = {}
        for document_id, panes in self._panes.items():
            ids = [end_ids[text] for text in panes if text in end_ids]
            rows = [values[row_id] for row_id in ids if row_id in values]
            value_by_id[document_id] = listed_value(part, self._table, rows)
        return value_by_id

    def _percentiles(self, part: Aggregate) -> dict[str, Any]:
        """Find the row of each document's percentile by its place among the rows with a value."""
        tally = self._totals.tally(part.where)
        assert part.fraction is not None
        count = f"c{tally.columns.index(part.argument)}"
        ranks = {
            document_id: rank(part.fraction, numbers[count])
            for document_id, numbers in self._added(tally).items()
            if numbers.get(count)
        }
        number = self._number(part)
        ids = {}
        if all(len(self._panes[document_id]) == 1 for document_id in ranks):
            spans = [
                _with_value(self._panes[document_id][0])._replace(skipped=place - 1)
                for document_id, place in ranks.items()
            ]
            pages = self._state.ranged(self._name, number, spans, 1)
            ids = {
                document_id: page[0].id
                for document_id, page in zip(ranks, pages, strict=True)
                if page
            }
        else:
            # Only all values of the panes say which one is at a place among them.
            texts = list({text for document_id in ranks for text in self._panes[document_id]})
            places: dict[str, list[Place]] = {text: [] for text in texts}
            spans = [_with_value(text) for text in texts]
            for place_of_text, page in scan_spans(self._state, self._name, number, spans):
                places[texts[place_of_text]] += page
            for document_id, place in ranks.items():
                ordered = sorted(
                    row_place for text in self._panes[document_id] for row_place in places[text]
                )
                if place <= len(ordered):
                    ids[document_id] = ordered[place - 1].id
        values = self._values_of(part, set(ids.values()))
        return {
            document_id: listed_value(part, self._table, [values[ids[document_id]]])
            if ids.get(document_id) in values
            else None
            for document_id in self._panes
        }

    def _number(self, part: Aggregate) -> int:
        return self._plan.listings[self._name].index(self._totals.listing(part))

    def _values_of(self, part: Aggregate, ids: Collection[str]) -> dict[str, Mapping[str, Any]]:
        table = narrowed(self._table, [part.argument])
        rows = self._state.rows(self._name, ids)
        return {row_id: codec(table).row_values(row.row) for row_id, row in rows.items()}


def _with_value(text: str) -> Span:
    """Return the part of a list in which the rows are that have a value in what it is ordered by."""
    return Span(text, "!", NULL_LAST)


def listed_value(part: Aggregate, table: Table, rows: Sequence[Mapping[str, Any]]) -> Any:
    """Return the value of an aggregate of `LISTED` over some rows, given in their order; None where there is none."""
    values = [row[part.argument] for row in rows]
    if part.function in ENDS:
        return values[0 if part.function == "first" else -1] if values else None
    present = [value for value in values if value is not None]
    if not present:
        return None
    type_ = table.column(part.argument).type
    key = sort_key(group(type_))
    if part.fraction is not None:
        value = sorted(present, key=key)[rank(part.fraction, len(present)) - 1]
    else:
        value = (max if part.function == "max" else min)(present, key=key)
    # Other rows may have it in another form.
    return trimmed(value) if type_ == "numeric" else value


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
