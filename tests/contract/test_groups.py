"""Many small views read in one job: as each by itself; a fault in one neither spoils nor hides behind the others."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from cdc.model.table import Table
from cdc.postgres.row_query import Sample
from cdc.sink.contract import GroupScanner, Sink
from cdc.sinks.delta.sink import Delta
from cdc.sinks.elasticsearch.sink import Elasticsearch
from cdc.verify.census import take_census
from cdc.verify.comparison import Comparison
from cdc.verify.source_rows import SourceReader
from cdc.verify.verification import compare
from tests.contract import laws
from tests.contract.test_contract import maker
from tests.support import http
from tests.support.envelopes import Row, table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TABLES = 3
"""The last of them is empty."""
EMPTY = TABLES - 1


@dataclass
class Shelf:
    """Tables in Postgres and their views in one sink, equal to begin with."""

    spark: "SparkSession"
    dsn: str
    harnesses: list[laws.Harness]

    @property
    def tables(self) -> list[Table]:
        return [harness.table for harness in self.harnesses]

    @property
    def sink(self) -> Sink:
        return self.harnesses[0].sink

    def unproved(self, sample: Sample | None = None) -> list[str]:
        sink = self.sink
        assert isinstance(sink, GroupScanner)
        proved = take_census(
            SourceReader(self.spark), self.dsn, self.tables, {sink.name: sink}, sample
        )
        return [table.name for table in self.tables if (sink.name, table.qualified) not in proved]

    def rows(self) -> dict[str, int]:
        sink = self.sink
        assert isinstance(sink, GroupScanner)
        proved = take_census(
            SourceReader(self.spark), self.dsn, self.tables, {sink.name: sink}, None
        )
        return {name: rows for (_, name), rows in proved.items()}

    def change(self, index: int, op: str, row: Row) -> None:
        """Something that the source knows nothing of."""
        self.harnesses[index].topic.add(op, row)
        self.harnesses[index].apply()


@pytest.fixture(params=["redis", "elasticsearch", "delta"])
def shelf(
    request: pytest.FixtureRequest,
    spark: "SparkSession",
    postgres_dsn: str,
    unique: str,
    tmp_path: Path,
) -> Iterator[Shelf]:
    make = maker(request, request.param, unique, tmp_path)
    shelf = Shelf(spark, postgres_dsn, [])
    with psycopg.connect(postgres_dsn) as connection:
        for number in range(TABLES):
            name = f"items{number}"
            connection.execute(
                f"CREATE TABLE {name} (a text, b bigint, v text, n int, PRIMARY KEY (a, b))".encode()
            )
            harness = laws.Harness(spark, make, table(f"{unique}.public.{name}", name))
            shelf.harnesses.append(harness)
            if number != EMPTY:
                laws.fill(harness)
                harness.apply()
                for row in harness.topic.model().values():
                    values = (row["a"], row["b"], row["v"], row["n"])
                    connection.execute(
                        f"INSERT INTO {name} VALUES (%s, %s, %s, %s)".encode(), values
                    )
    yield shelf
    for harness in shelf.harnesses:
        harness.sink.close()


def contents(frame: Any) -> list[tuple[str, str, dict[str, Any]]]:
    rows = [(row["table"], row["id"], json.loads(row["document"])) for row in frame.collect()]
    return sorted(
        (
            (name, key, {n: v for n, v in row.items() if not n.startswith("_cdc")})
            for name, key, row in rows
        )
    )


def test_a_group_is_read_as_each_of_its_views(shelf: Shelf) -> None:
    sink = shelf.sink
    assert isinstance(sink, GroupScanner)
    expected = sorted(
        (harness.table.qualified, key, row)
        for harness in shelf.harnesses
        for key, row in harness.view().items()
    )
    assert contents(sink.scan_group(shelf.tables, shelf.spark)) == expected
    assert shelf.rows() == {
        harness.table.qualified: len(harness.view()) for harness in shelf.harnesses
    }


def test_a_planted_difference_is_one_view_s(shelf: Shelf) -> None:
    """Each fault is reported for its own view, and by the comparison of that one table as what it is;
    once it is undone, of none.
    """
    (stored,) = [row for row in shelf.harnesses[0].topic.model().values() if row["a"] == "k1"]
    changed, extra = laws.row("k1", 1, "planted"), laws.row("planted", 1)
    faults = {
        "different": (0, ("u", changed), ("u", stored)),
        "missing": (0, ("d", stored), ("c", stored)),
        "extra": (0, ("c", extra), ("d", extra)),
        "extra, of an empty table": (EMPTY, ("c", extra), ("d", extra)),
    }
    assert shelf.unproved() == []
    for name, (index, fault, undoing) in faults.items():
        shelf.change(index, *fault)
        assert shelf.unproved() == [shelf.tables[index].name], name
        (comparison,) = compare(shelf.spark, [shelf.tables[index]], shelf.dsn, [shelf.sink])
        assert isinstance(comparison, Comparison)
        assert (comparison.different, comparison.missing, comparison.extra) == (
            name == "different",
            name == "missing",
            name.startswith("extra"),
        ), name
        shelf.change(index, *undoing)
    assert shelf.unproved() == []


@pytest.mark.parametrize("shelf", ["delta"], indirect=True)
def test_a_row_that_a_mirror_has_twice(shelf: Shelf) -> None:
    sink = shelf.sink
    planted = shelf.tables[0]
    assert isinstance(sink, Delta)
    mirror = f"delta.`{sink.folder(planted, 'mirror')}`"
    shelf.spark.sql(f"INSERT INTO {mirror} SELECT * FROM {mirror} WHERE a = 'k1'")
    assert shelf.unproved() == [planted.name]
    (comparison,) = compare(shelf.spark, [planted], shelf.dsn, [sink])
    assert isinstance(comparison, Comparison)
    assert (comparison.different, comparison.missing, comparison.extra) == (0, 0, 1)


def test_a_view_that_has_lost_all_its_rows(shelf: Shelf) -> None:
    for row in shelf.harnesses[1].topic.model().values():
        shelf.harnesses[1].topic.add("d", row)
    shelf.harnesses[1].apply()
    assert shelf.unproved() == [shelf.tables[1].name]


def test_a_sample_of_rows(shelf: Shelf) -> None:
    """What differs is of the sample, or isn't looked at."""
    shelf.change(0, "c", laws.row("planted", 1))
    assert shelf.unproved(("0000", "ffff")) == [shelf.tables[0].name]
    names = [shelf.unproved(half) for half in (("0000", "7fff"), ("8000", "ffff"))]
    assert sorted(names) == [[], [shelf.tables[0].name]]


def test_a_table_that_cant_be_read_spoils_no_other(shelf: Shelf) -> None:
    with psycopg.connect(shelf.dsn) as connection:
        connection.execute("ALTER TABLE items1 RENAME v TO w")
    assert shelf.unproved() == [shelf.tables[1].name]


def test_a_table_that_is_gone_proves_nothing(shelf: Shelf) -> None:
    with psycopg.connect(shelf.dsn) as connection:
        connection.execute("DROP TABLE items1")
    assert shelf.unproved() == [table.name for table in shelf.tables]


@pytest.mark.parametrize("shelf", ["elasticsearch", "delta"], indirect=True)
def test_a_view_that_cant_be_read_spoils_no_other(
    shelf: Shelf, damage: Callable[[Sink, Table], None]
) -> None:
    """Nor is it an empty one, though its table is empty now."""
    with psycopg.connect(shelf.dsn) as connection:
        connection.execute("DELETE FROM items1")
    damage(shelf.sink, shelf.tables[1])
    assert shelf.unproved() == [shelf.tables[1].name]


@pytest.fixture
def damage() -> Callable[[Sink, Table], None]:
    def damaged(sink: Sink, spoiled: Table) -> None:
        if isinstance(sink, Elasticsearch):
            (index,) = (
                http.get(f"{sink.url}/_alias/{sink.alias(spoiled)}").raise_for_status().json()
            )
            http.delete(f"{sink.url}/{index}").raise_for_status()
        else:
            assert isinstance(sink, Delta)
            for file in Path(sink.folder(spoiled, "mirror")).glob("*.parquet"):
                file.unlink()

    return damaged


@pytest.mark.parametrize("shelf", ["elasticsearch"], indirect=True)
def test_an_index_of_more_than_one_search_gives(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first documents alone could be just those of the source."""
    filled = [table.name for table in shelf.tables if table.name != f"items{EMPTY}"]
    monkeypatch.setattr("cdc.sinks.elasticsearch.scan.GROUP_ROWS", 5)
    assert shelf.unproved() == filled
