"""The codec of one table: ids, and rows as the connector's JSON, as documents, as columns of the
warehouse.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import msgspec

from cdc.codec.members import NULL, encode, joined, members
from cdc.codec.problem import MISFIT, Unreadable, ValueNotRepresentable
from cdc.codec.types import TypeCodec, kind
from cdc.codec.types.arrow import arrow, portable
from cdc.codec.types.kind import CONVERSION_ERRORS
from cdc.codec.types.nested import column_kind
from cdc.model.table import Column, Table

if TYPE_CHECKING:
    import pyarrow as pa

NO_KEY = "its key is not one of the table"
READ_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, Unreadable)
Read = Callable[[bytes], Sequence[Any]]
UNNAMEABLE = re.compile(r'["\\\x00-\x1f]')
"""Characters that a msgspec field's name can't have."""
NULL_TEXT = bytes(NULL)
_values = msgspec.json.Decoder(dict[str, Any], float_hook=Decimal).decode


@cache
def codec(table: Table) -> "TableCodec":
    """Return the codec of a table; made once per process."""
    return TableCodec(table)


class TableCodec:
    """Converts the rows of a table.

    Any thread may use it; costly parts are made at their first use.
    """

    def __init__(self, table: Table) -> None:
        self.table = table
        # Values of json last, as Postgres writes them for `verify`: rows that are written alike
        # needn't be parsed.
        self._columns = sorted(table.columns, key=lambda column: column_kind(column).raw)
        self._template = _template(self._columns)
        self._words = document_words(table)
        self._conversions = [
            (index, column, column_kind(column).document, column_kind(column).lost)
            for index, column in enumerate(self._columns)
            if column_kind(column).is_converted
        ]
        self._holders = [
            (index, column, hold)
            for index, column in enumerate(table.columns)
            if (hold := column_kind(column).column_conversion()) is not None
        ]

    def row_id(self, key: bytes) -> str:
        """Return the id of a row in every view, from the connector's key JSON: the document form of
        its key columns.

        One key column is its text, several are a JSON array; `cdc.model.table.row_id` is its twin.

        Raises:
            Unreadable: the key isn't one of the table.
        """
        try:
            values = self._key_values(key)
            if None in values:
                raise Unreadable(NO_KEY)
            if self._key_converted:
                values = [
                    convert(value) if convert else value
                    for convert, value in zip(self._key_forms, values, strict=True)
                ]
        except (*READ_ERRORS, *CONVERSION_ERRORS):
            raise Unreadable(NO_KEY) from None
        if len(values) > 1:
            return encode(values).decode()
        single = values[0]
        return single if type(single) is str else encode(single).decode()

    def document(self, row: bytes) -> bytes:
        """Convert a row to the JSON document of a search index or a cache, on one line.

        Returns the connector's own text where no value needs another form. Rows of tables that need
        one for rare values only are searched for these first. One line, because a bulk request is
        lines of JSON.

        Raises:
            Unreadable: a value is none of its column's type.
            ValueNotRepresentable: the connector has damaged a value; names the column.
        """
        try:
            self._check(row)
        except READ_ERRORS:
            raise Unreadable(MISFIT) from None
        if self._words is None:
            return self._template % tuple(self._document_values(row))
        for word in self._words:
            if word in row:
                return self._template % tuple(self._document_values(row))
        return row.replace(b"\n", b" ") if b"\n" in row else row

    def row_values(self, row: bytes) -> dict[str, Any]:
        """Decode the document of a row: values by column, numbers with a fraction as Decimal.

        Raises as `document` does.
        """
        values: dict[str, Any] = _values(self.document(row))
        return values

    def _document_values(self, row: bytes) -> list[Any]:
        try:
            values = list(self._members(row))
        except READ_ERRORS:
            raise Unreadable(MISFIT) from None
        for index, column, convert, lost in self._conversions:
            value = values[index]
            if value is None:
                values[index] = NULL
                continue
            try:
                damaged = lost is not None and lost(value)
                converted = convert(value) if convert and not damaged else value
            except CONVERSION_ERRORS:
                damaged = True
            if damaged:
                raise self._damaged(column)
            values[index] = encode(converted)
        return values

    @cached_property
    def schema(self) -> "pa.Schema":
        """Columns of the warehouse, with the names that it has for them."""
        import pyarrow as pa

        return pa.schema(
            [(column.name, arrow(column_kind(column).column)) for column in self.table.columns]
        )

    def values(self, row: bytes) -> tuple[Any, ...]:
        """Convert a row to the values of the columns of `schema`, as `pyarrow.array` takes them;
        None for missing ones.

        Raises:
            Unreadable: a value is none of its column's type. ValueNotRepresentable: the warehouse
            has no way to hold a value, or the connector has damaged it.
        """
        try:
            values = list(self._column_values(row))
        except READ_ERRORS:
            raise self._mismatch(row) from None
        for index, column, hold in self._holders:
            value = values[index]
            if value is not None:
                try:
                    converted = hold(value)
                except CONVERSION_ERRORS:
                    converted = None
                if converted is None:
                    raise self._not_representable(column, value)
                values[index] = converted
        return tuple(values)

    def problem(self, row: bytes, *, warehouse: bool) -> str | None:
        """Say what keeps the connector's JSON of a row out of a view; None when it fits.

        Checks every column.
        """
        try:
            values = self._wire(row)
        except READ_ERRORS:
            return MISFIT
        for column, value in zip(self.table.columns, values, strict=True):
            if value is None:
                continue
            if column_kind(column).is_damaged(value):
                return self._damaged(column).problem
            if warehouse and not column_kind(column).can_hold(value):
                return self._not_representable(column, value).problem
        return None

    def documents(self, batch: "pa.RecordBatch") -> "pa.Array":
        """Convert rows from the columns of `schema` back to documents."""
        import pyarrow as pa

        columns = [
            self._texts(batch.column(column.name), column_kind(column)) for column in self._columns
        ]
        documents = [self._template % row for row in zip(*columns, strict=True)]
        return pa.array(documents, pa.binary()).cast(pa.string())

    @staticmethod
    def _texts(column: "pa.Array", type_codec: TypeCodec) -> list[bytes]:
        """Write every value of a column as JSON."""
        type_ = arrow(type_codec.column)
        convert = type_codec.from_column
        values = column.cast(type_).cast(portable(type_)).to_pylist()
        if convert:
            return [b"null" if value is None else encode(convert(value)) for value in values]
        return [encode(value) for value in values]

    def _mismatch(self, row: bytes) -> Unreadable:
        """Say why a row doesn't fit the columns; names the column if the values are of the table's
        types.
        """
        try:
            values = self._wire(row)
        except READ_ERRORS:
            return Unreadable(MISFIT)
        for column, value in zip(self.table.columns, values, strict=True):
            if value is not None and not column_kind(column).can_hold(value):
                return self._not_representable(column, value)
        return Unreadable(MISFIT)

    def _not_representable(self, column: Column, value: Any) -> ValueNotRepresentable:
        if column_kind(column).is_damaged(value):
            return self._damaged(column)
        return ValueNotRepresentable(
            f"the warehouse can not hold its {column.source_name}", self._describe(column)
        )

    def _damaged(self, column: Column) -> ValueNotRepresentable:
        return ValueNotRepresentable(
            f"the connector has damaged its {column.source_name}", self._describe(column)
        )

    def _describe(self, column: Column) -> str:
        return f"{self.table.qualified}.{column.source_name} ({column.type})"

    @cached_property
    def _key_values(self) -> Read:
        return reader({name: kind(self.table.column(name).type).wire for name in self.table.key})

    @cached_property
    def _key_forms(self) -> list[Any]:
        return [kind(self.table.column(name).type).document for name in self.table.key]

    @cached_property
    def _key_converted(self) -> bool:
        return any(self._key_forms)

    @cached_property
    def _members(self) -> Read:
        """Reader of a row for a document; values that need no conversion stay text."""
        kinds = {column.source_name: column_kind(column) for column in self._columns}
        return reader(
            {
                name: type_codec.wire if type_codec.is_converted else msgspec.Raw
                for name, type_codec in kinds.items()
            }
        )

    @cached_property
    def _column_values(self) -> Read:
        kinds = {column.source_name: column_kind(column) for column in self.table.columns}
        return reader(
            {name: type_codec.within or type_codec.wire for name, type_codec in kinds.items()}
        )

    @cached_property
    def _wire(self) -> Read:
        return reader(self._wires)

    @cached_property
    def _check(self) -> Callable[[bytes], None]:
        return checker(self._wires)

    @property
    def _wires(self) -> dict[str, Any]:
        return {column.source_name: column_kind(column).wire for column in self.table.columns}


def document_words(table: Table) -> list[bytes] | None:
    """Return words without which a row is its own document; None when every row has to be
    converted.
    """
    converted = [
        column_kind(column) for column in table.columns if column_kind(column).is_converted
    ]
    if table.reshaped or any(not type_codec.words for type_codec in converted):
        return None
    return sorted({word.encode() for type_codec in converted for word in type_codec.words})


def _template(columns: Iterable[Column]) -> bytes:
    """Build a document with %b in the place of every value."""
    names = [encode(column.name).replace(b"%", b"%%") for column in columns]
    return b"{" + b",".join([name + b":%b" for name in names]) + b"}"


def reader(fields: Mapping[str, Any]) -> Callable[[bytes], Sequence[Any]]:
    """Build a function from the text of an object to the values of these members, in their order.

    Types are msgspec's; Raw gives a value's own text. A member that the object lacks is null; one
    that is no string where a text is asked for is its JSON text: the log holds numbers from before
    a column became a text or a numeric. The function raises msgspec.DecodeError, ValueError or
    RecursionError for what is no such object.
    """
    strict = _strict(fields)
    texts = [name for name, type_ in fields.items() if type_ is str]

    def read(text: bytes) -> Sequence[Any]:
        try:
            return strict(text)
        except msgspec.ValidationError:
            return strict(_with_texts(text, texts))

    return read if texts else strict


def checker(fields: Mapping[str, Any]) -> Callable[[bytes], None]:
    """Build a function that raises as `reader`'s does where a member isn't of its type, and returns
    nothing.
    """
    texts = [name for name, type_ in fields.items() if type_ is str]
    if any(map(UNNAMEABLE.search, fields)):
        read = reader(fields)

        def check_by_reading(text: bytes) -> None:
            read(text)

        return check_by_reading
    decode = _decoder(fields)

    def check(text: bytes) -> None:
        try:
            decode(text)
        except msgspec.ValidationError:
            decode(_with_texts(text, texts))

    return check


def _with_texts(text: bytes, names: Sequence[str]) -> bytes:
    values: dict[str, msgspec.Raw | bytes] = {**members(text)}
    for name in names:
        value = bytes(values.get(name, NULL))
        if value != NULL_TEXT and not value.startswith(b'"'):
            values[name] = encode(value.decode())
    return joined(values)


def _strict(fields: Mapping[str, Any]) -> Callable[[bytes], Sequence[Any]]:
    if any(map(UNNAMEABLE.search, fields)):
        return _decode_as_list(list(fields), _types(fields))
    decode = _decoder(fields)
    values = msgspec.structs.astuple

    def read(text: bytes) -> Sequence[Any]:
        return values(decode(text))

    return read


def _types(fields: Mapping[str, Any]) -> list[Any]:
    return [type_ if type_ is msgspec.Raw else type_ | None for type_ in fields.values()]


def _decoder(fields: Mapping[str, Any]) -> Callable[[bytes], Any]:
    """Build a decoder to a struct of these members."""
    slots = {f"f{index}": name for index, name in enumerate(fields)}
    struct_fields = [
        (slot, type_, NULL if type_ is msgspec.Raw else None)
        for slot, type_ in zip(slots, _types(fields), strict=True)
    ]
    return msgspec.json.Decoder(
        msgspec.defstruct("Row", struct_fields, rename=slots, gc=False)
    ).decode


def _decode_as_list(names: Sequence[str], types: Sequence[Any]) -> Callable[[bytes], Sequence[Any]]:
    """Build the same function for names that no struct can have: it decodes the members' texts as a
    list.
    """
    decode = msgspec.json.Decoder(tuple[tuple(types)]).decode  # type: ignore[misc]

    def read(text: bytes) -> Sequence[Any]:
        values = members(text)
        result: tuple[Any, ...] = decode(
            b"[" + b",".join([values.get(name, NULL) for name in names]) + b"]"
        )
        return result

    return read
