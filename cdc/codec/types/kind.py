"""The codec of one type."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

NUMBER = "to_json({})"
JSON = "{}::json"
# What Postgres prints: a cast to text would cut the blanks of char(n) and add /32 to an inet.
TEXT = "CASE WHEN {0} IS DISTINCT FROM NULL THEN concat({0}) END"
Convert = Callable[[Any], Any]
CONVERSION_ERRORS = (ValueError, ArithmeticError)
"""Errors that a conversion raises for a value that has no such form."""


@dataclass(frozen=True)
class TypeCodec:
    """How one type travels and is held. Conversions take values that aren't null; a conversion None
    changes nothing.

    A conversion that fails with one of CONVERSION_ERRORS, or gives None, says that the value can't
    be held.
    """

    name: str
    wire: Any = str
    """The type, for msgspec, of what the connector writes."""
    document: Convert | None = None
    """From the wire: the value whose JSON stands in a document."""
    words: tuple[str, ...] = ()
    """When given, `document` and `lost` matter only to a row whose JSON contains one of these."""
    lost: Callable[[Any], bool] | None = None
    """Of the wire: whether the connector has damaged the value beyond repair.

    No view takes such a row.
    """
    raw: bool = False
    """The document form is JSON text, set in as it is."""
    column: str = "string"
    """The type of the warehouse column, as Spark and Delta write it."""
    within: Any = None
    """The type of the wire values that the column holds, where that is narrower than `wire`."""
    to_column: Convert | None = None
    """From the wire: what Arrow takes for the column; days and microseconds since 1970 as
    numbers.
    """
    from_column: Convert | None = None
    """The reverse: from the column to what `document` gives; from what `arrow.portable` casts it
    to.
    """
    source: str = TEXT
    compare: str = "text"
    """How verify compares: text; json by value, its numbers by their text; the others by value, as
    their names say.
    """

    @property
    def is_text(self) -> bool:
        """Say whether every value is a string in a document."""
        return self.compare == "text" and "to_json" not in self.source

    @property
    def is_converted(self) -> bool:
        """Say whether a document's value may differ from the connector's, or be damaged."""
        return self.document is not None or self.lost is not None

    def column_conversion(self) -> Convert | None:
        """Return the conversion from wire to column, which gives None for a value that can't be held.

        None itself where every value is held as it is.
        """
        if self.lost is None:
            return self.to_column
        lost = self.lost
        convert = self.to_column

        def hold(value: Any) -> Any:
            if lost(value):
                return None
            return convert(value) if convert else value

        return hold

    def is_damaged(self, value: Any) -> bool:
        """Say whether no document can have a value of the wire."""
        try:
            return (self.lost is not None and self.lost(value)) or (
                self.document is not None and self.document(value) is None
            )
        except CONVERSION_ERRORS:
            return True

    def can_hold(self, value: Any) -> bool:
        """Say whether the column can have a value of the wire."""
        if self.within and not _is_of_type(value, self.within):
            return False
        hold = self.column_conversion()
        try:
            return hold is None or hold(value) is not None
        except CONVERSION_ERRORS:
            return False


def _is_of_type(value: Any, type_: Any) -> bool:
    try:
        msgspec.convert(value, type_)
    except msgspec.ValidationError:
        return False
    return True
