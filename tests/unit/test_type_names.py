"""Which types are refused, and by which name a type is looked up."""

import pytest

from cdc.model.pg_types import base_type, loss
from cdc.model.table import Column, Table
from cdc.postgres.row_query import snapshot_overrides


@pytest.mark.parametrize(
    ("type_", "name"),
    [
        ("numeric(10,2)[]", "numeric"),
        ("timestamp(3) with time zone", "timestamp with time zone"),
        ("interval year to month", "interval"),
        ("interval(3)", "interval"),
        ("public.citext", "citext"),
        ("ext.vector(3)", "vector"),
        ("one.mood[]", "one.mood"),
    ],
)
def test_a_type_is_looked_up_by_its_bare_name(type_: str, name: str) -> None:
    assert base_type(type_) == name


@pytest.mark.parametrize(
    "type_", ["bit varying(5)", "time(3) without time zone[]", "interval[]", "bit(3)[]", "money[]"]
)
def test_what_would_lose_something_is_refused(type_: str) -> None:
    assert loss(type_)


@pytest.mark.parametrize(
    "type_", ["text", "text[]", "bit(3)", "interval", "time without time zone", "one.mood[]"]
)
def test_what_travels_whole_is_taken(type_: str) -> None:
    assert loss(type_) is None


@pytest.mark.parametrize(
    "type_", ["double precision", "jsonb", "integer[]", "time(3) with time zone"]
)
def test_a_key_needs_one_text_for_each_value(type_: str) -> None:
    assert loss(type_) is None
    assert loss(type_, key=True)


def test_a_snapshot_reads_dates_as_days_and_nothing_else_otherwise() -> None:
    columns = (
        Column("id", "integer"),
        Column('d"x', "date"),
        Column("t", "timestamp without time zone"),
    )
    dated = Table("public", "w", columns, ("id",), "p.public.w")
    plain = Table("public", "v", columns[:1], ("id",), "p.public.v")
    properties = snapshot_overrides([plain, dated])
    assert properties["snapshot.select.statement.overrides"] == "public.w"
    query = properties["snapshot.select.statement.overrides.public.w"]
    assert query.startswith('SELECT "id", CASE WHEN isfinite("d""x") THEN "d""x" - DATE')
    assert query.endswith('AS "d""x", "t" FROM "public"."w"')
    assert snapshot_overrides([plain]) == {}
