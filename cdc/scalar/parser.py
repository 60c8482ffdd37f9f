"""Parse SQL into types. Only what is listed here passes: anything else is refused by its name.

Refused is also what Postgres takes in a way that depends on settings (the collation of LOWER, the
time zone of a literal) or that can fail for a row (division, casts of texts).
"""

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import reduce
from typing import Any

import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError

from cdc.config.durations import microseconds
from cdc.config.mistakes import InvalidSetting
from cdc.model.table import Table
from cdc.scalar import type_groups as types
from cdc.scalar.operators import UNITS, Term, like_pattern

ACCEPTED = (
    "accepted: columns, numbers, texts, = <> < <= > >=, AND, OR, NOT, IS [NOT] NULL, IN, BETWEEN, LIKE,"
    " + - * of integers, time stamps + - interval '2 days', ||, COALESCE, LENGTH, date_trunc, casts to text and date,"
    ' LOWER and UPPER of a text COLLATE "C"'
)
COMPARISONS: Mapping[type[exp.Expr], str] = {
    exp.EQ: "=",
    exp.NEQ: "<>",
    exp.LT: "<",
    exp.LTE: "<=",
    exp.GT: ">",
    exp.GTE: ">=",
}
ARITHMETIC: Mapping[type[exp.Expr], str] = {exp.Add: "+", exp.Sub: "-", exp.Mul: "*"}
CASES: Mapping[type[exp.Expr], str] = {exp.Lower: "lower", exp.Upper: "upper"}
LOOSE = (*COMPARISONS, exp.And, exp.Or, exp.Not, exp.Is, exp.In, exp.Between, exp.Like)
"""What is an operand of something else only in parentheses: Postgres has rules of its own there."""
TIGHT = (*COMPARISONS, *ARITHMETIC, exp.DPipe, exp.Is, exp.In, exp.Between, exp.Like, exp.Neg)
CASTS = {
    "TEXT": types.TEXTS,
    "VARCHAR": types.TEXTS,
    "DATE": types.DATE,
    "TIMESTAMP": types.TIMESTAMP,
    "TIMESTAMPTZ": types.TIMESTAMPTZ,
    "UUID": types.UUID,
}
TEXTUAL = (
    *(types.TEXTS, types.CHARACTER, types.ENUM, types.INTEGERS, types.NUMERIC),
    *(types.UUID, types.BOOLEAN),
)
"""Groups with one text, whatever the session's settings."""
UNKNOWN = "unknown"
"""The group of a text in quotes until what it is compared with gives it one."""
COMPARED = (
    *(types.BOOLEAN, types.INTEGERS, types.NUMERIC, types.TEXTS, types.CHARACTER, types.ENUM),
    *(types.UUID, types.DATE, types.TIMESTAMP, types.TIMESTAMPTZ),
)
NUMBER = re.compile(r"\d+(\.\d+)?", re.ASCII)
SIGNED = re.compile(r"-?\d+(\.\d+)?", re.ASCII)
UUID_TEXT = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.ASCII | re.IGNORECASE)
TIME = re.compile(
    r"(\d{4}-\d\d-\d\d)(?:[ T](\d\d:\d\d)(?::(\d\d)(?:\.(\d{1,6}))?)?)?(Z|\+00(?::?00)?)?", re.ASCII
)
ColumnTypes = Mapping[str, str]
"""Of a table: Postgres types by the names of columns."""


def parse_over(table: Table, text: str, *, has_clock: bool = False) -> Term:
    """Parse an expression over a captured table's row; with `has_clock` also now(). The name of a
    column needn't be written as SQL has it.

    Raises InvalidSetting, also where an enum is compared with a text that isn't one of its labels, as
    Postgres does: if a label were renamed, a condition with its old name would let through what it
    hid.
    """
    columns = {column.name: column.type for column in table.columns}
    term = (
        Term("column", types.group(columns[text]), (), text)
        if text in columns
        else parse(text, columns, has_clock=has_clock)
    )
    for column, label in term.compared_labels():
        labels = table.labels.get(column, (label,))
        if label not in labels:
            near = difflib.get_close_matches(label, labels, n=1)
            raise InvalidSetting(
                f"{table.qualified}.{column} has no label '{label}'",
                f"did you mean '{near[0]}'?" if near else f"its labels: {', '.join(labels)}",
            )
    return term


def parse_condition(table: Table, text: str, *, has_clock: bool = False) -> Term:
    """Parse a condition on a captured table's row, as `parse_over` does. Raises InvalidSetting."""
    term = parse_over(table, text, has_clock=has_clock)
    if term.group != types.BOOLEAN:
        raise InvalidSetting("isn't a condition", "for example: where: status <> 'draft'")
    return term


def parse(text: str, columns: ColumnTypes, *, has_clock: bool = False) -> Term:
    """Parse an expression over a table's columns; with `has_clock` also now(). Raises InvalidSetting."""
    try:
        tree = sqlglot.maybe_parse(text, into=exp.Condition, dialect="postgres")
        term = settle(_Parser(columns, has_clock=has_clock).term(tree), types.TEXTS)
        _require_compared_clock(term)
        return term
    except SqlglotError:
        raise InvalidSetting("is no SQL expression", ACCEPTED) from None
    except RecursionError:
        raise InvalidSetting("is nested too deeply", "take it apart") from None


CLOCK_MISUSED = InvalidSetting(
    "now() is compared with a time of the row", "for example: now() > placed + interval '2 days'"
)


def _require_compared_clock(term: Term) -> None:
    """Refuse now() anywhere but as a side of a comparison."""
    if term.operator == "now":
        raise CLOCK_MISUSED
    for part in term.arguments:
        if part.operator != "now" or term.operator not in COMPARISONS.values():
            _require_compared_clock(part)


class UnknownColumn(InvalidSetting):
    def __init__(self, name: str, columns: ColumnTypes) -> None:
        super().__init__(f"the table has no column {name}", f"its columns: {', '.join(columns)}")
        self.name = name


class _Parser:
    def __init__(self, columns: ColumnTypes, *, has_clock: bool = False) -> None:
        self._columns = columns
        self._has_clock = has_clock
        self._rules: Mapping[type[exp.Expr], Callable[[Any], Term]] = {
            exp.Column: self._column,
            exp.CurrentTimestamp: self._now,
            exp.Paren: self._inside,
            exp.Literal: self._literal,
            exp.Boolean: self._truth,
            exp.Not: self._not,
            exp.And: self._connection,
            exp.Or: self._connection,
            exp.Is: self._is,
            exp.In: self._in,
            exp.Between: self._between,
            exp.Like: self._like,
            exp.Neg: self._negative,
            exp.DPipe: self._concatenation,
            exp.Coalesce: self._coalesce,
            exp.Lower: self._case,
            exp.Upper: self._case,
            exp.Length: self._length,
            exp.Cast: self._cast,
            exp.TimestampTrunc: self._truncation,
            **dict.fromkeys(COMPARISONS, self._comparison),
            **dict.fromkeys(ARITHMETIC, self._arithmetic),
        }

    def term(self, node: exp.Expr) -> Term:
        rule = self._rules.get(type(node))
        if rule is None:
            raise InvalidSetting(f"{_name(node)} isn't supported in expressions", ACCEPTED)
        operands = [node.args.get(name) for name in ("this", "expression", "low", "high")]
        operands += node.expressions
        if isinstance(node, TIGHT) and any(isinstance(part, LOOSE) for part in operands):
            raise InvalidSetting(
                "a condition is part of another expression", "put it in parentheses: (a = b) = c"
            )
        return rule(node)

    def _now(self, node: exp.CurrentTimestamp) -> Term:
        """Parse now(), which is refused where it isn't compared with a time of the row."""
        _require_only(node)
        if not self._has_clock:
            raise InvalidSetting(
                "now() here: only a view's where and having may change with time",
                "in a view, move it to having: payment IS NULL AND now() > placed + interval '2 days'",
            )
        return Term("now", types.TIMESTAMPTZ)

    def _column(self, node: exp.Column) -> Term:
        _require_only(node, "this", "table")
        identifier = node.this
        if not isinstance(identifier, exp.Identifier):
            raise InvalidSetting(f"{_name(identifier)} isn't supported in expressions", ACCEPTED)
        name = _column_name(identifier)
        if (member := node.args.get("table")) is not None:
            if not any("." in column for column in self._columns):
                _require_only(node, "this")
            name = f"{_column_name(member)}.{name}"
        if name not in self._columns:
            raise UnknownColumn(name, self._columns)
        return Term("column", types.group(self._columns[name]), (), name)

    def _inside(self, node: exp.Paren) -> Term:
        _require_only(node, "this")
        return self.term(node.this)

    def _literal(self, node: exp.Literal) -> Term:
        return (
            Term("constant", UNKNOWN, (), node.this) if node.is_string else parse_number(node.this)
        )

    def _truth(self, node: exp.Boolean) -> Term:
        return Term("constant", types.BOOLEAN, (), bool(node.this))

    def _not(self, node: exp.Not) -> Term:
        return Term("not", types.BOOLEAN, (self._boolean(node.this),))

    def _boolean(self, node: exp.Expr) -> Term:
        term = self.term(node)
        if term.group != types.BOOLEAN:
            raise InvalidSetting("AND, OR and NOT take conditions", "for example: a = 1 AND b")
        return term

    def _connection(self, node: exp.And | exp.Or) -> Term:
        operator = "and" if isinstance(node, exp.And) else "or"
        return Term(
            operator, types.BOOLEAN, tuple(map(self._boolean, (node.this, node.expression)))
        )

    def _is(self, node: exp.Is) -> Term:
        _require_only(node, "this", "expression", "negate")
        argument = self.term(node.this)
        tested = node.expression
        if isinstance(tested, exp.Null):
            if argument.group == types.JSON:
                raise InvalidSetting(
                    "NULL and JSON's null look alike in a document", "test another column"
                )
            operator = "is null"
        elif isinstance(tested, exp.Boolean) and argument.group == types.BOOLEAN:
            operator = "is true" if tested.this else "is false"
        else:
            raise InvalidSetting("IS takes NULL, TRUE and FALSE", "for example: a IS NOT NULL")
        return _negated(node, Term(operator, types.BOOLEAN, (settle(argument, types.TEXTS),)))

    def _in(self, node: exp.In) -> Term:
        _require_only(node, "this", "expressions")
        if not node.expressions:
            raise InvalidSetting("IN takes values", "for example: status IN ('open', 'late')")
        left = self.term(node.this)
        tests = [self._compared("=", left, self.term(value)) for value in node.expressions]
        return reduce(lambda first, second: Term("or", types.BOOLEAN, (first, second)), tests)

    def _between(self, node: exp.Between) -> Term:
        _require_only(node, "this", "low", "high")
        value = self.term(node.this)
        low = self._compared(">=", value, self.term(node.args["low"]))
        high = self._compared("<=", value, self.term(node.args["high"]))
        return Term("and", types.BOOLEAN, (low, high))

    def _comparison(self, node: exp.Expr) -> Term:
        operator = COMPARISONS[type(node)]
        return self._compared(operator, self.term(node.this), self.term(node.expression))

    def _compared(self, operator: str, left: Term, right: Term) -> Term:
        """Compare two terms, of which a text in quotes gets the group of the other."""
        for side, other in ((left, right), (right, left)):
            if side.operator == "now" and (
                other.group != types.TIMESTAMPTZ or other.reads_clock or not other.columns
            ):
                raise CLOCK_MISUSED
        group = common_group([left.group, right.group])
        if operator not in ("=", "<>") and group == types.ENUM:
            raise InvalidSetting("the order of an enum isn't in the log", "compare with = or IN")
        return Term(operator, types.BOOLEAN, (settle(left, group), settle(right, group)))

    def _like(self, node: exp.Like) -> Term:
        _require_only(node, "this", "expression", "negate")
        text = self._text(node.this, "LIKE takes a text", "for example: name LIKE 'A%'")
        pattern = node.expression
        if not isinstance(pattern, exp.Literal) or not pattern.is_string:
            raise InvalidSetting("LIKE takes a pattern in quotes", "for example: name LIKE 'A%'")
        try:
            like_pattern(pattern.this)
        except ValueError as error:
            raise InvalidSetting(str(error), "write it twice") from None
        return _negated(node, Term("like", types.BOOLEAN, (text,), pattern.this))

    def _arithmetic(self, node: exp.Expr) -> Term:
        operator = ARITHMETIC[type(node)]
        if isinstance(node, exp.Add | exp.Sub) and isinstance(node.expression, exp.Interval):
            return self._shifted(node.this, node.expression, 1 if operator == "+" else -1)
        if isinstance(node, exp.Add) and isinstance(node.this, exp.Interval):
            return self._shifted(node.expression, node.this, 1)
        arguments = self.term(node.this), self.term(node.expression)
        if any(part.group != types.INTEGERS for part in arguments):
            raise InvalidSetting(f"{operator} takes integers only", "for example: a + 1")
        return Term(operator, types.INTEGERS, arguments)

    def _shifted(self, time: exp.Expr, interval: exp.Interval, sign: int) -> Term:
        argument = self.term(time)
        if argument.group not in (types.TIMESTAMP, types.TIMESTAMPTZ):
            raise InvalidSetting(
                "an interval is added to a time stamp", "for example: placed + interval '2 days'"
            )
        unit = interval.args.get("unit")
        number = interval.this.name if isinstance(interval.this, exp.Literal) else ""
        duration = microseconds(f"{number} {unit.name.lower()}" if unit is not None else number)
        return Term("shift", argument.group, (argument,), sign * duration)

    def _negative(self, node: exp.Neg) -> Term:
        if isinstance(node.this, exp.Literal) and not node.this.is_string:
            return parse_number(node.this.this, "-")
        argument = self.term(node.this)
        if argument.group != types.INTEGERS:
            raise InvalidSetting("- takes integers only", "for example: -a")
        return Term("negative", types.INTEGERS, (argument,))

    def _concatenation(self, node: exp.DPipe) -> Term:
        arguments = self.term(node.this), self.term(node.expression)
        groups = {part.group for part in arguments}
        if not groups <= {types.TEXTS, UNKNOWN, types.INTEGERS} or groups == {types.INTEGERS}:
            raise InvalidSetting("|| takes texts and integers", "for example: carrier || flight")
        texts = tuple(
            Term("text", types.TEXTS, (part,))
            if part.group == types.INTEGERS
            else settle(part, types.TEXTS)
            for part in arguments
        )
        return Term("||", types.TEXTS, texts)

    def _coalesce(self, node: exp.Coalesce) -> Term:
        _require_only(node, "this", "expressions")
        arguments = [self.term(part) for part in (node.this, *node.expressions)]
        group = common_group([part.group for part in arguments])
        return Term("coalesce", group, tuple(settle(part, group) for part in arguments))

    def _case(self, node: exp.Lower | exp.Upper) -> Term:
        name = CASES[type(node)]
        collated = node.this
        _require_only(node, "this")
        collation = collated.expression if isinstance(collated, exp.Collate) else None
        if not isinstance(collation, exp.Identifier) or collation.this != "C":
            raise InvalidSetting(
                f"the result of {name} depends on the collation",
                f'write {name}(column COLLATE "C"), which changes the letters A to Z only',
            )
        example = f'for example: {name}(name COLLATE "C")'
        return Term(
            name, types.TEXTS, (self._text(collated.this, f"{name} takes a text", example),)
        )

    def _length(self, node: exp.Length) -> Term:
        _require_only(node, "this")
        text = self._text(node.this, "length takes a text", "for example: length(name) > 3")
        return Term("length", types.INTEGERS, (text,))

    def _text(self, node: exp.Expr, problem: str, hint: str) -> Term:
        text = settle(self.term(node), types.TEXTS)
        if text.group != types.TEXTS:
            raise InvalidSetting(problem, hint)
        return text

    def _cast(self, node: exp.Cast) -> Term:
        _require_only(node, "this", "to")
        target = node.args["to"]
        group = CASTS.get(target.this.name) if not target.expressions else None
        argument = self.term(node.this)
        if group is not None and argument.operator == "constant" and argument.group == UNKNOWN:
            return settle(argument, group)
        if group == types.TEXTS and argument.group in TEXTUAL:
            return Term("text", types.TEXTS, (argument,))
        if group == types.DATE and argument.group in (types.TIMESTAMP, types.TIMESTAMPTZ):
            return Term("date", types.DATE, (argument,))
        raise InvalidSetting(
            "this cast isn't supported",
            "accepted: integers, numerics, booleans, uuid and enums to text, time stamps to date",
        )

    def _truncation(self, node: exp.TimestampTrunc) -> Term:
        _require_only(node, "this", "unit")
        unit = node.args["unit"].name.lower()
        if unit not in UNITS:
            raise InvalidSetting("date_trunc doesn't take this unit", f"one of: {', '.join(UNITS)}")
        argument = self.term(node.this)
        if argument.group not in (types.DATE, types.TIMESTAMP, types.TIMESTAMPTZ):
            raise InvalidSetting(
                "date_trunc takes a date or a time stamp",
                "for example: date_trunc('hour', made_at)",
            )
        group = types.TIMESTAMP if argument.group == types.TIMESTAMP else types.TIMESTAMPTZ
        return Term("date_trunc", group, (argument,), unit)


def _negated(node: exp.Expr, term: Term) -> Term:
    return Term("not", types.BOOLEAN, (term,)) if node.args.get("negate") else term


def _column_name(identifier: exp.Identifier) -> str:
    name = str(identifier.this)
    return name if identifier.args.get("quoted") else name.lower()


def _require_only(node: exp.Expr, *names: str) -> None:
    if any(value for name, value in node.args.items() if name not in names):
        raise InvalidSetting(f"{_name(node)} isn't supported in this form", ACCEPTED)


def _name(node: exp.Expr) -> str:
    if isinstance(node, exp.Anonymous):
        return str(node.this).upper()
    return node.sql_name() if isinstance(node, exp.Func) else node.key.upper()


def parse_number(digits: str, sign: str = "") -> Term:
    """Parse an integer or a numeric; `sign` is empty or a minus. Raises InvalidSetting."""
    if not NUMBER.fullmatch(digits):
        raise InvalidSetting("a number has digits and a decimal point", "for example: 10.5")
    if "." not in digits:
        return Term("constant", types.INTEGERS, (), int(sign + digits))
    sign = sign if digits.strip("0.") else ""
    return Term("constant", types.NUMERIC, (), sign + digits)


def common_group(groups: Sequence[str]) -> str:
    """Return the group that values of these have in common. Raises InvalidSetting."""
    typed = set(groups) - {UNKNOWN} or {types.TEXTS}
    if typed == {types.INTEGERS, types.NUMERIC}:
        return types.NUMERIC
    if len(typed) > 1 or not typed <= set(COMPARED):
        raise InvalidSetting(
            f"{' and '.join(sorted(typed))} can't be compared", "compare values of one type"
        )
    return typed.pop()


def settle(term: Term, group: str) -> Term:
    """Give a text in quotes the group of what it is compared with. Raises InvalidSetting."""
    if term.group == types.INTEGERS and group == types.NUMERIC:
        return Term(term.operator, group, term.arguments, term.detail)
    if term.group != UNKNOWN:
        return term
    value = _document_form(str(term.detail), group)
    if value is None:
        raise InvalidSetting(
            f"a text in quotes is no {group} here",
            "for example: '2013-01-31', '2013-01-31 10:00:00', with a zone '2013-01-31 10:00:00Z'",
        )
    return Term("constant", types.TEXTS if group == types.ENUM else group, (), value)


def _document_form(text: str, group: str) -> str | None:
    """Return the document form of a text in quotes; None where it is none."""
    if group in (types.TEXTS, types.CHARACTER, types.ENUM):
        return text
    if group == types.UUID:
        return text.lower() if UUID_TEXT.fullmatch(text) else None
    if group == types.NUMERIC:
        return text if SIGNED.fullmatch(text) else None
    match = TIME.fullmatch(text)
    if match is None or group not in (types.DATE, types.TIMESTAMP, types.TIMESTAMPTZ):
        return None
    day, minute, second, fraction, zone = match.groups()
    time = f"{day}T{minute or '00:00'}:{second or '00'}"
    try:
        datetime.fromisoformat(time)
    except ValueError:
        return None
    if group == types.DATE:
        return None if minute else day
    if (zone is not None) != (group == types.TIMESTAMPTZ):
        return None
    return f"{time}.{(fraction or '').ljust(6, '0')}{'Z' if zone else ''}"
