"""Expressions over the columns of one row, as terms, with every operator twice: as a Python function, and
as Postgres' SQL. That both give the same for every value is the promise of this module, and
`tests/integration/test_expressions.py` its proof.

Values have the document form (docs/use/types.md), NULL is None. Integers are exact: where Postgres'
own would overflow, the SQL computes with numerics. Texts are ordered by COLLATE "C", times are in
UTC. Nothing here raises for a value of its type.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, cached_property, partial
from operator import eq, ge, gt, itemgetter, le, lt, ne
from typing import Any, NamedTuple

from cdc.codec.types.temporal import FIRST_MOMENT, FOREVER, from_stamp, moment
from cdc.model.table import Table
from cdc.scalar import type_groups as types
from cdc.scalar.instants import binned, microseconds, text_of
from cdc.scalar.ordering import sort_key

Row = Mapping[str, Any]
Evaluate = Callable[[Row], Any]
ColumnSql = Callable[[str], str]
LOWER = str.maketrans({chr(code): chr(code + 32) for code in range(ord("A"), ord("Z") + 1)})
UPPER = str.maketrans({chr(code + 32): chr(code) for code in range(ord("A"), ord("Z") + 1)})
UNITS = {"year": 0, "quarter": 1, "month": 1, "day": 2, "hour": 3, "minute": 4, "second": 5}
"""What `date_trunc` takes: how many of the parts after the year a unit leaves."""
STARTS = ("01", "01", "00", "00", "00")
"""What it puts into the others, from the month on."""
DATED = re.compile(r"([+-]?\d+)-(\d\d)-(\d\d)(?:T(\d\d):(\d\d):(\d\d)\.\d{6})?Z?", re.ASCII)
FIRST_MONTHS = {"year": (-4712, 1), "quarter": (-4712, 1), "month": (-4713, 12)}
"""The first year and month whose beginning is a time stamp, by unit: the first is 4714-11-24 BC."""
FIRST_MONTH = (-4713, 11)
LAST_YEAR = 294276
COLLATION = ' COLLATE "C"'
NOW = "\0now"
"""Under which a row has the time of the clock, as a document has it; no column has this name."""
SQL_TYPES = {
    types.TEXTS: "text",
    types.NUMERIC: "numeric",
    types.CHARACTER: "bpchar",
    types.UUID: "uuid",
    types.DATE: "date",
    types.TIMESTAMP: "timestamp",
    types.TIMESTAMPTZ: "timestamptz",
}
"""What a constant is cast to."""


class Strict(NamedTuple):
    """An operator whose value is NULL where one of its arguments is; `sql` has {} for each argument."""

    compute: Callable[..., Any]
    sql: str


@dataclass(frozen=True)
class Term:
    """An operator over terms; a column or a constant is one without arguments. Can be pickled.

    operator   a key of `OPERATORS`, or what `strict` knows
    group      of its value
    detail     the name of a column, the value of a constant (numerics are texts), a unit, a pattern,
               microseconds
    """

    operator: str
    group: str
    arguments: tuple["Term", ...] = ()
    detail: str | int | bool | None = None

    @cached_property
    def text(self) -> str:
        """Its normal form: the name of the column if it is nothing else; else SQL, with the clock as now()."""
        if self.operator == "column":
            return str(self.detail)
        return sql_text(self, lambda name: "now()" if name == NOW else quoted_name(name))

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns that it reads, each once."""
        if self.operator == "column":
            return (str(self.detail),)
        names = [name for part in self.arguments for name in part.columns]
        return tuple(dict.fromkeys(names))

    @property
    def reads_clock(self) -> bool:
        """Whether its value changes with time."""
        return self.operator == "now" or any(part.reads_clock for part in self.arguments)

    @cached_property
    def evaluate(self) -> Evaluate:
        """The function from a row's values in the document form, as `msgspec.json` decodes them, with
        Decimal for numbers with a fraction. NULL is None, in and out.
        """
        if self.operator == "column":
            return itemgetter(self.detail)
        if self.operator == "constant":
            return lambda _: self.detail
        if self.operator == "now":
            return itemgetter(NOW)
        arguments = [part.evaluate for part in self.arguments]
        if self.operator in LENIENT:
            return partial(LENIENT[self.operator][0], arguments)
        return partial(_compute, strict(self).compute, arguments)

    def compared_labels(self) -> Iterator[tuple[str, str]]:
        """Yield the name of each enum column that is compared with a text, and that text."""
        if self.operator in ("=", "<>", "coalesce"):
            columns = [
                name for part in self.arguments if part.group == types.ENUM for name in part.columns
            ]
            texts = [part.detail for part in self.arguments if part.operator == "constant"]
            yield from ((name, str(text)) for name in columns for text in texts)
        for part in self.arguments:
            yield from part.compared_labels()

    def __getstate__(self) -> dict[str, Any]:
        # The function can't be pickled; each process makes its own.
        return {field.name: getattr(self, field.name) for field in fields(self)}


def sql_text(term: Term, column: ColumnSql) -> str:
    """Write a term as Postgres' SQL, in which `column` writes the columns of its row."""
    if term.operator == "column":
        name = column(str(term.detail))
        # Compared as text, so that a label that was renamed meanwhile raises no error. A text that
        # isn't a label is refused when the view is resolved.
        return f"{name}::text" if term.group == types.ENUM else name
    if term.operator == "constant":
        if term.group in (types.BOOLEAN, types.INTEGERS):
            return f"({str(term.detail).lower()})"
        return f"{quoted(str(term.detail))}::{SQL_TYPES[term.group]}"
    if term.operator == "now":
        return column(NOW)
    arguments = [sql_text(part, column) for part in term.arguments]
    if term.operator in LENIENT:
        separator = SEPARATORS.get(term.operator, ", ")
        return LENIENT[term.operator][1].format(*arguments, all=separator.join(arguments))
    return strict(term).sql.format(*arguments)


def quoted(text: str) -> str:
    """Write a text as a literal, whatever `standard_conforming_strings` says."""
    escaped = text.replace("'", "''")
    return "E'" + escaped.replace("\\", "\\\\") + "'" if "\\" in text else f"'{escaped}'"


def quoted_name(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def quoted_table(table: Table) -> str:
    return f"{quoted_name(table.schema)}.{quoted_name(table.name)}"


def _compute(compute: Callable[..., Any], arguments: Sequence[Evaluate], row: Row) -> Any:
    values = []
    for argument in arguments:
        value = argument(row)
        if value is None:
            return None
        values.append(value)
    return compute(*values)


@cache
def strict(term: Term) -> Strict:
    """Return the operator of a term that is neither column nor constant nor lenient."""
    operator = term.operator
    if operator in COMPARISONS:
        return _comparison(operator, term.arguments[0].group)
    if operator == "date_trunc":
        return _truncation(str(term.detail), term.arguments[0].group)
    if operator == "like":
        pattern = like_pattern(str(term.detail))
        # So that `str.format` gives its braces back.
        literal = quoted(str(term.detail)).replace("{", "{{").replace("}", "}}")
        sql = f"({{}} LIKE {literal}{COLLATION})"
        return Strict(lambda text: pattern.fullmatch(text) is not None, sql)
    if operator == "bin":
        return _bin(str(term.detail), term.group)
    if operator == "shift":
        return _shift(int(term.detail or 0))
    if operator == "text":
        return Strict(TEXTS.get(term.arguments[0].group, str), "({})::text")
    if operator == "date":
        zone = " AT TIME ZONE 'UTC'" if term.arguments[0].group == types.TIMESTAMPTZ else ""
        return Strict(lambda text: text.partition("T")[0], f"({{}}{zone})::date")
    return OPERATORS[operator]


TEXTS: Mapping[str, Callable[[Any], str]] = {
    types.CHARACTER: lambda text: text.rstrip(" "),
    types.BOOLEAN: lambda value: "true" if value else "false",
}
"""How values become texts, by group; other groups use `str`."""
COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "=": eq,
    "<>": ne,
    "<": lt,
    "<=": le,
    ">": gt,
    ">=": ge,
}


def _comparison(operator: str, group: str) -> Strict:
    compare = COMPARISONS[operator]
    key = sort_key(group)
    collation = COLLATION if group in (types.TEXTS, types.CHARACTER, types.ENUM) else ""
    sql = f"({{}} {operator} {{}}{collation})"
    return Strict(lambda left, right: compare(key(left), key(right)), sql)


def _shift(duration: int) -> Strict:
    """Add an interval to a time. Infinity stays; a result beyond Postgres' time stamps, or the
    connector's, is NULL instead of Postgres' error.
    """
    sql = (
        "(CASE WHEN NOT isfinite({0}) THEN {0}"
        f" WHEN extract(epoch FROM {{0}}) * 1000000 + ({duration})"
        f" BETWEEN {FIRST_MOMENT} AND {FOREVER - 1}"
        f" THEN {{0}} + interval '{duration} microseconds' END)"
    )
    return Strict(partial(shift, duration), sql)


def shift(duration: int, text: str) -> str | None:
    """Add an interval to a time stamp, as documents hold it."""
    if text.endswith("infinity"):
        return text
    start = moment(text if text.endswith("Z") else f"{text}Z")
    if start is None or not FIRST_MOMENT <= start + duration < FOREVER:
        return None
    shifted = from_stamp(start + duration)
    return shifted if text.endswith("Z") else shifted.removesuffix("Z")


def _bin(detail: str, group: str) -> Strict:
    """Cut a time to the beginning of its pane. `detail`: see `binned`."""
    every, start = [int(number) for number in detail.split()]
    origin = text_of(start, has_zone=group == types.TIMESTAMPTZ)
    interval = f"interval '{every} microseconds'"
    sql = f"date_bin({interval}, {{}}, '{origin}'::{SQL_TYPES[group]})"
    return Strict(partial(binned, every, start), sql)


def _truncation(unit: str, group: str) -> Strict:
    """Cut a time. A date becomes a time stamp with a zone, as Postgres reads it in UTC; where it is
    beyond these, or the result would be, it is NULL instead of Postgres' error.
    """
    local = {
        types.TIMESTAMP: "{0}",
        types.TIMESTAMPTZ: "({0} AT TIME ZONE 'UTC')",
        types.DATE: (
            f"CASE WHEN {{0}} <= '{LAST_YEAR}-12-31'::date OR NOT isfinite({{0}}) THEN {{0}}::timestamp END"
        ),
    }[group]
    zone = "" if group == types.TIMESTAMP else " AT TIME ZONE 'UTC'"
    year, month = FIRST_MONTHS.get(unit, FIRST_MONTH)
    first = f"{1 - year}-{month:02d}-{'01' if unit in FIRST_MONTHS else '24'} BC"
    sql = (
        f"(SELECT CASE WHEN t >= '{first}'::timestamp OR NOT isfinite(t)"
        f" THEN date_trunc('{unit}', t){zone} END FROM (SELECT {local} AS t) AS local)"
    )
    return Strict(partial(truncate, unit, "" if group == types.TIMESTAMP else "Z"), sql)


def truncate(unit: str, suffix: str, text: str) -> str | None:
    """Cut a date or a time stamp, as documents hold it, to the beginning of a unit."""
    match = DATED.fullmatch(text)
    if match is None:
        return text
    year, *parts = match.groups(default="00")
    if int(year) > LAST_YEAR or (int(year), int(parts[0])) < FIRST_MONTHS.get(unit, FIRST_MONTH):
        return None
    if unit == "quarter":
        parts[0] = f"{(int(parts[0]) - 1) // 3 * 3 + 1:02d}"
    month, day, hour, minute, second = [*parts[: UNITS[unit]], *STARTS[UNITS[unit] :]]
    return f"{year}-{month}-{day}T{hour}:{minute}:{second}.000000{suffix}"


def like_pattern(pattern: str) -> re.Pattern[str]:
    """Compile a pattern of LIKE. Raises ValueError if it ends with its escape character."""
    parts = []
    characters = iter(pattern)
    for character in characters:
        if character == "\\":
            literal = next(characters, None)
            if literal is None:
                raise ValueError("a pattern ends with its escape character")
            parts.append(re.escape(literal))
        else:
            parts.append({"%": ".*", "_": "."}.get(character, re.escape(character)))
    return re.compile("".join(parts), re.DOTALL)


def _conjunction(arguments: Sequence[Evaluate], row: Row) -> bool | None:
    values = [argument(row) for argument in arguments]
    return False if False in values else None if None in values else True


def _disjunction(arguments: Sequence[Evaluate], row: Row) -> bool | None:
    values = [argument(row) for argument in arguments]
    return True if True in values else None if None in values else False


def _first_value(arguments: Sequence[Evaluate], row: Row) -> Any:
    values = (argument(row) for argument in arguments)
    return next((value for value in values if value is not None), None)


LENIENT: dict[str, tuple[Callable[[Sequence[Evaluate], Row], Any], str]] = {
    "and": (_conjunction, "({all})"),
    "or": (_disjunction, "({all})"),
    "is null": (lambda arguments, row: arguments[0](row) is None, "({} IS NOT DISTINCT FROM NULL)"),
    "is true": (lambda arguments, row: arguments[0](row) is True, "({} IS TRUE)"),
    "is false": (lambda arguments, row: arguments[0](row) is False, "({} IS FALSE)"),
    "coalesce": (_first_value, "COALESCE({all})"),
}
"""Operators that have a value although an argument is NULL, and their SQL."""
SEPARATORS = {"and": " AND ", "or": " OR "}
OPERATORS = {
    "not": Strict(lambda value: not value, "(NOT {})"),
    "+": Strict(lambda left, right: left + right, "({}::numeric + {}::numeric)"),
    "-": Strict(lambda left, right: left - right, "({}::numeric - {}::numeric)"),
    "*": Strict(lambda left, right: left * right, "({}::numeric * {}::numeric)"),
    "negative": Strict(lambda value: -value, "(- {}::numeric)"),
    "||": Strict(lambda left, right: left + right, "({} || {})"),
    "lower": Strict(lambda text: text.translate(LOWER), 'lower({} COLLATE "C")'),
    "upper": Strict(lambda text: text.translate(UPPER), 'upper({} COLLATE "C")'),
    "length": Strict(len, "length({})"),
}
"""The others that are NULL where an argument is."""


@cache
def next_change(term: Term) -> Callable[[Row], int | None]:
    """Return the function from a row, with the clock's time in it, to the first instant after that
    time at which the value of the term may be another one, in microseconds since 1970; None: never.
    """
    times = list(_compared_times(term))

    def first_after(row: Row) -> int | None:
        now = microseconds(row[NOW])
        assert now is not None
        texts = [time(row) for time in times]
        instants = [microseconds(text) for text in texts if text is not None]
        # A comparison may change when the clock reaches the time, and right after that.
        later = [
            moment
            for instant in instants
            if instant is not None
            for moment in (instant, instant + 1)
            if moment > now
        ]
        return min(later, default=None)

    return first_after


def _compared_times(term: Term) -> Iterator[Evaluate]:
    """Yield what now() is compared with."""
    if term.operator in COMPARISONS:
        for side, other in (term.arguments, term.arguments[::-1]):
            if side.operator == "now":
                yield other.evaluate
    for part in term.arguments:
        yield from _compared_times(part)
