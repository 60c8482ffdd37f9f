"""What a row contributes to the state's indexes, lists and tallies: its entries, see `rows`.

They are computed from the row alone. So what a former version of it has contributed is undone by its
entries, without its values, and without the definition of the view that they were made for.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from cdc.model.table import Table
from cdc.views.plan import Listing, Order, StatePlan, Tally, Values
from cdc.views.rows import (
    CLOSING,
    GROUP,
    LISTING,
    TALLY,
    UNIT,
    document_values,
    escape,
    join_text,
    narrowed,
)
from cdc.views.scalar.amounts import COUNTED, encode_amount, encode_distinct
from cdc.views.scalar.expression import Expression
from cdc.views.scalar.instants import microseconds
from cdc.views.scalar.ordering import order_text, reversed_order, sort_key

NULL_LAST = "~"
"""What a NULL is ordered by, whatever the direction: what has a value begins with `!`."""
Row = Mapping[str, Any]
"""A row's values in the form of documents."""


def entry_maker(plan: StatePlan, table: Table) -> Callable[[bytes], str]:
    """Return the function from a row, as the connector writes it, to its entries as one text."""
    name = table.qualified
    slots, listings, tallies = plan.slots[name], plan.listings[name], plan.tallies[name]
    columns = {
        *(column for slot in slots for value in slot for column in value.columns),
        *(column for listing in listings for column in _columns(listing)),
        *(column for tally in tallies for column in _columns(tally)),
    }
    if not (slots or listings or tallies):
        return lambda _: ""
    used = narrowed(table, frozenset(columns))

    def entries(wire: bytes) -> str:
        row = document_values(wire, used)
        parts = [_entry(str(number), slot, row, ()) for number, slot in enumerate(slots)]
        parts += [
            _closing(
                listing,
                row,
                _entry(
                    f"{LISTING}{number}", listing.values, row, [place_text(listing, table, row)]
                ),
            )
            for number, listing in enumerate(listings)
            if _meets(listing.where, row)
        ]
        parts += [
            _closing(
                tally,
                row,
                _entry(f"{TALLY}{number}", tally.values, row, amounts(tally, table, row)),
            )
            for number, tally in enumerate(tallies)
            if _meets(tally.where, row)
        ]
        return UNIT.join(part for part in parts if part is not None)

    return entries


def latest_times(plan: StatePlan, table: Table, rows: Iterable[bytes], now: int) -> dict[str, int]:
    """Return the latest time that these rows of a table have in the columns which are clocks, by view,
    in microseconds since 1970. One that is later than `now` counts for nothing: a row of the year 2099
    moves no clock.
    """
    clocks = [
        (view.name, view.clock)
        for view in plan.views
        if view.clock is not None and view.root.table.qualified == table.qualified
    ]
    if not clocks:
        return {}
    used = narrowed(table, frozenset(column for _, column in clocks))
    latest: dict[str, int] = {}
    for wire in rows:
        values = document_values(wire, used)
        for view, column in clocks:
            text = values[column]
            moment = None if text is None else microseconds(text)
            if moment is not None and moment <= now:
                latest[view] = max(moment, latest.get(view, moment))
    return latest


def _columns(part: Listing | Tally) -> Iterator[str]:
    for value in (*part.values, *([part.where] if part.where else [])):
        yield from value.columns
    if isinstance(part, Tally):
        yield from (*part.columns, *part.distinct)
    else:
        yield from (order.column for order in part.order_by)


def _meets(condition: Expression | None, row: Row) -> bool:
    return condition is None or condition.evaluate(row) is True


def _entry(
    name: str, values: Values, row: Row, details: "Iterator[str] | list[str] | tuple[()]"
) -> str | None:
    """Write an entry; None where one of the values is NULL, which equals nothing."""
    text = join_text([value.evaluate(row) for value in values])
    return None if text is None else GROUP.join((name, escape(text), *details))


def _closing(part: Listing | Tally, row: Row, entry: str | None) -> str | None:
    """Add to an entry of a pane when it closes: no window that begins later has it."""
    if part.closing is None or entry is None:
        return entry
    begin = microseconds(part.values[-1].evaluate(row))
    assert begin is not None
    return GROUP.join((f"{CLOSING}{part.closing.view}", str(begin + part.closing.after), entry))


def place_text(listing: Listing, table: Table, row: Row) -> str:
    """Write what a list is ordered by before the id."""
    return "".join(_order(order, table, row[order.column]) for order in listing.order_by)


def _order(order: Order, table: Table, value: Any) -> str:
    if value is None:
        return NULL_LAST
    text = order_text(sort_key(table.column(order.column).type)(value))
    return f"!{reversed_order(text) if order.descending else text}"


def amounts(tally: Tally, table: Table, row: Row) -> list[str]:
    """Write what a row adds to a tally, by column, then by column of different values."""
    added = [
        ""
        if row[name] is None
        else encode_amount(table.column(name).type, row[name])
        if name in tally.summed
        else COUNTED
        for name in tally.columns
    ]
    distinct = [
        "" if row[name] is None else encode_distinct(table.column(name).type, row[name])
        for name in tally.distinct
    ]
    return [*added, *distinct]
