"""Expressions: Python gives what Postgres gives, for every expression that is accepted and every
row. Postgres is asked twice: for the text as a person wrote it, and for the SQL that `verify` asks.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.codec.types import kind
from cdc.scalar import operators
from cdc.scalar.operators import Term, sql_text
from cdc.scalar.parser import parse
from tests.support.budget import budget
from tests.support.postgres import sibling

COLUMNS = {
    "i": "integer",
    "b": "bigint",
    "n": "numeric",
    "m": "numeric(6,2)",
    "t": "text",
    "v": "character varying(9)",
    "Odd name": "text",
    "c": "character(4)",
    "e": "public.mood",
    "yes": "boolean",
    "no": "boolean",
    "u": "uuid",
    "d": "date",
    "s": "timestamp without time zone",
    "z": "timestamp with time zone",
    "f": "double precision",
}
TEXT = st.one_of(
    st.sampled_from(["", "a", "ab", "A", "Ä", "ß", "z", "a%", "a_b", "a\\b", "a'b", "{a}", "🎈", "a\nb"]),
    st.text("abAB %_\\'🎈{}", max_size=5),
)  # fmt: skip
DATES = [
    *("2013-01-01", "2012-12-31", "2024-02-29", "0001-01-01", "9999-12-31", "infinity"),
    *("-infinity", "0044-03-15 BC", "4714-11-24 BC", "4713-01-01 BC", "12000-06-07", "5874897-12-31"),
    *("294276-12-31", "294277-01-01"),
]  # fmt: skip
CLOCKS = ["00:00:00", "23:59:59.999999", "10:30:00", "10:30:00.5", "12:34:56.000001"]
STAMPS = [
    *(f"{date} {clock}" for date in DATES[:5] for clock in CLOCKS),
    *("infinity", "-infinity", "0044-03-15 10:00:00 BC", "4714-11-24 00:00:00 BC"),
    *("4713-01-01 00:00:00 BC", "12000-06-07 01:02:03", "294246-12-31 23:59:59.999999"),
]
VALUES: dict[str, st.SearchStrategy[str]] = {
    "i": st.sampled_from(["0", "1", "-1", "7", "2147483647", "-2147483648"]),
    "b": st.sampled_from(["0", "1", "-1", "7", "9223372036854775807", "-9223372036854775808"]),
    "n": st.sampled_from(
        ["0", "1", "1.0", "1.00", "-7.5", "7", "NaN", "Infinity", "-Infinity", "1e-20", "12345678901234567890.5"]
    ),
    "m": st.sampled_from(["0", "1", "-7.5", "9999.99", "NaN", "7.25"]),
    "t": TEXT,
    "v": TEXT,
    "Odd name": TEXT,
    "c": st.sampled_from(["", "a", "ab", "a  ", "abcd", "ä", "%"]),
    "e": st.sampled_from(["sad", "ok", "a"]),
    "yes": st.sampled_from(["true", "false"]),
    "no": st.sampled_from(["true", "false"]),
    "u": st.sampled_from(["00000000-0000-0000-0000-000000000000", "f0000000-0000-4000-8000-00000000000a"]),
    "d": st.sampled_from(DATES),
    "s": st.sampled_from(STAMPS),
    "z": st.sampled_from(STAMPS),
    "f": st.sampled_from(["0.1", "NaN"]),
}  # fmt: skip
ROWS = st.fixed_dictionaries({name: st.none() | values for name, values in VALUES.items()})


def joined(*parts: st.SearchStrategy[str], template: str) -> st.SearchStrategy[str]:
    return st.tuples(*parts).map(lambda values: template.format(*values))


def literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


COMPARISON = st.sampled_from(["=", "<>", "!=", "<", "<=", ">", ">="])
EQUALITY = st.sampled_from(["=", "<>"])
INTEGER = st.recursive(
    st.sampled_from(["i", "b", "0", "1", "-1", "7", "(- 7)", "99999999999"]),
    lambda inner: st.one_of(
        joined(inner, st.sampled_from("+-*"), inner, template="({} {} {})"),
        # A double minus would begin a comment.
        joined(inner, template="(- {})"),
        joined(inner, inner, template="coalesce({}, {})"),
        joined(st.sampled_from(["t", "v", '"Odd name"']), template="length({})"),
    ),
    max_leaves=4,
)
NUMBER = st.one_of(
    INTEGER,
    st.sampled_from(["n", "m", "7.25", "-7.5", "0.0", "-0.0", "1.000"]),
    st.just("coalesce(n, m)"),
    joined(INTEGER, template="coalesce(m, {})"),
)
TEXTS = st.recursive(
    st.one_of(
        st.sampled_from(
            ["t", "v", '"Odd name"', "i::text", "CAST(b AS text)", "n::text", "u::text"]
        ),
        st.sampled_from(["yes::text", "e::text", "c::text", "'a'::text", "text 'a'"]),
    ),
    lambda inner: st.one_of(
        joined(inner, inner, template="({} || {})"),
        joined(inner, st.sampled_from(["i", "(b + 1)", "'x'"]), template="({} || {})"),
        joined(st.sampled_from(["lower", "UPPER"]), inner, template='{}({} COLLATE "C")'),
        joined(inner, inner, template="coalesce({}, {}, '')"),
    ),
    max_leaves=4,
)
UNITS = st.sampled_from(sorted(operators.UNITS))
STAMP = st.one_of(st.just("s"), joined(UNITS, template="date_trunc('{}', s)"))
ZONED = st.one_of(
    st.just("z"),
    joined(UNITS, template="date_trunc('{}', z)"),
    joined(UNITS, template="date_trunc('{}', d)"),
    joined(UNITS, template="date_trunc('{}', date_trunc('hour', z))"),
)
DAY = st.sampled_from(
    ["d", "s::date", "z::date", "'2013-01-01'::date", "date_trunc('month', z)::date"]
)
PATTERN = st.one_of(TEXT, st.text("ab%_\\", max_size=4)).filter(
    lambda text: (len(text) - len(text.rstrip("\\"))) % 2 == 0
)
CONDITION = st.recursive(
    st.one_of(
        st.sampled_from(["yes", "no", "true", "FALSE"]),
        joined(NUMBER, COMPARISON, NUMBER, template="{} {} {}"),
        joined(TEXTS, COMPARISON, TEXTS, template="{} {} {}"),
        joined(
            st.sampled_from(["t", "c", "v"]), COMPARISON, TEXT.map(literal), template="{} {} {}"
        ),
        joined(st.sampled_from(["t", "v"]), PATTERN.map(literal), template="{} LIKE {}"),
        joined(TEXTS, PATTERN.map(literal), template="{} NOT LIKE {}"),
        joined(EQUALITY, st.sampled_from(["ok", "sad"]).map(literal), template="e {} {}"),
        joined(TEXT.map(literal), TEXT.map(literal), template="t NOT IN ('b', {}, {})"),
        joined(INTEGER, NUMBER, template="n IN ({}, {}, 7)"),
        joined(NUMBER, NUMBER, NUMBER, template="{} BETWEEN {} AND {}"),
        joined(TEXTS, TEXTS, TEXTS, template="{} NOT BETWEEN {} AND {}"),
        joined(COMPARISON, template="u {} 'F0000000-0000-4000-8000-00000000000a'"),
        joined(DAY, COMPARISON, DAY, template="{} {} {}"),
        joined(DAY, COMPARISON, template="{} {} '2013-01-01'"),
        joined(STAMP, COMPARISON, STAMP, template="{} {} {}"),
        joined(STAMP, COMPARISON, template="{} {} '2013-01-01 10:30'"),
        joined(ZONED, COMPARISON, ZONED, template="{} {} {}"),
        joined(ZONED, COMPARISON, template="{} {} timestamptz '2012-12-31 23:59:59.999999Z'"),
        joined(st.sampled_from(["t", "i", "f", "d", "e", "c", "n"]), template="{} IS NULL"),
        joined(STAMP, template="{} IS NOT NULL"),
    ),
    lambda inner: st.one_of(
        joined(inner, st.sampled_from(["AND", "OR"]), inner, template="{} {} {}"),
        joined(inner, st.sampled_from(["and", "or"]), inner, template="({} {} {})"),
        joined(inner, template="NOT ({})"),
        joined(inner, template="NOT {}"),
        joined(inner, EQUALITY, inner, template="(({}) {} ({}))"),
        joined(inner, template="({}) IS NOT TRUE"),
        joined(inner, template="({}) IS FALSE"),
        joined(inner, inner, template="coalesce({}, {})"),
    ),
    max_leaves=6,
)
ANY = st.one_of(CONDITION, INTEGER, NUMBER, TEXTS, DAY, STAMP, ZONED)
FORMS = {
    "boolean": "boolean",
    "integers": "bigint",
    "numeric": "numeric",
    "date": "date",
    "timestamp without time zone": "timestamp without time zone",
    "timestamp with time zone": "timestamp with time zone",
}
Row = Mapping[str, str | None]


@pytest.fixture(scope="module")
def postgres(guarded: str) -> Iterator[psycopg.Connection[Any]]:
    """A database whose collation is C, so that a text as a person wrote it also means what is promised."""
    with (
        sibling(guarded) as dsn,
        psycopg.connect(dsn, options="-c timezone=UTC", autocommit=True) as connection,
    ):
        create_table(connection)
        yield connection


def create_table(connection: psycopg.Connection[Any]) -> None:
    connection.execute("CREATE TYPE mood AS ENUM ('sad', 'ok', 'a')")
    columns = ", ".join(f'"{name}" {type_}' for name, type_ in COLUMNS.items())
    connection.execute(f"CREATE TABLE items ({columns})")


def documents(connection: psycopg.Connection[Any], rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Put rows into the table; return them in the form of documents."""
    connection.execute("TRUNCATE items")
    for row in rows:
        places = ", ".join(f"%s::{type_}" for type_ in COLUMNS.values())
        connection.execute(f"INSERT INTO items VALUES ({places})", [row[name] for name in COLUMNS])
    forms = ", ".join(
        f"""(to_json({kind(type_).source.format(f'"{name}"')}))::text"""
        for name, type_ in COLUMNS.items()
    )
    return [
        dict(zip(COLUMNS, [value and json.loads(value) for value in values], strict=True))
        for values in connection.execute(f"SELECT {forms} FROM items ORDER BY ctid").fetchall()
    ]


def selected(connection: psycopg.Connection[Any], term: Term, expression: str) -> list[Any]:
    """The values of an expression in Postgres, in the form of documents."""
    if term.group == "integers":
        expression = f"({expression})::numeric"
        form = "{}::text"
    else:
        form = kind(FORMS.get(term.group, "text")).source
    query = f"SELECT (to_json({form.format('value')}))::text FROM"
    query += f" (SELECT {expression} AS value FROM items ORDER BY ctid) AS computed"
    values = [value and json.loads(value) for (value,) in connection.execute(query).fetchall()]
    if term.group == "integers":
        return [value if value is None else int(value) for value in values]
    return values


def differences(
    connection: psycopg.Connection[Any], text: str, rows: Sequence[Row]
) -> list[tuple[Any, Any]]:
    term = parse(text, COLUMNS)
    actual = [term.evaluate(row) for row in documents(connection, rows)]
    if term.group == "numeric":
        actual = [value if value is None else str(value) for value in actual]
    stated = sql_text(term, lambda name: '"' + name + '"')
    pairs = list(zip(selected(connection, term, stated), actual, strict=True))
    try:
        pairs += zip(selected(connection, term, text), actual, strict=True)
    except psycopg.errors.NumericValueOutOfRange:
        pass  # Postgres' integers are too short; ours aren't.
    except psycopg.errors.DatetimeFieldOverflow:
        pass  # A date beyond the time stamps: NULL here.
    return [pair for pair in pairs if pair[0] != pair[1]]


@given(text=ANY, rows=st.lists(ROWS, min_size=4, max_size=8))
@budget(300)
def test_python_gives_what_postgres_gives(
    postgres: psycopg.Connection[Any], text: str, rows: list[Row]
) -> None:
    assert differences(postgres, text, rows) == [], text


@pytest.mark.parametrize(
    ("operator", "wrong", "text"),
    [
        ("*", lambda left, right: (left * right + 2**63) % 2**64 - 2**63, "b * 2 > 0"),
        ("lower", str.lower, 'lower(t COLLATE "C")'),
        ("length", lambda text: len(text.encode()), "length(t)"),
        ("not", lambda value: True, "NOT yes"),
    ],
)
def test_a_wrong_function_is_found(
    postgres: psycopg.Connection[Any],
    monkeypatch: pytest.MonkeyPatch,
    operator: str,
    wrong: Callable[..., Any],
    text: str,
) -> None:
    empty = dict.fromkeys(COLUMNS)
    row = {**empty, "b": "9223372036854775807", "t": "Ä🎈", "yes": "true"}
    assert differences(postgres, text, [row, empty]) == []
    planted = operators.OPERATORS[operator]._replace(compute=wrong)
    monkeypatch.setitem(operators.OPERATORS, operator, planted)
    operators.strict.cache_clear()
    assert differences(postgres, text, [row, empty]) != []
    operators.strict.cache_clear()


def test_null_isnt_true_or_false(
    postgres: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """AND with two truth values only, which is the mistake that one makes."""
    rows = [dict.fromkeys(COLUMNS), {**dict.fromkeys(COLUMNS), "yes": "false"}]
    assert differences(postgres, "yes AND no", rows) == []
    _, sql = operators.LENIENT["and"]
    wrong = (lambda arguments, row: all(part(row) for part in arguments), sql)
    monkeypatch.setitem(operators.LENIENT, "and", wrong)
    assert differences(postgres, "yes AND no", rows) != []
