"""The source's rows, read for a comparison: memory goes with a batch, whatever a row is wide."""

import itertools
from collections.abc import Iterator
from contextlib import closing

import psycopg
import pytest
from psycopg.pq import TransactionStatus

from cdc.model.table import Column, Table
from cdc.postgres import source
from cdc.postgres.row_query import row_query
from cdc.verify.source_rows import CHUNK_BYTES, READ_ONLY, fetch_rows, list_ids

TABLE = Table(
    "public",
    "wide",
    (Column("id", "bigint"), Column("v", "text")),
    ("id",),
    "t.public.wide",
)
WIDTH = 3_000_000
ROWS = 12


@pytest.fixture
def wide(postgres_dsn: str) -> "Iterator[psycopg.Connection]":
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:
        connection.execute("CREATE TABLE wide (id bigint PRIMARY KEY, v text)")
        connection.execute(
            "INSERT INTO wide SELECT n, repeat('x', %s) FROM generate_series(1, %s) n",
            [WIDTH, ROWS],
        )
        connection.execute(READ_ONLY)
        yield connection


def test_wide_rows_come_in_batches(wide: "psycopg.Connection") -> None:
    ids = [str(number) for number in range(1, ROWS + 1)]
    batches = fetch_rows(wide, TABLE, ids, "SELECT 1")
    first = next(batches)
    # Postgres is still sending while the first batch is worked on: the others are nowhere yet.
    assert wide.info.transaction_status == TransactionStatus.ACTIVE
    later_batches = list(batches)
    assert all(batch.nbytes <= CHUNK_BYTES for batch in [first, *later_batches])
    assert sorted(
        row for batch in [first, *later_batches] for row in batch.column("id").to_pylist()
    ) == sorted(ids)


def test_an_id_that_is_no_value_of_the_key(wide: "psycopg.Connection") -> None:
    batches = list(fetch_rows(wide, TABLE, ["nonsense", "7"], "SELECT 1"))
    assert [row for batch in batches for row in batch.column("id").to_pylist()] == ["7"]


KEYS = {
    "bigint": ("-9", "10", "9", "0"),
    "text": ("", "a", "Ä", "B", "it's", '"', "\\"),
    "numeric(20,2)": ("-1.50", "NaN", "10.00", "9.00"),
    "double precision": ("-Infinity", "0.1", "1e300", "NaN"),
    "date": ("-infinity", "0044-03-15 BC", "2026-01-31", "infinity"),
    "timestamp(3) with time zone": ("2026-03-29 00:30:00+00", "0001-01-01 BC", "infinity"),
    "interval": ("-1 days", "1 mon", "30 days 00:00:01"),
    "character(4)": ("a", "ab", "b"),
    "boolean": ("f", "t"),
    "uuid": ("00000000-0000-0000-0000-000000000001", "ffffffff-0000-0000-0000-000000000000"),
    "bytea": ("\\x00", "\\xff", "\\x"),
    "public.mood": ("sad", "glad"),
    "integer[]": ("{}", "{1,2}", "{NULL}"),
}
"""Values of types that a key may have."""


@pytest.mark.parametrize(
    "kinds", [*((kind,) for kind in KEYS), ("text", "bigint"), ("public.mood", "date", "text")]
)
@pytest.mark.parametrize("limit", [1, 2, 100])
def test_ids_are_listed_in_the_order_of_keys(
    postgres_dsn: str, kinds: tuple[str, ...], limit: int
) -> None:
    """Each once, while later ones are added, which aren't waited for."""
    names = [f"k{number}" for number in range(len(kinds))]
    columns = tuple(Column(name, kind) for name, kind in zip(names, kinds, strict=True))
    listed = Table("public", "listed", columns, tuple(names), "t.public.listed")
    ids: list[str] = []
    with closing(source.open_session(postgres_dsn)) as connection:
        connection.execute("CREATE TYPE public.mood AS ENUM ('sad', 'glad')")
        typed = ", ".join(f"{column.name} {column.type}" for column in columns)
        connection.execute(
            f"CREATE TABLE public.listed ({typed}, PRIMARY KEY ({', '.join(names)}))".encode()
        )
        assert list_ids(connection, listed, None, limit) == ([], None)
        insert = f"INSERT INTO public.listed VALUES ({', '.join(['%s'] * len(kinds))})"
        rows = list(itertools.product(*(KEYS[kind] for kind in kinds)))
        for row in rows:
            connection.execute(insert.encode(), row)
        cursor = None
        for _ in range(len(rows) + 2):
            page, cursor = list_ids(connection, listed, cursor, limit)
            ids += page
            if cursor is None:
                break
            if kinds == ("bigint",):
                connection.execute(
                    "INSERT INTO public.listed SELECT max(k0) + 1 FROM public.listed"
                )
        assert cursor is None
        expected = connection.execute(row_query(listed)).fetchall()
    assert len(ids) == len(rows)
    assert set(ids) <= {row_id for row_id, _ in expected}
    if kinds != ("bigint",):
        assert set(ids) == {row_id for row_id, _ in expected}
