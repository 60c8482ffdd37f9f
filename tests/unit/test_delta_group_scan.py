"""Rows of a mirror as Postgres writes them, without Spark."""

import json
from datetime import UTC, date, datetime
from decimal import Decimal
from math import inf, nan

import pytest

from sinks.delta.group_scan import Mirror, document


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (-7, "-7"),
        ('a"\\\n\x1f\x7fü', '"a\\"\\\\\\n\\u001f\x7fü"'),
        (1.5, "1.5"),
        (nan, '"NaN"'),
        (inf, '"Infinity"'),
        (-inf, '"-Infinity"'),
        (Decimal("0.0000000"), '"0.0000000"'),
        (Decimal("-12.50"), '"-12.50"'),
        (date(5, 1, 2), '"0005-01-02"'),
        (datetime(2026, 1, 2, 3, 4, 5), '"2026-01-02T03:04:05.000000"'),  # noqa: DTZ001  # a column without zone
        (datetime(2026, 1, 2, 3, 4, 5, 6, UTC), '"2026-01-02T03:04:05.000006Z"'),
        (b"\x00\xff", '"AP8="'),
        ([1, None, "x"], '[1,null,"x"]'),
        ({"closed": True, "points": [1.0]}, '{"closed":true,"points":[1.0]}'),
    ],
)
def test_values(value: object, text: str) -> None:
    mirror = Mirror("public.t", (('v"', False), ("later", False)), ())
    assert document(mirror, {'v"': value, "_cdc_id": "1"}) == '{"v\\"":' + text + ',"later":null}'


@pytest.mark.parametrize(("value", "text"), [(None, "null"), ('{"a": 1.00}', '{"a": 1.00}'), (["1", None], "[1,null]")])
def test_json_is_set_in_as_it_is(value: object, text: str) -> None:
    made = document(Mirror("public.t", (("v", True),), ()), {"v": value})
    assert made == '{"v":' + text + "}"
    json.loads(made)


def test_an_unknown_type_is_refused() -> None:
    with pytest.raises(ValueError, match="complex"):
        document(Mirror("public.t", (("v", False),), ()), {"v": 1j})
