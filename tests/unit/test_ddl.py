"""What each change of a definition means for rows that exist already."""

import json
from base64 import b64encode
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.errors import DecodeError
from cdc.model.mask import Mask
from cdc.postgres.schema_changes import Consequence, consequences, same_text
from cdc.postgres.table_definition import ColumnDefinition, Definition, TypeDefinition, parse

ID = ColumnDefinition("id", "integer", 1, key=1)
NOTE = ColumnDefinition("note", "character varying(10)", 2)
MOODS = TypeDefinition(20, labels={"1": "good", "2": "bad"})
MOOD = ColumnDefinition("mood", "public.mood", 3, types=(MOODS,))
PAIRS = TypeDefinition(22, attributes=("a integer",))
PAIR = ColumnDefinition("pair", "public.pair", 4, types=(PAIRS,))
BASE = (ID, NOTE, MOOD, PAIR)


def entry(
    number: int, command: str = "ALTER TABLE", table: str = "public.t", **fields: Any
) -> Definition:
    base = Definition(number, table, 7, number, command, BASE, None, True)
    return replace(base, **fields)


FIRST = entry(1, "PUBLISH", streamed=False)


def kinds(*history: Definition) -> list[str]:
    """What comes of each of these definitions for public.t."""
    made = consequences(history, ["public.t"])
    assert {consequence.table for consequence in made} <= {"public.t"}
    return [consequence.kind for consequence in made]


def test_a_mask_depends_on_the_declared_length() -> None:
    """A hash is cut to it, and what is declared to be short isn't cut at all: rows have to be sent again."""
    for mask, kind in (
        (Mask(hash="s"), "refresh"),
        (Mask(cut=30), "refresh"),
        (Mask(cut=4), "none"),
    ):
        for before, after in (
            (NOTE.type, "character varying(40)"),
            ("character varying(90)", "text"),
        ):
            short = entry(1, "PUBLISH", columns=(ID, replace(NOTE, type=before)), streamed=False)
            long = entry(2, columns=(ID, replace(NOTE, type=after)))
            (made,) = consequences([short, long], ["public.t"], masks={"public.t.note": mask})
            assert made.kind == (kind if before == NOTE.type else "none")


def verdict(*columns: ColumnDefinition, **fields: Any) -> Consequence:
    (consequence,) = consequences([FIRST, entry(2, columns=columns, **fields)], ["public.t"])
    return consequence


@pytest.mark.parametrize(
    ("columns", "kind", "words"),
    [
        (BASE, "none", "stay as they are"),
        ((*BASE, ColumnDefinition("more", "text", 5)), "none", ""),
        ((ID, MOOD, PAIR), "none", ""),
        ((ID, replace(NOTE, default="'x'::text"), MOOD, PAIR), "none", ""),
        ((ID, replace(NOTE, type="character varying(20)"), MOOD, PAIR), "none", ""),
        ((ID, replace(NOTE, type="text"), MOOD, PAIR), "none", ""),
        ((*BASE, ColumnDefinition("more", "text", 5, default="'x'::text")), "refresh", "added with a default"),
        ((*BASE, ColumnDefinition("more", "public.with_default", 5, missing=True)), "refresh", "added with a default"),
        ((ID, replace(NOTE, name="remark"), MOOD, PAIR), "refresh", "note of public.t was renamed to remark"),
        ((ID, replace(NOTE, type="character varying(5)"), MOOD, PAIR), "refresh", "note of public.t has another type"),
        ((ID, replace(NOTE, type="integer"), MOOD, PAIR), "refresh", "another type"),
        ((ID, replace(NOTE, number=5), MOOD, PAIR), "refresh", "dropped and added again"),
        ((ID, NOTE, replace(MOOD, types=(replace(MOODS, labels={"1": "good"}),)), PAIR), "refresh", "label"),
        ((ID, NOTE, MOOD, replace(PAIR, types=(replace(PAIRS, attributes=("b integer",)),))), "refresh", "composite"),
        ((replace(ID, name="number"), NOTE, MOOD, PAIR), "cleanse", "primary key"),
        ((replace(ID, type="text"), NOTE, MOOD, PAIR), "cleanse", "id of public.t has another type"),
        ((replace(ID, key=None), replace(NOTE, key=1), MOOD, PAIR), "cleanse", "primary key"),
        ((replace(ID, key=2), replace(NOTE, key=1), MOOD, PAIR), "cleanse", "primary key"),
    ],
)  # fmt: skip
def test_changes_of_columns(columns: tuple[ColumnDefinition, ...], kind: str, words: str) -> None:
    consequence = verdict(*columns)
    assert (consequence.id, consequence.table, consequence.kind) == (2, "public.t", kind)
    assert words in consequence.reason


STATES = TypeDefinition(21, base="public.mood")
DEEP = ColumnDefinition("deep", "public.state", 5, types=(MOODS, STATES))


@pytest.mark.parametrize(
    ("types", "kind"),
    [
        ((MOODS, STATES), "none"),
        ((replace(MOODS, labels={"1": "good", "2": "bad", "3": "new"}), STATES), "none"),
        ((replace(MOODS, labels={"1": "good", "2": "worse"}), STATES), "refresh"),
        ((replace(MOODS, labels={"1": "bad", "2": "good"}), STATES), "refresh"),
        ((replace(MOODS, labels={"1": "good"}), STATES), "refresh"),
        ((MOODS, replace(STATES, base="text")), "refresh"),
        ((MOODS, replace(STATES, attributes=("a integer",))), "refresh"),
        ((MOODS,), "refresh"),
    ],
)
def test_parts_of_a_type_change_at_any_depth(types: tuple[TypeDefinition, ...], kind: str) -> None:
    history = [entry(1, columns=(DEEP,)), entry(2, columns=(replace(DEEP, types=types),))]
    assert kinds(*history)[-1] == kind
    key = replace(DEEP, key=1)
    history = [entry(1, columns=(key,)), entry(2, columns=(replace(key, types=types),))]
    assert kinds(*history)[-1] == kind.replace("refresh", "cleanse")


@pytest.mark.parametrize(
    ("command", "kind"), [("ALTER TABLE", "none"), ("COMPARE", "refresh"), ("DESCRIBE", "refresh")]
)
def test_a_column_that_was_noticed_late(command: str, kind: str) -> None:
    """Rows that were changed meanwhile came with it, and were applied without."""
    assert verdict(*BASE, ColumnDefinition("more", "text", 5), command=command).kind == kind
    assert verdict(ID, MOOD, PAIR, command=command).kind == "none"


def test_a_name_that_comes_back_later() -> None:
    remaining = (ID, MOOD, PAIR)
    dropped = entry(2, columns=remaining)
    added = entry(3, columns=(*remaining, replace(NOTE, number=5)))
    assert kinds(FIRST, dropped, added) == ["none", "refresh"]


def test_a_rewrite_is_one_refresh() -> None:
    """Its entry comes before the command's own, with the same columns."""
    assert kinds(FIRST, entry(2, "REWRITE TABLE"), entry(3)) == ["refresh", "none"]
    columns = (replace(ID, type="text"), NOTE, MOOD, PAIR)
    rewritten = entry(2, "REWRITE TABLE", columns=columns)
    assert kinds(FIRST, rewritten, entry(3, columns=columns)) == ["cleanse", "none"]


def parts(number: int, *names: str, command: str = "ALTER TABLE", **fields: Any) -> Definition:
    return entry(number, command, partitions=names, **fields)


@pytest.mark.parametrize(
    ("definition", "kind", "kind_of_events"),
    [
        (parts(2, "public.a", "public.b", command="CREATE TABLE"), "none", "none"),
        (parts(2, "public.a", "public.b"), "refresh", "refresh"),
        (parts(2), "cleanse", "none"),
        (parts(2, "public.b"), "cleanse", "refresh"),
        (parts(2, command="DROP TABLE"), "cleanse", "none"),
        (parts(2, "public.a", command="TRUNCATE PARTITION"), "cleanse", "none"),
        (parts(2, "public.a", command="DETACH PARTITION"), "cleanse", "refresh"),
        (parts(2, "public.a", "public.b", command="DESCRIBE"), "refresh", "refresh"),
    ],
)
def test_partitions(definition: Definition, kind: str, kind_of_events: str) -> None:
    """Views keep the events of a partition that is lost."""
    history = [parts(1, "public.a", streamed=False), definition]
    for events, expected in (((), kind), (("public.t",), kind_of_events)):
        (consequence,) = consequences(history, ["public.t"], events)
        assert (consequence.table, consequence.kind) == ("public.t", expected)


def test_a_renamed_partition_is_the_same_one() -> None:
    creation = entry(2, "CREATE TABLE", "public.a", relation=8)
    renamed = entry(4, table="public.b", relation=8)
    before = [parts(1, streamed=False), creation, parts(3, "public.a", command="CREATE TABLE")]
    history = [*before, renamed, parts(5, "public.b")]
    assert kinds(*history)[-1] == "none"
    # Its old name is free for another one.
    history.append(parts(6, "public.a", "public.b"))
    assert kinds(*history)[-1] == "refresh"
    assert kinds(*history, parts(7, "public.a", "public.b"))[-1] == "none"
    # The twin: without the entry of the partition it counts as another one.
    assert kinds(*before, parts(5, "public.b"))[-1] == "cleanse"


def test_a_table_that_goes() -> None:
    away = entry(2, table="public.u")
    dropped = entry(2, "DROP TABLE", columns=None)
    for last, reason in ((away, "was renamed to public.u"), (dropped, "was dropped")):
        (consequence,) = consequences([FIRST, last], ["public.t"])
        assert (consequence.table, consequence.kind) == ("public.t", "gone")
        assert consequence.reason == f"public.t {reason}"
    assert kinds(FIRST, away, entry(3))[-1] == "cleanse"


@pytest.mark.parametrize(
    "first", [entry(2, table="public.old"), entry(2, "DROP TABLE", columns=None)]
)
def test_another_table_under_the_name(first: Definition) -> None:
    namesake = entry(3, "CREATE TABLE", relation=9)
    assert kinds(FIRST, first, namesake) == ["gone", "gone"]
    history = [FIRST, first, namesake, replace(namesake, id=4, command="PUBLISH")]
    assert kinds(*history)[-1] == "cleanse"
    assert kinds(*history, replace(namesake, id=5, command="ALTER TABLE"))[-1] == "none"


def test_what_has_no_consequence() -> None:
    assert kinds(FIRST) == []
    assert kinds(FIRST, entry(2, columns=None, streamed=False)) == []
    assert consequences([FIRST, entry(2, columns=None)], ["public.other"]) == []
    created = entry(1, "CREATE TABLE")
    assert kinds(created) == ["none"]
    # Captured first, under a name that another table had before.
    dropped = entry(2, "DROP TABLE", columns=None)
    assert kinds(created, dropped, entry(3, "PUBLISH", relation=8)) == ["none", "gone", "none"]


COLUMNS = st.lists(
    st.builds(
        ColumnDefinition,
        st.sampled_from("abc"),
        st.sampled_from(["integer", "text", "character varying(3)"]),
        st.integers(1, 4),
        st.none() | st.just("1"),
        key=st.none() | st.integers(1, 2),
    ),
    unique_by=(lambda shape: shape.name, lambda shape: shape.number),
    max_size=3,
).map(tuple)
HISTORIES = st.lists(
    st.builds(
        entry,
        st.integers(1, 12),
        st.sampled_from(["ALTER TABLE", "CREATE TABLE", "DROP TABLE", "PUBLISH", "REWRITE TABLE"]),
        st.sampled_from(["public.t", "public.u"]),
        relation=st.integers(1, 3),
        columns=st.none() | COLUMNS,
        partitions=st.none()
        | st.lists(st.sampled_from(["public.t", "public.p"]), unique=True).map(tuple),
        streamed=st.booleans(),
    ),
    unique_by=lambda definition: definition.id,
    max_size=8,
)


@given(HISTORIES, st.randoms())
def test_what_was_said_is_never_taken_back(history: list[Definition], random: Any) -> None:
    """Whatever comes later, in whatever order records are read, and as often as they come."""
    ordered = sorted(history, key=lambda definition: definition.id)
    all_consequences = consequences(ordered, ["public.t"])
    for length in range(len(ordered)):
        part = consequences(ordered[:length], ["public.t"])
        assert all_consequences[: len(part)] == part
    mixed = [*history, *history]
    random.shuffle(mixed)
    assert consequences(mixed, ["public.t"]) == all_consequences
    streamed = {definition.id for definition in history if definition.streamed}
    assert {consequence.id for consequence in all_consequences} <= streamed


@given(HISTORIES)
def test_repeating_a_definition_changes_nothing(history: list[Definition]) -> None:
    if history and (last := max(history, key=lambda definition: definition.id)).columns is not None:
        repetition = replace(last, id=13, lsn=13, command="ALTER TABLE", streamed=True)
        results = consequences([*history, repetition], ["public.t", "public.u"])
        repeated = [consequence.kind for consequence in results if consequence.id == 13]
        assert repeated in (["none"], ["gone"])


def envelope(op: str, row: Any) -> bytes:
    return json.dumps({"before": None, "after": row, "op": op, "source": {"lsn": 5}}).encode()


ROW = {
    "id": 3,
    "at": "2026-01-01T00:00:00Z",
    "lsn": b64encode(b"1/35069AE0").decode(),
    "command": "ALTER TABLE",
    "table_name": "public.t",
    "columns": '[{"name": "id", "number": 1, "type": "integer", "default": null, "missing": false, "key": 1,'
    ' "types": [], "identified": true}]',
    "relation": 37359,
    "partitions": '["public.a"]',
}  # fmt: skip


def test_a_record_of_the_journal() -> None:
    definition = Definition(
        3, "public.t", 37359, 0x1_35069AE0, "ALTER TABLE", (ID,), ("public.a",), True
    )
    assert parse(envelope("c", ROW)) == definition
    assert parse(envelope("r", ROW)) == replace(definition, streamed=False)
    dropped = ROW | {"columns": None, "partitions": None}
    assert parse(envelope("c", dropped)) == replace(definition, columns=None, partitions=None)
    assert parse(b"") is parse(envelope("d", None)) is None


@pytest.mark.parametrize(
    "value", [b"{", b"[]", b"{}", envelope("c", {"id": 1}), envelope("c", ROW | {"lsn": "x"})]
)
def test_what_is_no_record_of_the_journal(value: bytes) -> None:
    with pytest.raises(DecodeError):
        parse(value)


@pytest.mark.parametrize(
    ("old_type", "same", "different"),
    [
        ("integer", ["integer"], ["bigint"]),
        ("text", ["character varying"], ["character varying(3)"]),
        ("character varying(3)[]", ["text[]"], ["text"]),
        ("character(3)", [], ["text"]),
        ("numeric(5,2)", ["numeric(7,2)"], ["numeric(4,2)", "numeric(7,3)", "numeric"]),
        ("timestamp(0) with time zone", [], ["timestamp(3) with time zone"]),
        ('shop."O""dd"', [], ["text"]),
    ],
)
def test_types_whose_values_read_the_same(
    old_type: str, same: list[str], different: list[str]
) -> None:
    assert all(same_text(old_type, new_type) for new_type in same)
    assert not any(same_text(old_type, new_type) for new_type in different)
