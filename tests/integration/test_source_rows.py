"""The source's rows, read for a comparison: memory goes with a batch, whatever a row is wide."""

from collections.abc import Iterator

import psycopg
import pytest
from psycopg.pq import TransactionStatus

from cdc.model.table import Column, Table
from cdc.verify.source_rows import CHUNK_BYTES, READ_ONLY, fetch_rows

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
