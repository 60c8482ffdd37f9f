"""Whatever becomes of a mirror, everybody's readers of Delta tables read it: each of them in each
state.

The states are made once, one after the other, of one table. Of each the whole warehouse is copied,
and the first one is gone in the end: so what they read names no place outside of itself.
"""

import importlib.util
import json
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import deltalake
import duckdb
import numpy as np
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyroaring import BitMap64

from cdc.model.table import Column
from cdc.sinks.delta import mirror
from cdc.sinks.delta.columns import NO_COLUMNS, arrow_schema, schema
from cdc.sinks.delta.log import (
    CLEARED,
    DELETION_VECTORS,
    NO_TABLE,
    FileNames,
    TableLog,
    creation,
    extension,
    new_file,
)
from cdc.sinks.delta.mirror import Search, rewrite_files, search_files
from cdc.sinks.delta.sink import Delta
from tests.contract.laws import Harness, fill, row
from tests.support.budget import SCALE
from tests.support.envelopes import table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Rows = Mapping[str, str | None]
"""The values of a mirror's column v, by id."""
Read = Callable[[], Rows]
Open = Callable[["SparkSession", str], Read]
"""Begins with a table as it is; what it gives reads it, maybe later."""
V = ("_cdc_id", "v")


def database() -> duckdb.DuckDBPyConnection:
    """A connection that reads Delta tables."""
    connection = duckdb.connect()
    package = importlib.util.find_spec("duckdb_extension_delta")
    assert package
    assert package.origin
    extension = (
        Path(package.origin).parent / f"extensions/v{duckdb.__version__}/delta.duckdb_extension"
    )
    connection.execute(f"LOAD '{extension}'")
    return connection


def by_duckdb(spark: "SparkSession", folder: str) -> Read:
    connection = database()
    connection.execute(f"ATTACH '{folder}' AS mirror (TYPE delta, PIN_SNAPSHOT)")

    def read() -> Rows:
        scanned = connection.execute(f"SELECT _cdc_id, v FROM delta_scan('{folder}')").fetchall()
        pinned = connection.execute("SELECT _cdc_id, v FROM mirror").fetchall()
        assert len(scanned) == len(dict(scanned))
        return dict(pinned)

    return read


def by_polars(spark: "SparkSession", folder: str) -> Read:
    return lambda: _rows_of(polars.read_delta(folder).to_arrow())


def by_polars_lazily(spark: "SparkSession", folder: str) -> Read:
    frame = polars.scan_delta(folder).select(V)
    return lambda: _rows_of(frame.collect().to_arrow())


def by_query(spark: "SparkSession", folder: str) -> Read:
    query = deltalake.QueryBuilder().register("mirror", deltalake.DeltaTable(folder))
    return lambda: _rows_of(query.execute("SELECT _cdc_id, v FROM mirror").read_all())


def by_pandas(spark: "SparkSession", folder: str) -> Read:
    table = deltalake.DeltaTable(folder)

    def read() -> Rows:
        frame = table.to_pandas()
        return dict(zip(frame["_cdc_id"], frame["v"], strict=True))

    return read


def by_pyarrow(spark: "SparkSession", folder: str) -> Read:
    table = deltalake.DeltaTable(folder)
    return lambda: _rows_of(table.to_pyarrow_table(columns=list(V)))


def by_spark(spark: "SparkSession", folder: str) -> Read:
    frame = spark.read.format("delta").load(folder).select(*V)
    return lambda: dict(frame.collect())


def _rows_of(result: Any) -> Rows:
    assert len(set(result["_cdc_id"].to_pylist())) == len(result), "an id twice"
    return dict(zip(result["_cdc_id"].to_pylist(), result["v"].to_pylist(), strict=True))


READERS: list[Open] = [
    by_duckdb,
    by_polars,
    by_polars_lazily,
    by_query,
    by_pandas,
    by_pyarrow,
    by_spark,
]
UNMARKED: list[Open] = [by_pandas, by_pyarrow]
"""The readers that can't read deletion vectors, and say so."""


@dataclass(frozen=True)
class State:
    folder: str
    rows: Rows
    marks: bool


STATES = [
    "empty", "filled", "rebuilt", "rolled back", "marked", "marked, rebuilt", "marked, rolled back", "without marks",
    "without marks, rebuilt", "marked again", "with a column more", "moved",
]  # fmt: skip


class History:
    """The life of one table, with a copy of its warehouse in each state."""

    def __init__(self, spark: "SparkSession", root: Path) -> None:
        self.root, self.place, self.rewritten = root, root / "warehouse", False
        self.harness = Harness(spark, self._sink, table("readers.public.items"))
        self.states: dict[str, State] = {}
        self.open_reads: dict[str, Rows | Exception] = {}
        """What readers read that were begun before a switch, after it; what they may have read."""
        self.either: list[Rows] = []
        self._old_names: Mapping[str, str] = {}

    def _sink(self) -> Delta:
        return Delta(
            "warehouse",
            str(self.place),
            "readers",
            without_deletion_vectors=["public.items"] if self.rewritten else (),
        )

    @property
    def rows(self) -> Rows:
        return {key: str(value["v"]) for key, value in self.harness.topic.model().items()}

    @property
    def mirror(self) -> str:
        return f"{self.place}/public.items/mirror"

    def live(self) -> None:
        self._note("empty")
        fill(self.harness)
        self.apply()
        self._note("filled")
        self.rebuild(watched=True)
        self._note("rebuilt")
        self.roll_back()
        self._note("rolled back")
        self.change()
        self._note("marked")
        self.rebuild()
        self._note("marked, rebuilt")
        self.roll_back()
        self._note("marked, rolled back")
        self.rewritten = True
        self.change()
        self._note("without marks")
        self.rewritten = False
        self.change()
        self.rewritten = True
        self.rebuild()
        self._note("without marks, rebuilt")
        self.rewritten = False
        self.change()
        self._note("marked again")
        columns = (*self.harness.table.columns, Column("added", "text"))
        self.harness.table = replace(self.harness.table, columns=columns)
        self.change()
        self._note("with a column more")
        self.place = Path(shutil.move(self.place, self.root / "moved"))
        self.change()
        self._note("moved")

    def _note(self, name: str) -> None:
        # Not by its name: polars reads no folder with a space in its name.
        copied = shutil.copytree(self.place, self.root / "copies" / str(len(self.states)))
        features = deltalake.DeltaTable(self.mirror).protocol().reader_features or ()
        marks = "deletionVectors" in features
        self.states[name] = State(f"{copied}/public.items/mirror", self.rows, marks)

    def apply(self) -> None:
        self.harness.sink = self.harness.writer()
        self.harness.apply(writer=str(len(self.harness.topic.records)))

    def change(self) -> None:
        number = len(self.harness.topic.records)
        self.harness.topic.add("u", row("k0", 0, f"change {number}"))
        self.harness.topic.add("c", row(f"new {number}", number))
        self.harness.topic.add("d", row(f"k{3 + len(self.states) % 2}", 3 + len(self.states) % 2))
        self.apply()

    def rebuild(self, watched: bool = False) -> None:
        rows, half = self.rows, self.harness.topic.ends
        self.harness.sink = self.harness.writer()
        names, build = self.harness.begin_generation()
        self.harness.topic.add("u", row("k1", 1, f"rebuilt {len(half)}"))
        self.harness.apply(half, "rebuild", build)
        self.harness.apply(None, "rebuild", build)
        readers = {
            reader.__name__: reader(self.harness.spark, self.mirror)
            for reader in READERS
            if watched
        }
        self.promote(names)
        self.either = self.either or [rows, self.rows]
        for name, read in readers.items():
            try:
                self.open_reads[name] = read()
            except Exception as error:  # reported by the test of that reader
                self.open_reads[name] = error

    def roll_back(self) -> None:
        self.harness.apply(writer="live")
        build = self.harness.sink.for_generation(self._old_names)
        self.harness.apply(writer="kept", sink=build)
        self.promote(self._old_names)

    def promote(self, names: Mapping[str, str]) -> None:
        sink = self.harness.sink = self.harness.writer()
        self._old_names = sink.promote([self.harness.table], names)
        sink.drop_unreferenced([self.harness.table], self._old_names)


@pytest.fixture(scope="module")
def history(spark: "SparkSession", tmp_path_factory: pytest.TempPathFactory) -> History:
    history = History(spark, tmp_path_factory.mktemp("readers"))
    history.live()
    assert list(history.states) == STATES
    assert not (history.root / "warehouse").exists()
    return history


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
def test_it_is_read(history: History, spark: "SparkSession", reader: Open, state: str) -> None:
    """Or refused by who can't read deletion vectors, unless the setting keeps them out."""
    view_state = history.states[state]
    assert view_state.marks is not state.startswith("without marks")
    if view_state.marks and reader in UNMARKED:
        with pytest.raises(deltalake.exceptions.DeltaProtocolError, match="deletionVectors"):
            reader(spark, view_state.folder)()
    else:
        assert reader(spark, view_state.folder)() == view_state.rows


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
def test_it_is_read_while_it_is_switched(history: History, reader: Open) -> None:
    read = history.open_reads[reader.__name__]
    if reader in UNMARKED:
        assert isinstance(read, deltalake.exceptions.DeltaProtocolError)
    else:
        assert read in history.either


@pytest.mark.parametrize("state", STATES)
def test_rows_are_counted(history: History, state: str) -> None:
    """By a query always; by `count()`, which knows no marks, only in mirrors without any."""
    view_state = history.states[state]
    table = deltalake.DeltaTable(view_state.folder)
    query = deltalake.QueryBuilder().register("mirror", table)
    counted = query.execute("SELECT count(*) AS n FROM mirror").read_all()
    assert counted["n"].to_pylist() == [len(view_state.rows)]
    marked_rows = table.deletion_vectors().read_all().num_rows > 0
    assert (table.count() == len(view_state.rows)) is not marked_rows


def not_shared(_place: object, _source: str, _path: str) -> None:
    """Leaves a file where it is."""


def test_planted(spark: "SparkSession", tmp_path: Path) -> None:
    history = History(spark, tmp_path)
    fill(history.harness)
    history.apply()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cdc.sinks.delta.place.Folder.share", not_shared)
        history.rebuild()
    for reader in (by_duckdb, by_polars):
        with pytest.raises((duckdb.IOException, FileNotFoundError)):
            reader(spark, history.mirror)()


def read_offsets(spark: "SparkSession", folder: str, version: int) -> dict[str, int]:
    """The rows of a version, by Spark."""
    frame = spark.read.format("delta").option("versionAsOf", version).load(folder)
    rows = frame.select("_cdc_id", "_cdc_offset").collect()
    assert len(rows) == len({row["_cdc_id"] for row in rows}), "an id twice"
    return {row["_cdc_id"]: row["_cdc_offset"] for row in rows}


def offsets_by_others(folder: str) -> list[dict[str, int]]:
    """The rows of the newest version: by DuckDB, Polars and deltalake."""
    columns = ["_cdc_id", "_cdc_offset"]
    query = deltalake.QueryBuilder().register("t", deltalake.DeltaTable(folder))
    selected = query.execute("SELECT _cdc_id, _cdc_offset FROM t").read_all()
    tables = [
        database().execute(f"SELECT * FROM delta_scan('{folder}')").to_arrow_table(),
        polars.scan_delta(folder).select(columns).collect().to_arrow(),
        selected,
    ]
    results = []
    for result in tables:
        ids = result["_cdc_id"].to_pylist()
        assert len(ids) == len(set(ids)), "an id twice"
        results.append(dict(zip(ids, result["_cdc_offset"].to_pylist(), strict=True)))
    return results


class Writer:
    """Commits random batches to a mirror, of the size of a batch or of many."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.chance = random.Random(seed)
        self.rows: dict[str, int] = {}
        self._offset = 0
        self._log = TableLog(str(folder))
        columns = schema(NO_COLUMNS, "mirror")
        self._log.commit(NO_TABLE, creation(columns), "CREATE TABLE", CLEARED)

    def commit(self) -> None:
        """A batch, now and then followed by a compaction or a checkpoint."""
        count = self.chance.choice([1, 10, 100, 3000])
        keys = [f"k{self.chance.randrange(4 * count)}" for _ in range(count)]
        changed = self._write("part", keys)
        gone = self.chance.sample(sorted(self.rows), len(self.rows) // self.chance.choice([3, 50]))
        if self.chance.random() < 0.05:
            gone = list(self.rows)
        deleted = self._write("gone", gone)
        names = FileNames()
        state = self._log.state
        assert state
        search = Search("t", str(self.folder), list(state.files), [changed], [deleted], True)
        size = (self.folder / changed).stat().st_size
        file = new_file(changed, size, json.dumps({"numRecords": len(keys)}))
        superseded = dict(search_files(search))
        changes = mirror.mark(self._log.place, state, [file], superseded, names)
        extended = extension(state, state.columns, [DELETION_VECTORS])
        self._log.commit(state.identity, [*extended, *changes], "STREAMING UPDATE", CLEARED)
        (self.folder / deleted).unlink()
        if self.chance.random() < 0.2:
            deltalake.DeltaTable(str(self.folder)).create_checkpoint()
        state = self._log.state
        assert state
        if files := mirror.select(self._log.place, state):
            request = mirror.request(self._log, state, files, names)
            mirror.replace(self._log, state, files, next(rewrite_files(request), None))
        if self.chance.random() < 0.2:
            self._log = TableLog(str(self.folder))
            self._log.refresh()

    def _write(self, kind: str, keys: list[str]) -> str:
        """Write a file; of a key that comes again the last row counts."""
        offsets = range(self._offset, self._offset + len(keys))
        self._offset += len(keys)
        for key, offset in zip(keys, offsets, strict=True):
            self.rows[key] = offset
            if kind == "gone":
                del self.rows[key]
        name = f"{kind}-{self._offset}-{self.chance.random()}.parquet"
        arrays = [pa.array(keys, pa.string()), [0] * len(keys), list(offsets)]
        rows = pa.table(arrays, schema=arrow_schema(None, "mirror"))
        pq.write_table(rows, self.folder / name, row_group_size=500)
        return name


def commit_at_random(folder: Path, seed: int, commits: int) -> dict[int, dict[str, int]]:
    """Commit, and have each reader but Spark read each version. Returns the rows by version."""
    writer = Writer(folder, seed)
    by_version = {}
    for _ in range(commits):
        writer.commit()
        for rows in offsets_by_others(str(folder)):
            assert rows == writer.rows
        by_version[deltalake.DeltaTable(str(folder)).version()] = dict(writer.rows)
    return by_version


@pytest.mark.parametrize("seed", range(2 if SCALE > 1 else 1))
def test_random_commits_are_read_right(
    spark: "SparkSession", tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """By Spark in some versions, because each takes a second."""
    monkeypatch.setattr(mirror, "SMALL_FILES", 6)
    by_version = commit_at_random(tmp_path, seed, 30 * SCALE)
    for version in [*list(by_version)[5::12], max(by_version)]:
        assert read_offsets(spark, str(tmp_path), version) == by_version[version]


def forgetful(*_: object) -> BitMap64:
    """Doesn't add up the marks of earlier batches."""
    return BitMap64()


def once_each(_: object) -> Iterator[tuple[str, np.ndarray]]:
    """Takes no row of the staged files for superseded."""
    return iter(())


@pytest.mark.parametrize(
    ("place", "bug"),
    [
        ("cdc.sinks.delta.vectors.deleted_rows", forgetful),
        ("cdc.sinks.delta.mirror.find_repeated", once_each),
    ],
)
def test_planted_marks(tmp_path: Path, place: str, bug: object) -> None:
    with mock.patch(place, bug), pytest.raises(AssertionError):
        commit_at_random(tmp_path, 0, 20)
