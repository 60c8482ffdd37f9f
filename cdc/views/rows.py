"""What the state holds of a row, as bytes: its entries, its key, and the row itself.

    <entry> [US <entry> ...] RS <key> RS <row>

    <slot> GS <text>                     the text of the values that a join compares
    l<listing> GS <text> GS <order>      its place in a list
    c<tally> GS <text> [GS <value> ...]  what it adds to a tally, by column; nothing for NULL
    w<view> GS <time> GS <entry>         a place in a list or what it adds to a tally, of a pane that
                                         closes at that time of the view's clock

Key and row are the connector's JSON, which has none of the separators; in a text they are escaped.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Any, NamedTuple

import msgspec

from cdc.codec.forms import FilledValue
from cdc.codec.members import encode, joined, members
from cdc.codec.table import codec
from cdc.model.table import Table
from cdc.views.plan import StatePlan, Values, is_key

GROUP, RECORD, UNIT = "\x1d", "\x1e", "\x1f"
"""Separators: within an entry, between the parts of a row, between entries."""
ESCAPES = str.maketrans({"\x1b": "\x1b0", GROUP: "\x1b1", RECORD: "\x1b2", UNIT: "\x1b3"})
_values = msgspec.json.Decoder(dict[str, Any], float_hook=Decimal).decode


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


LISTING, TALLY, CLOSING = "l", "c", "w"
"""What the entries begin with that aren't of slots."""


class StoredRow(NamedTuple):
    """A row as the state holds it. head: its entries, encoded."""

    head: bytes
    key: bytes
    row: bytes

    @property
    def entries(self) -> Entries:
        """Its entries, taken apart: nobody asks for those of most rows of a long list."""
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
    """Take apart what the state holds of a row."""
    head, key, row = stored.split(RECORD.encode(), 2)
    return StoredRow(head, key, row)


def decode_entries(head: str) -> Entries:
    """Take the entries of a row apart."""
    slots: dict[int, str] = {}
    places: dict[int, tuple[str, str]] = {}
    tallies: dict[int, str] = {}
    for entry in split_entries(head):
        name, _, rest = entry.partition(GROUP)
        if name.isdecimal():
            slots[int(name)] = unescape(rest)
        elif name.startswith(LISTING):
            text, _, order = rest.partition(GROUP)
            places[int(name.removeprefix(LISTING))] = unescape(text), order
        else:
            tallies[int(name.removeprefix(TALLY))] = unescape(rest.partition(GROUP)[0])
    return Entries(slots, places, tallies)


def split_entries(head: str) -> list[str]:
    """Split the entries of a row, without the times at which they close."""
    entries = head.split(UNIT) if head else []
    return [part.split(GROUP, 2)[2] if part.startswith(CLOSING) else part for part in entries]


def escape(text: str) -> str:
    """Write a text without separators."""
    return text if text.isprintable() else text.translate(ESCAPES)


def unescape(text: str) -> str:
    """Return the text that was escaped."""
    if "\x1b" not in text:
        return text
    for number, character in enumerate((GROUP, RECORD, UNIT), start=1):
        text = text.replace(f"\x1b{number}", character)
    return text.replace("\x1b0", "\x1b")


def document_values(row: bytes, table: Table) -> dict[str, Any]:
    """Return the values of a row by column, in the form of documents, from the connector's JSON."""
    return _values(codec(table).document(row))


def narrowed(table: Table, columns: frozenset[str]) -> Table:
    """Return the table with these columns alone."""
    return replace(
        table,
        columns=tuple(column for column in table.columns if column.name in columns),
        reshaped=True,
    )


def value_reader(
    plan: StatePlan, table: Table, values: Values
) -> Callable[[str, Entries], str | None]:
    """Return the function from a row's id and entries to the text of values in it; None where one
    is NULL.
    """
    if is_key(table, values):
        return lambda row_id, _: row_id
    number = plan.slots[table.qualified].index(values)
    return lambda _, entries: entries.slots.get(number)


class ConnectorRows:
    """Rows as the connector writes them, reduced to the columns of the table: the form of the
    state, see `cdc.codec.forms.Form`.
    """

    def converter(self, table: Table) -> Callable[[bytes], bytes]:
        """Return the conversion, which raises Unreadable for a row that no document can hold."""
        # Nothing is left out of what is checked.
        check = codec(replace(table, reshaped=False)).document
        names, null = [column.name for column in table.columns], msgspec.Raw(b"null")

        def convert(row: bytes) -> bytes:
            check(row)
            values = members(row)
            if list(values) == names:
                return row
            return joined({name: values.get(name, null) for name in names})

        return convert

    def fill(
        self,
        table: Table,  # noqa: ARG002  # rows name their members
        value: bytes,
        missing: Sequence[str],
        older: bytes,
        older_missing: Sequence[str],
    ) -> FilledValue:
        """Copy missing members from the older row, as text."""
        filled, source = members(value), members(older)
        available = [name for name in missing if name in source and name not in older_missing]
        filled.update((name, source[name]) for name in available)
        remaining = tuple(name for name in missing if name not in available and name in filled)
        return FilledValue(joined(filled), remaining)

    def size(self, value: bytes) -> int:
        """Count the bytes of the row."""
        return len(value)
