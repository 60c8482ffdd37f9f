"""The codec of one type."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

NUMBER, JSON = "to_json({})", "{}::json"
# What Postgres prints: a cast to text would cut the blanks of char(n) and add /32 to an inet.
TEXT = "CASE WHEN {0} IS DISTINCT FROM NULL THEN concat({0}) END"
Convert = Callable[[Any], Any]


@dataclass(frozen=True)
class TypeCodec:
    """How one type travels and is held. Conversions take values that aren't null; a conversion None
    changes nothing.

    A conversion that fails with ValueError or ArithmeticError, or gives None, says that the value
    can't be held.
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
