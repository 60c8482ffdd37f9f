"""Records to changes in plain Python: against the twin, and one by one what isn't a change."""

import json
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.codec.record import Change, RecordDecoder, Unreadable
from cdc.codec.table import codec
from cdc.model.mask import Mask
from cdc.model.table import Column, Table, row_id
from cdc.postgres import table_survey
from cdc.sinks.elasticsearch.scan import LONGEST_ID, document_id
from tests.support import twin
from tests.support.budget import budget
from tests.support.comparing import assert_as_the_twin
from tests.support.envelopes import PLACEHOLDER, Row, envelope, table
from tests.support.pipelines import NO_SOURCE, pipeline
from tests.support.scribe import SHAPES, TYPES, Scribe, packed

ITEMS = table("t.public.items")
KEY = b'{"a":"k","b":1}'
ID = '["k",1]'
ROW: Row = {"a": "k", "b": 1, "v": "x", "n": 1}
EVENT = envelope("c", None, ROW, lsn=7)
TOASTED = (
    "text", "bytea", "text[]", "bytea[]", "integer[]", "bigint[]", "uuid[]", "jsonb", "hstore", "integer",
)  # fmt: skip
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=12)
STRANGE = [
    "after", "op", "a.b", "`", "'", '"', "\\", "é", "😀", "a b", "row", "$.x", "[0]", "NULL", "\n", "{}", "%b",
]  # fmt: skip


def decoder(*tables: Table) -> RecordDecoder:
    return RecordDecoder(tables or (ITEMS,), PLACEHOLDER)


def problem(key: bytes | None, value: bytes | None, topic: str = ITEMS.topic) -> str:
    with pytest.raises(Unreadable) as caught:
        decoder().decode(topic, key, value)
    return caught.value.problem


@pytest.mark.parametrize(
    ("value", "change"),
    [
        (packed(EVENT), Change(ID, "c", packed(ROW), (), 7, 1_700_000_000_000_000)),
        (packed(envelope("d", ROW, None, lsn=7)), Change(ID, "d", None, (), 7, 1_700_000_000_000_000)),
        (None, Change(ID, None, None, (), None, None)),
    ],
)  # fmt: skip
def test_a_change_and_both_kinds_of_delete(value: bytes | None, change: Change) -> None:
    assert decoder().decode(ITEMS.topic, KEY, value) == change


@pytest.mark.parametrize(
    ("source", "lsn"),
    [
        ({"lsn": 5}, 5),
        ({"lsn": None, "sequence": '[null,"9"]'}, 9),
        ({"sequence": '["8","9"]', "lsn": 5}, 5),
        ({"sequence": "[null,null]"}, None),
        ({"sequence": "[]"}, None),
        ({"sequence": "9"}, None),
        ({"sequence": '[null,"x"]'}, None),
        ({}, None),
        (None, None),
    ],
)
def test_where_in_the_log(source: Row | None, lsn: int | None) -> None:
    assert decoder().decode(ITEMS.topic, KEY, packed({**EVENT, "source": source})).lsn == lsn


WRONG: list[tuple[bytes | None, bytes | None, str]] = [
    (None, None, "it has no key"),
    (None, b"\xff", "it has no key"),
    (b'{"a":"\xff","b":1}', packed(EVENT), "its bytes are no text"),
    (b'{"a":"\xff","b":1}', None, "its bytes are no text"),
    (b"\xff", b"no json", "its bytes are no text"),
    (KEY, b"\xff\xfe", "its bytes are no text"),
    (KEY, packed(EVENT).replace(b'"x"', b'"\xff"'), "its bytes are no text"),
    (KEY, packed(EVENT).replace(b'"x"', b'"\xed\xa0\x80"'), "its bytes are no text"),
    (KEY, packed({**EVENT, "before": {"a": "é"}}).replace("é".encode(), b"\xc3"), "its bytes are no text"),
    (b"nope", None, "its key is not one of the table"),
    (b'{"a":"k"}', packed(EVENT), "its key is not one of the table"),
    (b'{"a":"k","b":null}', b"no json", "its key is not one of the table"),
    (b'{"a":"k","b":1.5}', packed(EVENT), "its key is not one of the table"),
    (b'{"a":"k","b":9223372036854775808}', packed(EVENT), "its key is not one of the table"),
    (KEY, b"null", "its value is no change event"),
    (KEY, packed(EVENT) + b"x", "its value is no change event"),
    (KEY, packed({**EVENT, "op": 7}), "its value is no change event"),
    (KEY, packed(EVENT).replace(b'"n":1', b'"n":NaN'), "its value is no change event"),
    (KEY, packed(EVENT).replace(b'"x"', b'"\\ud800x"'), "its value is no change event"),
    (KEY, packed(EVENT).replace(b'"x"', b"[" * 3000 + b"]" * 3000), "its value is no change event"),
    (KEY, packed({**EVENT, "op": "t"}), "its operation is unknown"),
    (KEY, packed({**EVENT, "op": "", "after": None}), "its operation is unknown"),
    (KEY, packed({"op": "c"}), "it lacks the row"),
    (KEY, packed({**EVENT, "after": json.dumps(ROW)}), "it lacks the row"),
    (KEY, packed({**EVENT, "after": 7, "source": {"schema": "s", "table": "t"}}), "it lacks the row"),
    (KEY, packed({**EVENT, "source": {"schema": "public", "table": "others"}}), "it is of another table"),
    (KEY, packed({**EVENT, "source": {"schema": "private", "table": "items"}}), "it is of another table"),
    (KEY, packed({**envelope("d", None, None), "source": {"schema": "s", "table": "t"}}), "it is of another table"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value", "expected"), WRONG)
def test_a_record_of_another_writer_is_reported(
    key: bytes | None, value: bytes | None, expected: str
) -> None:
    """The scribe's garbage, which the twin refuses as well, has more of them."""
    assert problem(key, value) == expected


def test_a_topic_of_no_table_has_no_keys() -> None:
    assert problem(KEY, None, "t.public.others") == "its key is not one of the table"


def test_a_bad_record_is_named_by_its_key_if_it_has_one() -> None:
    assert decoder().row_id(ITEMS.topic, KEY) == ID
    for key in (None, b"", b"\xff", b'{"a":"\xff","b":1}', b'{"a":"k"}', b"7"):
        assert decoder().row_id(ITEMS.topic, key) is None
    assert decoder().row_id("t.public.others", KEY) is None


def test_a_text_may_hold_what_stands_for_bytes_that_are_none() -> None:
    key = {"a": "\ufffd", "b": 1}
    row = {**key, "v": "\ufffd", "n": 1}
    change = decoder().decode(ITEMS.topic, packed(key), packed(envelope("c", None, row)))
    assert (change.id, json.loads(change.row or b"")) == ('["\ufffd",1]', row)


def test_a_row_keeps_every_digit_and_escape() -> None:
    row = b'{"a":"k\\u000B\\/","b":12345678901234567890123, "v":1.10e400,"n":-0.0}'
    value = packed(EVENT).replace(packed(ROW), row)
    assert decoder().decode(ITEMS.topic, KEY, value).row == row


def keyed(**types: str) -> Table:
    """A table with a key `k` and these columns."""
    columns = (Column(*column) for column in {"k": "text", **types}.items())
    return Table("public", "w", tuple(columns), ("k",), "t.public.w")


def update(table: Table, row: Row, *, ascii_only: bool = False) -> Change:
    event = packed({"op": "u", "after": row}, ascii_only=ascii_only)
    return decoder(table).decode(table.topic, b'{"k":"1"}', event)


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("ascii_only", [False, True])
def test_every_shape_is_a_placeholder(kind: str, ascii_only: bool) -> None:
    """Alone, beside others, and never what merely looks like one."""
    shape, type_ = SHAPES[kind], "uuid[]" if kind == "uuid" else kind.split(" ", maxsplit=1)[0]
    cut = PLACEHOLDER[:-1]
    near = {"x": cut, "y": [cut], "z": list(cut.encode()), "w": f"{PLACEHOLDER}x"}
    row = {"a": shape, **near, "b": "b", "é": shape, "c": None}
    change = update(keyed(a=type_, é=type_), {**row, "k": "1"}, ascii_only=ascii_only)
    assert change.missing == ("a", "é")
    assert twin.loads((change.row or b"").decode()) == {**row, "k": "1", "a": None, "é": None}


def test_a_masked_placeholder_is_one() -> None:
    """The connector masks it as any value, and cuts a character of two units apart."""
    hashed, cut, short = Mask(hash="salt"), Mask(cut=40), Mask(cut=20)
    columns = [Column("k", "text"), Column("h", "text", mask=hashed), Column("c", "text", mask=cut)]
    table = replace(keyed(), columns=tuple(columns))
    digest = sha256(f"salt{PLACEHOLDER}".encode()).hexdigest()
    row = {"k": "1", "h": digest, "c": PLACEHOLDER[:40]}
    assert update(table, row).missing == ("h", "c")
    assert update(table, {**row, "h": digest[1:], "c": PLACEHOLDER[:39]}).missing == ()
    table = replace(table, columns=(*columns[:2], Column("c", "text", mask=short)))
    with pytest.raises(Unreadable, match="a mask leaves open"):
        update(table, {**row, "c": PLACEHOLDER[:20]})
    # The table may have had the mask until now. As bytes: Python's own encoder has no half of a pair.
    table = keyed(h="text", c="text")
    texts = {
        "x\\uD83D": "x",
        "\\\\uD83D": "\\uD83D",
        "\\\\\\uD83D": "\\",
        "\\uD83D\\uDE00": "\U0001f600",
    }
    for written, read in texts.items():
        value = b'{"op":"c","after":{"k":"1","h":null,"c":"%b"}}' % written.encode()
        change = decoder(table).decode(table.topic, b'{"k":"1"}', value)
        assert json.loads(change.row or b"")["c"] == read


MASKS = {"h": Mask(hash="salt"), "c": Mask(cut=40), "s": Mask(cut=20)}
LACKING = {name: mask.placeholder("text", PLACEHOLDER) for name, mask in MASKS.items()}
DIGEST = sha256(b"saltvalue").hexdigest()


@pytest.mark.parametrize(
    ("entry", "row", "view"),
    [
        # The condition judges what the log has.
        ({"where": f"h = '{DIGEST}'"}, {"h": DIGEST}, {"k": "1"}),
        ({"where": "h = 'value'"}, {"h": DIGEST}, None),
        # What nothing needs may be lacking, and cut anywhere.
        ({"where": "k = '1'"}, LACKING, {"k": "1"}),
        ({}, {"c": "\ud83d"}, {"k": "1"}),
        # A column may have the name of another that the sink hasn't.
        ({"exclude": ["h", "s"], "rename": {"c": "h"}}, {"c": "x\ud83d"}, {"k": "1", "h": "x"}),
        ({"exclude": ["h", "s"], "rename": {"c": "h"}}, LACKING, {"k": "1", "h": None}),
        ({"where": "h <> 'x'"}, LACKING, "the sink's `where` needs"),
        ({"where": "c <> 'x'"}, LACKING, "the sink's `where` needs"),
        ({"where": "s <> 'x'"}, LACKING, "a mask leaves open"),
    ],
)
def test_a_sink_renames_leaves_out_and_judges_masked_columns(
    entry: dict[str, Any], row: Row, view: Row | str | None
) -> None:
    columns = (Column("k", "text"), *(Column(name, "text", mask=MASKS[name]) for name in MASKS))
    masked = replace(keyed(), columns=columns)
    listed = [{"table": "public.w", "exclude": list(MASKS), **entry}]
    cache = {"type": "redis", "url": "redis://127.0.0.1:1", "prefix": "x", "tables": listed}
    sinks = pipeline("x", NO_SOURCE, "public.w", sinks={"cache": cache})
    table = table_survey.for_sinks(masked, sinks).for_sink("cache")
    assert table.misnamed == {}
    # As ASCII, for UTF-8 has no half of a character.
    row = {"k": "1", "h": "", "c": "", "s": "", **row}
    event = packed({"op": "u", "after": row}, ascii_only=True)

    def decoded() -> Change:
        reading = decoder(table)
        return reading.select(table.topic, reading.decode(table.topic, b'{"k":"1"}', event))

    if isinstance(view, str):
        with pytest.raises(Unreadable, match=view):
            decoded()
        return
    change = decoded()
    assert change.missing == tuple(name for name, value in (view or {}).items() if value is None)
    document = None if change.row is None else json.loads(codec(table).document(change.row))
    assert document == view


@pytest.mark.parametrize(("op", "missing"), [("u", ("v",)), ("c", ("v",)), ("r", ())])
def test_a_row_of_a_snapshot_misses_nothing(op: str, missing: tuple[str, ...]) -> None:
    """It is selected, so what looks like the placeholder is the user's text. A create may come from an
    update of a key, which carries as little as any update.
    """
    row = {**ROW, "v": PLACEHOLDER}
    change = decoder().decode(ITEMS.topic, KEY, packed(envelope(op, None, row)))
    assert change.missing == missing
    assert json.loads(change.row or b"") == (row if op == "r" else {**row, "v": None})


@pytest.mark.parametrize("reshaped", [False, True])
def test_a_column_that_the_table_has_no_more_is_not_missing(reshaped: bool) -> None:
    """Nothing could complete it. A table that isn't reshaped may get it yet."""
    table = replace(keyed(a="text"), reshaped=reshaped)
    change = update(table, {"k": "1", "a": PLACEHOLDER, "gone": PLACEHOLDER})
    assert change.missing == (("a",) if reshaped else ("a", "gone"))
    assert json.loads(change.row or b"") == {"k": "1", "a": None, "gone": None}


@pytest.mark.parametrize("kind", SHAPES)
def test_no_placeholder_of_a_column_that_nobody_knows_yet_passes(kind: str) -> None:
    """The record was written after ALTER TABLE ... ADD, which the pipeline hasn't heard of."""
    table = keyed(a="integer")
    row = {"k": "1", "a": 1, "new": SHAPES[kind]}
    change = update(table, row)
    assert json.loads(codec(table).document(change.row or b"")) == {**row, "new": None}
    assert change.missing == ("new",)


def make_table(names: list[str], types: tuple[str, ...], key: int) -> Table:
    columns = tuple(Column(*arguments) for arguments in zip(names, types, strict=True))
    return Table("public", "one", columns, tuple(names[:key]), "t.public.one")


@given(
    names=st.lists(st.one_of(st.sampled_from(STRANGE), TEXT), min_size=9, max_size=9, unique=True),
    texts=st.lists(TEXT, min_size=3, max_size=6, unique=True),
    seed=st.integers(0, 2**32),
    form=st.sampled_from(["events", "documents"]),
)
@budget(40)
def test_decoding_equals_the_twin(names: list[str], texts: list[str], seed: int, form: Any) -> None:
    table = make_table(names, TYPES, 2)
    numbers = (0, -1, 2**53 + 1, 2**63 - 1, -(2**63))
    keys = [{names[0]: text, names[1]: number} for text in texts for number in numbers]
    assert_as_the_twin(table, Scribe(table, seed, texts, keys).log(100, garbage=0.4), form)


@given(seed=st.integers(0, 2**32), form=st.sampled_from(["events", "documents"]))
@budget(40)
def test_placeholders_equal_the_twin(seed: int, form: Any) -> None:
    texts = ["", "a", 'q"\\', "😀", "null", PLACEHOLDER[:-1], PLACEHOLDER[1:]]
    names = ["id", *(f"c{index} {type_}" for index, type_ in enumerate(TOASTED))]
    table = make_table(names, ("bigint", *TOASTED), 1)
    scribe = Scribe(table, seed, texts, [{"id": number} for number in range(5)])
    assert_as_the_twin(table, scribe.log(100, garbage=0.06, lacking=0.5), form)


TRICKY = (
    "", '"', "\\", ",", "[", "]", "a,b", '","', "_", ":", "é", "😀", "\n", "\x0b", "\x1f", "\u2028", "\\u000b",
)  # fmt: skip
LONG = "x" * 600
KEYED = st.one_of(
    st.sampled_from([*TRICKY, "null", "1", LONG, LONG + "y", "sha256:" + "0" * 64]), TEXT
)


@given(
    texts=st.lists(st.tuples(KEYED, KEYED), min_size=30, max_size=60, unique=True),
    numbers=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=3, max_size=6, unique=True),
    types=st.sampled_from(
        [("text",), ("text", "text"), ("text", "bigint"), ("bigint", "text", "text"), ("bigint",)]
    ),
)
@budget(20)
def test_no_two_keys_collide(
    texts: list[tuple[str, str]], numbers: list[int], types: tuple[str, ...]
) -> None:
    """Neither as ids, nor as the ids of documents, which are at most 512 bytes long."""
    near = [*numbers, *(n + 1 for n in numbers if n < 2**63 - 1)]
    pairs = [(pair, number) for pair in texts for number in near]
    mixed = dict.fromkeys(
        tuple(n if t == "bigint" else p[index % 2] for index, t in enumerate(types))
        for p, n in pairs
    )
    table = make_table([f"k{index}" for index in range(len(types))], types, len(types))
    assert_told_apart(table, list(mixed))


def assert_told_apart(keyed: Table, mixed: Sequence[tuple[Any, ...]]) -> None:
    keys = [dict(zip(keyed.key, key, strict=True)) for key in mixed]
    ids = [codec(keyed).row_id(packed(key)) for key in keys]
    assert ids == [codec(keyed).row_id(packed(key, ascii_only=True)) for key in keys]
    assert len(set(ids)) == len(mixed), "two keys with one id"
    assert ids == [row_id(list(key)) for key in mixed]
    documents = [document_id(key_id) for key_id in ids]
    assert len(set(documents)) == len(mixed), "two keys with one document"
    assert all(len(document.encode()) <= LONGEST_ID for document in documents)
