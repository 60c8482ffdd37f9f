"""Expressions: what is refused, by which name, and that terms are plain data."""

import pickle

import pytest

from cdc.config.mistakes import InvalidSetting
from cdc.documents.scalar.parser import parse

COLUMNS = {
    "i": "integer",
    "n": "numeric",
    "t": "text",
    "c": "character(4)",
    "e": "public.mood",
    "yes": "boolean",
    "d": "date",
    "s": "timestamp without time zone",
    "z": "timestamp with time zone",
    "f": "double precision",
    "j": "jsonb",
    "citext": "citext",
    "list": "integer[]",
    "hour": "integer",
}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is no SQL expression"),
        ("i +", "is no SQL expression"),
        ("i; DROP TABLE x", "is no SQL expression"),
        ("SELECT 1", "is no SQL expression"),
        ("i, n", "is no SQL expression"),
        ("x = 1", "the table has no column x"),
        ('"I" = 1', "the table has no column I"),
        ("a.i = 1", "COLUMN isn't supported in this form"),
        ("i / 2", "DIV isn't supported"),
        ("i % 2", "MOD isn't supported"),
        ("now() > z", "now() here: only a view's where"),
        ("random() > i", "RAND isn't supported"),
        ("my_function(i)", "MY_FUNCTION isn't supported"),
        ("i IN (SELECT 1)", "IN isn't supported in this form"),
        ("i = ANY(list)", "ANY isn't supported"),
        ("EXISTS (SELECT 1)", "EXISTS isn't supported"),
        ("t ~ 'a'", "REGEXP_LIKE isn't supported"),
        ("t ILIKE 'a'", "ILIKE isn't supported"),
        ("t LIKE t", "LIKE takes a pattern in quotes"),
        ("t LIKE 'a\\'", "ends with its escape character"),
        ("t LIKE 'a' ESCAPE '!'", "ESCAPE isn't supported"),
        ("c LIKE 'a%'", "LIKE takes a text"),
        ("lower(t) = 'a'", "the result of lower depends on the collation"),
        ("upper(t COLLATE \"de_DE\") = 'A'", "the result of upper depends on the collation"),
        ("t COLLATE \"de_DE\" = 'a'", "COLLATE isn't supported"),
        ("CASE WHEN yes THEN 1 END = 1", "CASE isn't supported"),
        ("f = 1", "integers and other can't be compared"),
        ("f > 0.5", "numeric and other can't be compared"),
        ("citext = 'a'", "other can't be compared"),
        ("c = t", "character and texts can't be compared"),
        ("d = s", "date and timestamp"),
        ("t = 1", "integers and texts can't be compared"),
        ("e < 'ok'", "the order of an enum isn't in the log"),
        ("j IS NULL", "NULL and JSON's null look alike"),
        ("i = NULL", "NULL isn't supported"),
        ("i AND yes", "AND, OR and NOT take conditions"),
        ("n + 1 = 2", "+ takes integers only"),
        ("i || i = 'a'", "|| takes texts and integers"),
        ("t || n = 'a'", "|| takes texts and integers"),
        ("d > 'yesterday'", "a text in quotes is no date"),
        ("d > '2013-02-30'", "a text in quotes is no date"),
        ("s > '2013-01-01Z'", "a text in quotes is no timestamp without"),
        ("z > '2013-01-01'", "a text in quotes is no timestamp with"),
        ("z > '2013-01-01+02'", "a text in quotes is no timestamp with"),
        ("i = 'a' ", "a text in quotes is no integers"),
        ("n = 'a' ", "a text in quotes is no numeric"),
        ("i = 1e5", "a number has digits"),
        ("i = -1e5", "a number has digits"),
        ("t::integer = 1", "this cast isn't supported"),
        ("s::text = ''", "this cast isn't supported"),
        ("n::numeric(3,1) = 1", "this cast isn't supported"),
        ("date_trunc('week', s) = s", "date_trunc doesn't take this unit"),
        ("date_trunc('day', z, 'Europe/Berlin') = z", "isn't supported in this form"),
        ("date_trunc('day', t) = z", "date_trunc takes a date or a time stamp"),
        ("i = i = yes", "a condition is part of another expression"),
        ("i BETWEEN SYMMETRIC 1 AND 2", "BETWEEN isn't supported in this form"),
        ("E'a' = t", "BYTE_STRING"),
        ("(i, i) = (1, 2)", "TUPLE isn't supported"),
        (f"{'(' * 5000}i{')' * 5000} = 1", ""),
    ],
)
def test_what_isnt_listed_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        parse(text, COLUMNS)
    assert message.lower().replace("_", "") in str(caught.value).lower().replace("_", "")
    assert caught.value.hint


def test_an_expression_can_be_sent_to_an_executor() -> None:
    condition = parse("date_trunc('hour', s) = '2013-01-01 10:00' AND i > 1", COLUMNS)
    row = {"s": "2013-01-01T10:30:00.000000", "i": 2}
    assert condition.evaluate(row) is True
    copied = pickle.loads(pickle.dumps(condition))
    assert copied == condition
    assert copied.evaluate({**row, "i": None}) is None
    assert copied.columns == ("s", "i")
