"""Expressions: what is refused, by which name, and that terms are plain data."""

import pickle

import pytest

from cdc.config.mistakes import InvalidSetting
from cdc.scalar.parser import parse

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


REFUSED: dict[str, list[str]] = {
    "is no SQL expression": ["", "i +", "i; DROP TABLE x", "SELECT 1", "i, n"],
    "the table has no column x": ["x = 1"],
    "the table has no column I": ['"I" = 1'],
    "COLUMN isn't supported in this form": ["a.i = 1"],
    "DIV isn't supported": ["i / 2"],
    "MOD isn't supported": ["i % 2"],
    "now() here: only a view's where": ["now() > z"],
    "RAND isn't supported": ["random() > i"],
    "MY_FUNCTION isn't supported": ["my_function(i)"],
    "IN isn't supported in this form": ["i IN (SELECT 1)"],
    "ANY isn't supported": ["i = ANY(list)"],
    "EXISTS isn't supported": ["EXISTS (SELECT 1)"],
    "REGEXP_LIKE isn't supported": ["t ~ 'a'"],
    "ILIKE isn't supported": ["t ILIKE 'a'"],
    "LIKE takes a pattern in quotes": ["t LIKE t"],
    "ends with its escape character": ["t LIKE 'a\\'"],
    "ESCAPE isn't supported": ["t LIKE 'a' ESCAPE '!'"],
    "LIKE takes a text": ["c LIKE 'a%'"],
    "the result of lower depends on the collation": ["lower(t) = 'a'"],
    "the result of upper depends on the collation": ["upper(t COLLATE \"de_DE\") = 'A'"],
    "COLLATE isn't supported": ["t COLLATE \"de_DE\" = 'a'"],
    "CASE isn't supported": ["CASE WHEN yes THEN 1 END = 1"],
    "integers and other can't be compared": ["f = 1"],
    "numeric and other can't be compared": ["f > 0.5"],
    "other can't be compared": ["citext = 'a'"],
    "character and texts can't be compared": ["c = t"],
    "date and timestamp": ["d = s"],
    "integers and texts can't be compared": ["t = 1"],
    "the order of an enum isn't in the log": ["e < 'ok'"],
    "NULL and JSON's null look alike": ["j IS NULL"],
    "NULL isn't supported": ["i = NULL"],
    "AND, OR and NOT take conditions": ["i AND yes"],
    "+ takes integers only": ["n + 1 = 2"],
    "|| takes texts and integers": ["i || i = 'a'", "t || n = 'a'"],
    "a text in quotes is no date": ["d > 'yesterday'", "d > '2013-02-30'"],
    "a text in quotes is no timestamp without": ["s > '2013-01-01Z'"],
    "a text in quotes is no timestamp with": ["z > '2013-01-01'", "z > '2013-01-01+02'"],
    "a text in quotes is no integers": ["i = 'a' "],
    "a text in quotes is no numeric": ["n = 'a' "],
    "a number has digits": ["i = 1e5", "i = -1e5"],
    "this cast isn't supported": ["t::integer = 1", "s::text = ''", "n::numeric(3,1) = 1"],
    "date_trunc doesn't take this unit": ["date_trunc('week', s) = s"],
    "isn't supported in this form": ["date_trunc('day', z, 'Europe/Berlin') = z"],
    "date_trunc takes a date or a time stamp": ["date_trunc('day', t) = z"],
    "a condition is part of another expression": ["i = i = yes"],
    "BETWEEN isn't supported in this form": ["i BETWEEN SYMMETRIC 1 AND 2"],
    "BYTE_STRING": ["E'a' = t"],
    "TUPLE isn't supported": ["(i, i) = (1, 2)"],
    "": [f"{'(' * 5000}i{')' * 5000} = 1"],
}


@pytest.mark.parametrize(
    ("text", "message"), [(text, message) for message, texts in REFUSED.items() for text in texts]
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
