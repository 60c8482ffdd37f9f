"""What the state holds of a row, as bytes: its entries, its key, and the row itself.

The entries are what the row contributes to indexes, lists and tallies. They are computed from the row alone.
So what a former version of it has contributed is undone by its entries, without its values, and without the
definition of the view that they were made for.

    <entry> [US <entry> ...] RS <key> RS <row>

    <slot> GS <text>                     the text of the values that a join compares
    l<listing> GS <text> GS <order>      its place in a list
    c<tally> GS <text> [GS <value> ...]  what it adds to a tally, by column; nothing for NULL
    w<view> GS <time> GS <entry>         a place in a list or what it adds to a tally, of a pane that
                                         closes at that time of the view's clock

Key and row are the connector's JSON, which has none of the separators; in a text they are escaped.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from cdc.codec.forms import Documents, FilledValue
from cdc.codec.members import NULL, encode, joined, members
from cdc.codec.table import codec
from cdc.config.view_settings import Order
from cdc.documents.plan import Listing, StatePlan, Tally, Values, is_key, narrowed
from cdc.model.table import Table
from cdc.scalar.amounts import COUNTED, encode_amount, encode_distinct
from cdc.scalar.instants import microseconds
from cdc.scalar.operators import Term
from cdc.scalar.ordering import order_text, reversed_order, sort_key
from cdc.scalar.type_groups import group

GROUP = "\x1d"
"""Separates the parts of an entry."""
RECORD = "\x1e"
"""Separates the parts of a row."""
UNIT = "\x1f"
"""Separates entries."""
LISTING = "l"
TALLY = "c"
CLOSING = "w"
"""What the entries begin with that aren't of slots."""
NULL_LAST = "~"
"""What a NULL is ordered by, whatever the direction: what has a value begins with `!`."""
Row = Mapping[str, Any]
"""A row's values in the form of documents."""
ESCAPES = str.maketrans({"\x1b": "\x1b0", GROUP: "\x1b1", RECORD: "\x1b2", UNIT: "\x1b3"})


class Entries(NamedTuple):
    """What a row is found by.

    slots    by the number of a slot: the text of the row's values; none where one of them is NULL
    places   by the number of a listing: the text of its list, and what the row is ordered by there;
             none where the row is in none of its lists
    tallies  by the number of a tally: the text that the row counts for; none where it doesn't
    """

    slots: Mapping[int, str]
    places: Mapping[int, tuple[str, str]]
    tallies: Mapping[int, str]


class StoredRow(NamedTuple):
    """A row as the state holds it. head: its entries, encoded."""

    head: bytes
    key: bytes
    row: bytes

    @property
    def entries(self) -> Entries:
        """Its entries. Decoded when asked for: of a long list, most rows' entries never are."""
        return decode_entries(self.head.decode())


def join_text(values: Sequence[Any]) -> str | None:
    """Return the text that equal values share; None if one of them is NULL, which equals nothing.

    Of one value it is the id of a row that has the value as its key.
    """
    if len(values) == 1:
        return None if values[0] is None else _text(values[0])
    if None in values:
        return None
    return encode([_text(value) for value in values]).decode()


def _text(value: Any) -> str:
    return value if isinstance(value, str) else encode(value).decode()


def decode_row(stored: bytes) -> StoredRow:
    head, key, row = stored.split(RECORD.encode(), 2)
    return StoredRow(head, key, row)


def decode_entries(head: str) -> Entries:
    slots: dict[int, str] = {}
    places: dict[int, tuple[str, str]] = {}
    tallies: dict[int, str] = {}
    for closing_entry in head.split(UNIT) if head else ():
        # Without the time at which it closes.
        is_closing = closing_entry.startswith(CLOSING)
        entry = closing_entry.split(GROUP, 2)[2] if is_closing else closing_entry
        name, _, rest = entry.partition(GROUP)
        if name.isdecimal():
            slots[int(name)] = unescape(rest)
        elif name.startswith(LISTING):
            text, _, order = rest.partition(GROUP)
            places[int(name.removeprefix(LISTING))] = unescape(text), order
        else:
            tallies[int(name.removeprefix(TALLY))] = unescape(rest.partition(GROUP)[0])
    return Entries(slots, places, tallies)


def escape(text: str) -> str:
    return text if text.isprintable() else text.translate(ESCAPES)


def unescape(text: str) -> str:
    if "\x1b" not in text:
        return text
    for number, character in enumerate((GROUP, RECORD, UNIT), start=1):
        text = text.replace(f"\x1b{number}", character)
    return text.replace("\x1b0", "\x1b")


def value_reader(
    plan: StatePlan, table: Table, values: Values
) -> Callable[[str, Entries], str | None]:
    """Return the function from a row's id and entries to the text of values in it; None: one is NULL."""
    if is_key(table, values):
        return lambda row_id, _: row_id
    number = plan.slots[table.qualified].index(values)
    return lambda _, entries: entries.slots.get(number)


def entry_maker(plan: StatePlan, table: Table) -> Callable[[bytes], str]:
    """Return the function from a row, as the connector writes it, to its entries as one text."""
    name = table.qualified
    slots = plan.slots[name]
    listings = plan.listings[name]
    tallies = plan.tallies[name]
    columns = {
        *(column for slot in slots for value in slot for column in value.columns),
        *(column for listing in listings for column in _columns(listing)),
        *(column for tally in tallies for column in _columns(tally)),
    }
    if not (slots or listings or tallies):
        return lambda _: ""
    used = narrowed(table, columns)

    def entries(wire: bytes) -> str:
        row = codec(used).row_values(wire)
        parts = [_entry(str(number), slot, row, []) for number, slot in enumerate(slots)]
        for number, listing in enumerate(listings):
            if _meets(listing.where, row):
                place = [place_text(listing, table, row)]
                entry = _entry(f"{LISTING}{number}", listing.values, row, place)
                parts.append(_closing(listing, row, entry))
        for number, tally in enumerate(tallies):
            if _meets(tally.where, row):
                added = amounts(tally, table, row)
                entry = _entry(f"{TALLY}{number}", tally.values, row, added)
                parts.append(_closing(tally, row, entry))
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
        values = codec(used).row_values(wire)
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


def _meets(condition: Term | None, row: Row) -> bool:
    return condition is None or condition.evaluate(row) is True


def meeting(condition: Term | None, rows: Mapping[str, Row]) -> dict[str, Row]:
    """Select the rows, by id, that meet a condition; one that is NULL isn't met."""
    return {row_id: row for row_id, row in rows.items() if _meets(condition, row)}


def _entry(name: str, values: Values, row: Row, details: Sequence[str]) -> str | None:
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
    text = order_text(sort_key(group(table.column(order.column).type))(value))
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


class ConnectorRows(Documents):
    """Rows as the connector writes them, reduced to the table's columns: the state's `cdc.codec.forms.Form`."""

    def converter(self, table: Table) -> Callable[[bytes], bytes]:
        # Nothing is left out of what is checked.
        check = codec(replace(table, reshaped=False)).document
        names = [column.name for column in table.columns]

        def convert(row: bytes) -> bytes:
            check(row)
            values = members(row)
            if list(values) == names:
                return row
            return joined({name: values.get(name, NULL) for name in names})

        return convert

    def fill(
        self,
        table: Table,  # noqa: ARG002  # rows name their members
        value: bytes,
        missing: Sequence[str],
        older: bytes,
        older_missing: Sequence[str],
    ) -> FilledValue:
        filled = members(value)
        source = members(older)
        available = [name for name in missing if name in source and name not in older_missing]
        filled.update((name, source[name]) for name in available)
        remaining = tuple(name for name in missing if name not in available and name in filled)
        return FilledValue(joined(filled), remaining)
