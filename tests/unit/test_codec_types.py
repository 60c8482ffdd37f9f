"""Every form of a value: from the connector, in a document, in a warehouse column and back."""

import json
import re
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.codec.problem import Unreadable, ValueNotRepresentable
from cdc.codec.table import codec
from cdc.codec.types import kind
from cdc.model.table import Column, Table, row_id
from tests.support.budget import budget
from tests.support.forms import FOREVER, KEYS, LOCAL, LOST, NEVER, STAMP, TYPES, compact, wide

DATE, MIDNIGHT = "date", 86_400_000_000


def row(**values: Any) -> bytes:
    return compact({"id": 1, **values}).encode()


def typed_batch(table: Table, text: bytes) -> pa.RecordBatch:
    """The row as the warehouse has it."""
    schema = codec(table).schema
    values = codec(table).values(text)
    pairs = zip(values, schema.types, strict=True)
    return pa.record_batch([pa.array([value], type_) for value, type_ in pairs], schema)


def document_of(table: Table, batch: pa.RecordBatch) -> Any:
    (text,) = codec(table).documents(batch).to_pylist()
    return json.loads(text)


def table_of(columns: dict[str, str], *key: str, reshaped: bool = False) -> Table:
    """A table of columns of these types."""
    listed = tuple(Column(*column) for column in columns.items())
    return Table("public", "x", listed, key, "t.public.x", reshaped=reshaped)


@pytest.mark.parametrize(("type_", "wire", "document"), [entry[:3] for entry in TYPES])
def test_forms_of_a_value(type_: str, wire: Any, document: Any) -> None:
    table = wide([type_])
    assert json.loads(codec(table).document(row(v0=wire))) == {"id": 1, "v0": document}
    batch = typed_batch(table, row(v0=wire))
    assert document_of(table, batch) == {"id": 1, "v0": document}
    assert codec(table).problem(row(v0=wire), warehouse=True) is None


@pytest.mark.parametrize("type_", sorted({type_ for type_, *_ in TYPES}))
def test_null_is_null_in_every_form(type_: str) -> None:
    table = wide([type_])
    for text in (row(v0=None), row()):
        assert codec(table).values(text) == (1, None)
        assert codec(table).problem(text, warehouse=True) is None
        assert document_of(table, typed_batch(table, text)) == {"id": 1, "v0": None}
    assert json.loads(codec(table).document(row(v0=None))) == {"id": 1, "v0": None}


COLUMNS: list[tuple[str, Any, Any]] = [
    ("smallint", 7, 7),
    ("numeric(10,2)", "1.50", Decimal("1.50")),
    ("numeric(5,-2)", "12300." + "0" * 500, Decimal(12300)),
    ("numeric(2,4)", "0.0012", Decimal("0.0012")),
    ("numeric(38,0)", "9" * 38, Decimal("9" * 38)),
    ("numeric(50,2)", "1.50", "1.50"),
    # From before the column had its scale: rounded as Postgres rounded it.
    ("numeric(10,2)", "1.555", Decimal("1.56")),
    ("numeric(10,2)", "-1.555", Decimal("-1.56")),
    ("bytea", "YWJj", b"abc"),
    ("double precision", "-Infinity", float("-inf")),
    # The largest number of four bytes, by its shortest text, which is larger.
    ("real", 3.4028235e38, 3.4028234663852886e38),
    ("real", -3.4028235e38, -3.4028234663852886e38),
    (DATE, 15707, date(2013, 1, 2)),
    (LOCAL, 1357034400100000, datetime.fromisoformat("2013-01-01T10:00:00.1")),
    ("jsonb", '{"a": [1, null]}', '{"a": [1, null]}'),
    ("bit(10)", "AQI=", "1000000001"),
    ("real[]", [0.5, None, "NaN"], [0.5, None, pytest.approx(float("nan"), nan_ok=True)]),
]


@pytest.mark.parametrize(("type_", "wire", "value"), COLUMNS)
def test_columns_have_values_of_their_type(type_: str, wire: Any, value: Any) -> None:
    assert typed_batch(wide([type_]), row(v0=wire)).column("v0").to_pylist() == [value]


@pytest.mark.parametrize(
    ("type_", "wire", "number"),
    [
        (DATE, 2147483647, 2**31 - 1),
        (DATE, -622191234, 2**31 - 1),
        (DATE, -2147472691, -(2**31)),
        (DATE, -735160, -735160),
        (LOCAL, FOREVER, FOREVER),
        (LOCAL, -63517780799500000, -63517780799500000),
        (STAMP, "infinity", FOREVER),
        (STAMP, "-infinity", NEVER),
        (STAMP, "-0043-03-15T12:00:00.500000Z", -63517780799500000),
        (STAMP, "0000-01-01T00:00:00.000000Z", -62167219200000000),
        (STAMP, "+12000-01-01T00:00:00.000001Z", 316516204800000001),
        (STAMP, "2013-01-01T10:00:00.1Z", 1357034400100000),
    ],
)
def test_times_beyond_pythons_are_numbers_of_the_column(type_: str, wire: Any, number: int) -> None:
    column = typed_batch(wide([type_]), row(v0=wire)).column("v0")
    assert column.cast(pa.int32() if type_ == DATE else pa.int64()).to_pylist() == [number]


@given(days=st.integers(-2440588, 2145042905), remainder=st.integers(0, MIDNIGHT - 1))
@budget(300)
def test_a_day_has_one_name(days: int, remainder: int) -> None:
    """Of all that Postgres has: as text, as a number, and in the order of time."""
    table = wide([DATE, LOCAL, STAMP])
    micros = min(max(days * MIDNIGHT + remainder, -210866803200000000), FOREVER - 1)
    text = json.loads(codec(table).document(row(v0=days, v1=micros)))
    assert codec(table).values(row(v0=days, v1=micros, v2=f"{text['v1']}Z"))[1:3] == (days, micros)
    batch = typed_batch(table, row(v0=days, v1=micros, v2=f"{text['v1']}Z"))
    assert batch.column("v2").cast(pa.int64()).to_pylist() == [micros]
    assert document_of(table, batch) == {**text, "v2": f"{text['v1']}Z"}
    if 1 <= (year := int(re.match(r"[+-]?\d+", text["v0"])[0])) <= 9999:  # type: ignore[index]
        assert text["v0"] == (date(1970, 1, 1) + timedelta(days)).isoformat()
    assert len(str(abs(year))) == 4 or text["v0"][0] == "+" or abs(year) < 1000


@pytest.mark.parametrize(("type_", "wire"), LOST)
def test_a_value_that_the_connector_damaged_enters_no_view(type_: str, wire: Any) -> None:
    table = wide([type_])
    for form in (codec(table).document, codec(table).values):
        with pytest.raises(ValueNotRepresentable) as caught:
            form(row(v0=wire))
        assert caught.value.column == f"public.x.v0 ({type_})"
        assert caught.value.problem == "the connector has damaged its v0"
    assert codec(table).problem(row(v0=wire), warehouse=False) == "the connector has damaged its v0"


UNHELD: dict[str, list[Any]] = {
    "numeric(10,3)": ["NAN", True],
    "numeric(3,1)": ["1e9", "99.96", "x", "1e999999999"],
    "numeric(3,1)[]": [["1e9"]],
    STAMP: ["+294276-12-31T23:59:59.999999Z", "2013-13-01T10:00:00.000000Z", "yesterday", 1],
    "smallint": [2**15],
    "integer": [-(2**31) - 1],
    "smallint[]": [[1, 2**15]],
    "bytea": ["YW", "é"],
    "real": [1e300, 3.4028236e38],
}


def cases(values: dict[str, list[Any]]) -> list[tuple[str, Any]]:
    """Each value with its type."""
    return [(type_, wire) for type_, listed in values.items() for wire in listed]


@pytest.mark.parametrize(("type_", "wire"), cases(UNHELD))
def test_a_value_that_no_column_holds_is_refused_by_name_alone(type_: str, wire: Any) -> None:
    table = wide([type_])
    with pytest.raises(ValueNotRepresentable) as caught:
        codec(table).values(row(v0=wire))
    assert caught.value.column == f"public.x.v0 ({type_})"
    assert caught.value.problem == "the warehouse can not hold its v0"
    assert codec(table).problem(row(v0=wire), warehouse=True) == caught.value.problem
    assert codec(table).problem(row(v0=wire), warehouse=False) is None
    assert codec(table).document(row(v0=wire))


FORMLESS: dict[str, list[Any]] = {
    "tsquery": ["no base64", "/w=="],
    "bit(10)": ["!"],
    "lseg": [{"wkb": "!"}, {"wkb": ""}],
    "text[]": [[None]],
}


@pytest.mark.parametrize(("type_", "wire"), cases(FORMLESS))
def test_what_has_no_form_at_all_was_damaged(type_: str, wire: Any) -> None:
    table = wide([type_])
    for form in (codec(table).document, codec(table).values):
        with pytest.raises(ValueNotRepresentable, match="damaged"):
            form(row(v0=wire))


@pytest.mark.parametrize(
    ("type_", "wire", "document", "value"),
    [
        ("text", 1, "1", "1"),
        ("text", True, "true", "true"),
        ("text", [1.50, {}], "[1.5,{}]", "[1.5,{}]"),
        ("numeric", 12345678901234567890123, "12345678901234567890123", "12345678901234567890123"),
        ("numeric(10,2)", 5, "5", Decimal("5.00")),
        ("timestamp(0) with time zone", None, None, None),
        ("jsonb", {"a": 1}, {"a": 1}, '{"a":1}'),
    ],
)
def test_what_is_no_string_is_its_text_in_a_column_of_text(
    type_: str, wire: Any, document: Any, value: Any
) -> None:
    """As from before the column's type was changed. Because of the date every row is looked at."""
    table = wide([type_, DATE])
    assert json.loads(codec(table).document(row(v0=wire, v1=0)))["v0"] in (document, wire)
    assert typed_batch(table, row(v0=wire, v1=0)).column("v0").to_pylist() == [value]
    assert codec(table).problem(row(v0=wire), warehouse=True) is None


def test_a_string_beside_what_is_no_string_stays_as_it_is() -> None:
    table = wide(["text", "text", "text", DATE])
    text = row(v0=7, v1='a "text"', v2=None, v3=0)
    document = json.loads(codec(table).document(text))
    assert (document["v1"], document["v2"]) == ('a "text"', None)
    assert codec(table).values(text)[1:4] == ("7", 'a "text"', None)


MISFITS: dict[str, list[Any]] = {
    "integer": ["a", 1.5, True, 2**63],
    "bigint": [-(2**63) - 1, [1]],
    "boolean": [1, "true"],
    "double precision": ["nan", True],
    "text[]": ["a", {"a": 1}],
    "integer[]": [["a"], [1, [2]]],
    "point": [[1, 2], {"x": 1}],
}


@pytest.mark.parametrize(("type_", "wire"), cases(MISFITS))
def test_a_value_of_another_type_is_refused(type_: str, wire: Any) -> None:
    table = wide([type_])
    with pytest.raises(Unreadable) as caught:
        codec(table).values(row(v0=wire))
    assert caught.value.problem == "it does not fit the columns of its table"
    assert codec(table).problem(row(v0=wire), warehouse=False) == caught.value.problem


@pytest.mark.parametrize(
    "text",
    [b"{", b"[]", b"null", b"", b'{"id":1}x', b'{"id":NaN}', b'{"id":1,"v0":1e}', b'{"id":1,}', b"[" * 3000],
)  # fmt: skip
def test_what_is_no_row_is_refused(text: bytes) -> None:
    table = wide(["text", "date"])
    for form in (codec(table).document, codec(table).values):
        with pytest.raises(Unreadable, match="does not fit"):
            form(text)
    assert codec(table).problem(text, warehouse=False)


UNTOUCHED = ("text", "numeric", "double precision", "text[]", STAMP, "uuid", "bigint")


def test_what_needs_no_other_form_passes_untouched() -> None:
    """As texts, numbers, arrays and zoned times: the document is the connector's own text."""
    table = table_of({f"c{n}": type_ for n, type_ in enumerate(UNTOUCHED)}, "c0")
    text = (
        b'{"c0":"a\\u000B\\/", "c1":"1.50","c2":1.50e300,"c3":["x",null],"c4":"2013-01-01T10:00:00.000000Z","c5":null,'
        b'"c6":9223372036854775807, "c0": "twice"}'
    )
    assert codec(table).document(text) == text
    assert codec(table).document(b'{"c0":\n"a"\n}') == b'{"c0": "a" }'
    misfits = b'{"c5":7,"c6":"seven"}', b'{"c2":true}', b'{"c3":"x"}', b'{"c6":9223372036854775808}'
    for misfit in misfits:
        with pytest.raises(Unreadable, match="does not fit"):
            codec(table).document(misfit)


def test_what_needs_no_other_form_keeps_its_text_beside_what_does() -> None:
    """Every digit and escape; json last, only the table's columns, null for what the row lacks."""
    types = {"j": "json", "%b": "text", "d": "date", "n": "numeric", "z": "text"}
    table = table_of(types, "d")
    text = b'{"gone":[1],"j":"{\\"a\\":\\n 1.50}","%b":"\\u000B\\/","d":15706,"n":"NAN"}'
    assert codec(table).document(text) == (
        b'{"%b":"\\u000B\\/","d":"2013-01-01","n":"NaN","z":null,"j":{"a":  1.50}}'
    )


def test_a_reshaped_table_shows_its_own_columns() -> None:
    table = table_of({"a": "text", "b": "numeric"}, "a", reshaped=True)
    assert codec(table).document(b'{"gone":1,"b":"1.50","a":"x"}') == b'{"a":"x","b":"1.50"}'


STRANGE = [
    '"', "\\", "\n", "é", "😀", "a b", "%", "%b", "{}", "", "\x7f", "\u2028", "'", "f0", "é\\",
]  # fmt: skip


def test_names_may_be_anything() -> None:
    table = table_of(dict.fromkeys(STRANGE, "date"), STRANGE[0])
    days = {name: index for index, name in enumerate(STRANGE)}
    expected = {name: (date(1970, 1, 1) + timedelta(day)).isoformat() for name, day in days.items()}
    for ascii_only in (True, False):
        text = json.dumps(days, ensure_ascii=ascii_only).encode()
        assert json.loads(codec(table).document(text)) == expected
        assert codec(table).values(text) == tuple(range(len(STRANGE)))
        assert document_of(table, typed_batch(table, text)) == expected
        assert codec(table).problem(text, warehouse=True) is None


def test_a_table_without_columns_is_an_empty_object() -> None:
    table = table_of({}, reshaped=True)
    assert codec(table).document(b'{"gone":1}') == b"{}"


@pytest.mark.parametrize(("types", "wire", "values"), KEYS)
def test_ids_are_made_of_what_the_views_show(
    types: tuple[str, ...], wire: list[Any], values: list[Any]
) -> None:
    names = tuple(f"k{index}" for index in range(len(types)))
    table = table_of(dict(zip(names, types, strict=True)), *names)
    key = compact(dict(zip(names, wire, strict=True))).encode()
    assert codec(table).row_id(key) == row_id(values)


NO_NUMBERS = [
    '{"k":}', '{"k":1', '{"k":1,"k":x}', '{"k":"}', '{"k":0x1}', '{"k":01}', '{"k":+1}', '{"j":1}', '{"k":1.0}',
    '{"k":9223372036854775808}', '{"k":null}',
]  # fmt: skip
NO_TEXTS = [
    '{"k":"}', '{"k":"a', '{"k":"a"b"}', '{"k":"\\"}', '{"k":"a\nb"}', '{"k":a"}', '{"j":"a"}', "[]", "7", "",
    "null", '{"k":"\\ud800"}', "[" * 3000,
]  # fmt: skip


@pytest.mark.parametrize(
    ("type_", "key"),
    [
        *(("bigint", text) for text in NO_NUMBERS),
        *(("text", text) for text in NO_TEXTS),
        ("tsquery", '{"k":"no base64"}'),
    ],
)
def test_what_is_no_key_has_no_id(type_: str, key: str) -> None:
    table = table_of({"k": type_}, "k")
    with pytest.raises(Unreadable, match="its key is not one of the table"):
        codec(table).row_id(key.encode())


def test_a_kind_is_made_once() -> None:
    assert kind("timestamp(3) with time zone") is kind("timestamp(3) with time zone")
