"""What executors make of raw records for an audit, for verify and repair, against the twin."""

import json
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.codec import log_rows
from cdc.codec.decode_options import DecodeOptions
from cdc.codec.log_rows import (
    DEAD,
    DELETE,
    FOREIGN,
    KEYLESS,
    ROW,
    TOMBSTONE,
    UNREADABLE,
    RecordClassifier,
    RecordSummary,
)
from cdc.model.mask import Mask
from cdc.model.table import Column, Projection, Table
from tests.support import twin
from tests.support.budget import budget
from tests.support.envelopes import COMMITTED_US, PLACEHOLDER, Row, envelope
from tests.support.scribe import TYPES, Scribe, packed
from tests.support.twin import Change, Raw, RowFormat, Twin

NAMES = tuple(f"c{index}" for index in range(len(TYPES)))
BELOW, FLOOR = 200, 150
MASK = PLACEHOLDER
KEY = b'{"id":1}'


def wide(*, reshaped: bool = False) -> Table:
    columns = tuple(Column(*column) for column in zip(NAMES, TYPES, strict=True))
    return Table("public", "one", columns, NAMES[:2], "t.public.one", reshaped=reshaped)


def items(*, reshaped: bool = False) -> Table:
    columns = (Column("id", "bigint"), *(Column(name, "text") for name in "vw"))
    return Table("public", "items", columns, ("id",), "t.public.items", reshaped=reshaped)


def looker(
    table: Table, *, warehouse: bool = False, floor: int = 0, starts: Any = (), below: int = 0
) -> RecordClassifier:
    reading = DecodeOptions(PLACEHOLDER, {table.topic: floor}, {table.topic: starts})
    return RecordClassifier(table, reading, (table.for_sink("warehouse"),) * warehouse, below)


RECORDS = pa.schema(
    {"key": pa.binary(), "value": pa.binary(), "partition": pa.int32(), "offset": pa.int64()}
)


def batches(records: Sequence[Raw], size: int = 1000) -> Iterator[pa.RecordBatch]:
    for start in range(0, len(records), size):
        rows = [record._asdict() for record in records[start : start + size]]
        yield pa.RecordBatch.from_pylist(rows, schema=RECORDS)


def summaries(
    classifier: RecordClassifier, records: Sequence[Raw], size: int = 1000
) -> list[RecordSummary]:
    parts = classifier.work(batches(records, size))
    return [RecordSummary(**row) for part in parts for row in part.to_pylist()]


def summary_of(
    value: bytes | None, key: bytes | None = KEY, offset: int = 5, **options: Any
) -> RecordSummary:
    table = options.pop("table", items())
    (only,) = summaries(looker(table, **options), [Raw(key, value, table.topic, 0, offset)])
    return only


def event(op: str = "u", lsn: int = 500, **row: Any) -> bytes:
    image = None if op == "d" else {"id": 1, "v": "v", "w": "w", **row}
    message = envelope(op, None, image, lsn)
    return packed({**message, "source": {**message["source"], "table": "items"}})


@pytest.mark.parametrize("key", [b'{"id":1,"x":2}', b'{"id":"\xff"}'])
def test_another_key_is_foreign_whatever_comes_with_it(key: bytes) -> None:
    """The scribe's garbage has other keys."""
    for value in (None, b"no json", event()):
        assert summary_of(value, key=key) == RecordSummary(0, 5, None, FOREIGN)


def test_what_is_dead() -> None:
    """By offset, whatever it is, but for tombstones. By LSN the twin knows as well."""
    dead = RecordSummary(0, 5, "1", DEAD)
    assert summary_of(b"no json", starts=[6]) == summary_of(event(), starts=[6]) == dead
    assert summary_of(None, starts=[6]) == RecordSummary(0, 5, "1", TOMBSTONE)
    assert summary_of(event(), starts=[5]).living
    assert summary_of(event(), starts=[]).living


def test_a_row_from_before_its_definition_is_outdated() -> None:
    assert summary_of(event(lsn=99), below=100).outdated
    sourceless = packed({**json.loads(event()), "source": None})
    assert not summary_of(sourceless, below=100).outdated


def test_which_values_a_row_has() -> None:
    assert summary_of(event(v=MASK))[-3:-1] == (["v"], ["id", "w"])
    assert summary_of(event(new="x"))[-3:-1] == (None, ["id", "new", "v", "w"])
    assert summary_of(event(new=MASK))[-3:-1] == (["new"], None)
    short = packed({"op": "u", "after": {"id": 1, "v": None}})
    assert summary_of(short)[-3:-1] == (None, ["id", "v"])
    for value in ("x", MASK):
        assert summary_of(event(old=value), table=items(reshaped=True))[-3:-1] == (None, None)


def test_the_warehouse_holds_less() -> None:
    columns = (Column("id", "bigint"), Column("n", "numeric(3,1)"), Column("m", "integer"))
    table = Table("public", "items", columns, ("id",), "t.public.items")
    value = packed({"op": "u", "after": {"id": 1, "n": "1000", "m": 1}})
    assert summary_of(value, table=table).says == ROW
    assert summary_of(value, table=table, warehouse=True).says == UNREADABLE
    without = replace(table, projections={"warehouse": Projection(("id",))})
    assert summary_of(value, table=without, warehouse=True).says == ROW
    misfit = packed({"op": "u", "after": {"id": 1, "n": "1", "m": "x"}})
    assert summary_of(misfit, table=without, warehouse=True).says == UNREADABLE


@pytest.mark.parametrize(
    ("mask", "type_", "masked", "clear"),
    [
        (Mask(redact=True), "text", "*" * 8, "*" * 7),
        (Mask(hash="s"), "text", "0a" * 32, "0A" * 32),
        (Mask(hash="s"), "character varying(20)", "0a" * 10, "0a" * 32),
        (Mask(cut=4), "character(9)", "ab\U0001f600", "abcd\ud83d"),
        (Mask(cut=4), "character varying(4)", "abcd", None),
    ],
)
def test_what_a_mask_did_not_write(mask: Mask, type_: str, masked: str, clear: str | None) -> None:
    columns = (Column("id", "bigint"), Column("n", type_, mask=mask, renamed_from="v"))
    table = Table("public", "items", columns, ("id",), "t.public.items")
    for value, is_clear in ((masked, False), (None, False), ("", False), (clear, bool(clear))):
        image = {"id": 1, "v": value}
        for op, before, after in (("u", None, image), ("d", image, None)):
            # With ASCII alone, as half of a character has no other form.
            record = json.dumps(envelope(op, before, after)).encode()
            assert summary_of(record, table=table).unmasked == is_clear, (value, op)
            assert summary_of(record, table=table, starts=[6]).unmasked == is_clear
    assert not summary_of(b"no json", table=table).unmasked


def test_only_a_row_says_when_it_was_committed() -> None:
    """Where its last record has none, nobody can say how old it is."""
    sourceless = packed({**json.loads(event()), "source": None})
    values = [event(), event("d"), None, b"no json", sourceless]
    records = [Raw(KEY, value, "t.public.items", 0, offset) for offset, value in enumerate(values)]
    records.append(Raw(b"another key", event(), "t.public.items", 0, 9))
    listed = (batch.select(["key", "value", "offset"]) for batch in batches(records, 4))
    found = [row for batch in log_rows.commits(items())(listed) for row in batch.to_pylist()]
    assert [(row["id"], row["committed_us"], row["offset"]) for row in found] == [
        ("1", COMMITTED_US, 0),
        *(("1", None, offset) for offset in range(1, 5)),
    ]


def test_a_looker_can_be_sent_to_a_worker() -> None:
    used = looker(items(), starts=[0, 0])
    expected = used.classify(KEY, event(v=MASK), 1, 5)
    assert pickle.loads(pickle.dumps(used)).classify(KEY, event(v=MASK), 1, 5) == expected


def kind_of(change: Change, value: bytes | None) -> str:
    if change.wrong:
        return UNREADABLE
    if change.dead:
        return DEAD
    return TOMBSTONE if value is None else DELETE if change.after is None else ROW


def unknown(table: Table, records: Sequence[RecordSummary], size: int = 7) -> list[str]:
    """Return the unknown ids of rows that Spark hands on sorted by id, partition and offset."""
    rows = sorted(
        (row for row in records if row.living or row.says == UNREADABLE),
        key=lambda row: (row.id or "", row),
    )
    names = pa.list_(pa.string())
    schema = pa.schema(
        {"id": pa.string(), "partition": pa.int32(), "says": pa.string()}
        | {"missing": names, "carried": names}
    )
    shares = [rows[start : start + size] for start in range(0, len(rows), size)]
    parts = [
        pa.RecordBatch.from_pylist([row._asdict() for row in share], schema=schema)
        for share in shares
    ]
    found = log_rows.unknown(table)(iter(parts))
    return [key for part in found for key in part.column("id").to_pylist()]


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=4)


@given(
    texts=st.lists(TEXT, min_size=1, max_size=3, unique=True),
    seed=st.integers(0, 2**32),
    garbage=st.sampled_from([0.0, 0.1, 0.4]),
    warehouse=st.booleans(),
    size=st.integers(1, 120),
)
@budget(60)
def test_records_and_unknown_values_equal_the_twin(
    texts: list[str], seed: int, garbage: float, warehouse: bool, size: int
) -> None:
    table = wide()
    keys = [{NAMES[0]: text, NAMES[1]: number} for text in texts for number in (0, -1, 2**53 + 1)]
    records = Scribe(table, seed, ["", "a", MASK[:-1]], keys).log(200, garbage=garbage)
    form: RowFormat = "events" if warehouse else "documents"
    reader = Twin([table], form, PLACEHOLDER, {table.topic: FLOOR})
    decoded = [reader.decode(record) for record in records]
    # What is dead needs to fit no view.
    changes = [replace(change, wrong=change.wrong and not change.dead) for change in decoded]
    rows = summaries(looker(table, warehouse=warehouse, floor=FLOOR, below=BELOW), records, size)
    for row, change, record in zip(rows, changes, records, strict=True):
        place = (row.partition, row.offset, row.id)
        assert place == (record.partition, record.offset, change.id)
        if change.id is None:
            assert row.says == (KEYLESS if record.key is None else FOREIGN)
            continue
        assert row.says == kind_of(change, record.value), record
        assert row.living == (row.says in (ROW, DELETE, TOMBSTONE))
        assert row.outdated == (row.says == ROW and change.lsn is not None and change.lsn < BELOW)
        missing = change.missing if row.says == ROW else None
        assert frozenset(row.missing or ()) == (missing or frozenset())
    _, lost = twin.applied(changes, {})
    assert sorted(unknown(table, rows, size)) == sorted(lost)


CHAINS: list[tuple[list[Row], bool]] = [
    # Nobody has ever seen its value, or one record carries it that nobody knew of.
    ([{}, {"new": MASK}], True),
    ([{"new": "x"}, {"new": MASK}], False),
    ([{"new": "x"}, {}, {"new": MASK}], True),
]


@pytest.mark.parametrize(("rows", "lacks"), CHAINS)
def test_a_column_that_came_later(rows: list[Row], lacks: bool) -> None:
    """The twin's histories have every other chain of changes."""
    table = items()
    values = [event(**row) for row in rows]
    records = [Raw(KEY, value, table.topic, 0, offset) for offset, value in enumerate(values)]
    assert unknown(table, summaries(looker(table), records), size=1) == (["1"] if lacks else [])


def test_a_row_s_chain_is_of_one_partition() -> None:
    table = items()
    records = [Raw(KEY, event(), table.topic, 0, 1), Raw(KEY, event(v=MASK), table.topic, 1, 2)]
    assert unknown(table, summaries(looker(table), records)) == ["1"]


def test_documents_of_records() -> None:
    table = items()
    records = [
        Raw(KEY, value, table.topic, 0, offset)
        for offset, value in enumerate([event(v="x"), event("d"), None, b"no json", event(lsn=1)])
    ]
    records += [Raw(None, event(), table.topic, 0, 9), Raw(b"no", event(), table.topic, 0, 10)]
    parts = log_rows.documents(table)(batches(records, 2))
    rows = [
        (row["id"], row["document"] and json.loads(row["document"]))
        for part in parts
        for row in part.to_pylist()
    ]
    full_row = {"id": 1, "v": "v", "w": "w"}
    assert rows == [("1", {**full_row, "v": "x"}), ("1", None), ("1", None), ("1", full_row)]


def test_keys_of_records() -> None:
    table = items()
    keys = [KEY, b'{"id": 1}', b"no", None, b'{"id":1,"x":2}']
    records = [Raw(key, None, table.topic, 0, offset) for offset, key in enumerate(keys)]
    parts = log_rows.ids(table)(batches(records, 2))
    rows = [(row["id"], row["key"]) for part in parts for row in part.to_pylist()]
    assert rows == [("1", keys[0]), ("1", keys[1]), ("1", keys[4])]
