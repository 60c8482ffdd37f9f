"""Terms of expressions, as plain data, and the groups of types that they have.

A group is a set of Postgres types whose values this package treats alike: compares, orders, joins.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from cdc.model.pg_types import base_type

BOOLEAN = "boolean"
INTEGERS = "integers"
NUMERIC = "numeric"
TEXTS = "texts"
CHARACTER = "character"
ENUM = "enum"
UUID = "uuid"
DATE = "date"
TIMESTAMP = "timestamp without time zone"
TIMESTAMPTZ = "timestamp with time zone"
JSON = "json"
OTHER = "other"
"""Types of which only NULL can be told from a value."""
MEMBERS = {
    **dict.fromkeys(("smallint", "integer", "bigint"), INTEGERS),
    **dict.fromkeys(("text", "character varying", "name"), TEXTS),
    **dict.fromkeys(("json", "jsonb", "hstore"), JSON),
    **{name: name for name in (BOOLEAN, NUMERIC, CHARACTER, UUID, DATE, TIMESTAMP, TIMESTAMPTZ)},
}
Value = str | int | bool
"""Of a constant: its document form. Numerics are texts."""


@cache
def group(type_: str) -> str:
    """Return the group of a column's type, as `format_type` prints it."""
    bare = base_type(type_)
    if type_.endswith("[]"):
        return OTHER
    return MEMBERS.get(bare, ENUM if "." in bare else OTHER)


@dataclass(frozen=True)
class Term:
    """An operator over terms; a column or a constant is one without arguments.

    operator   a key of `operators.OPERATORS`, or what `operators.strict` knows
    group      of its value
    detail     the name of a column, the value of a constant, a unit, a pattern, microseconds
    """

    operator: str
    group: str
    arguments: tuple["Term", ...] = ()
    detail: Value | None = None

    def compared_labels(self) -> Iterator[tuple[str, str]]:
        """Yield the name of each enum column that is compared with a text, and that text."""
        if self.operator in ("=", "<>", "coalesce"):
            columns = [
                name for part in self.arguments if part.group == ENUM for name in part.columns()
            ]
            texts = [part.detail for part in self.arguments if part.operator == "constant"]
            yield from ((name, str(text)) for name in columns for text in texts)
        for part in self.arguments:
            yield from part.compared_labels()

    @property
    def reads_clock(self) -> bool:
        """Whether its value changes with time."""
        return self.operator == "now" or any(part.reads_clock for part in self.arguments)

    def columns(self) -> tuple[str, ...]:
        """Name the columns that it reads, each once."""
        if self.operator == "column":
            return (str(self.detail),)
        names = [name for part in self.arguments for name in part.columns()]
        return tuple(dict.fromkeys(names))
