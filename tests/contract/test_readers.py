"""Whatever becomes of a mirror, everybody's readers of Delta tables read it: each of them in each
state.

The states are made once, one after the other, of one table. Of each the whole warehouse is copied,
and the first one is gone in the end: so what they read names no place outside of itself.
"""

import importlib.util
import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deltalake
import duckdb
import polars
import pytest

from cdc.errors import SinkUnavailable
from cdc.model.generation import new_generation
from cdc.model.table import Column
from cdc.sinks.delta.batch_commit import REWRITE_BYTES
from cdc.sinks.delta.files.links import is_absolute
from cdc.sinks.delta.log import add_files, spark_generations
from cdc.sinks.delta.log.commits import Commits, number_commits
from cdc.sinks.delta.sink import Delta
from tests.contract.laws import Harness, fill, row
from tests.support.envelopes import table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Rows = Mapping[str, str | None]
"""The values of a mirror's column v, by id."""
Read = Callable[[], Rows]
Open = Callable[["SparkSession", str], Read]
"""Begins with a table as it is; what it gives reads it, maybe later."""
V = ("_cdc_id", "v")


def by_duckdb(spark: "SparkSession", folder: str) -> Read:
    database = duckdb.connect()
    package = importlib.util.find_spec("duckdb_extension_delta")
    assert package
    assert package.origin
    extension = (
        Path(package.origin).parent / f"extensions/v{duckdb.__version__}/delta.duckdb_extension"
    )
    database.execute(f"LOAD '{extension}'")
    database.execute(f"ATTACH '{folder}' AS mirror (TYPE delta, PIN_SNAPSHOT)")

    def read() -> Rows:
        scanned = database.execute(f"SELECT _cdc_id, v FROM delta_scan('{folder}')").fetchall()
        pinned = database.execute("SELECT _cdc_id, v FROM mirror").fetchall()
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
    "empty",
    "filled",
    "rebuilt",
    "rolled back",
    "marked",
    "marked, rebuilt",
    "marked, rolled back",
    "without marks",
    "without marks, rebuilt",
    "marked again",
    "with a column more",
    "moved",
]


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

    def live(self, patch: pytest.MonkeyPatch) -> None:
        self._note("empty")
        fill(self.harness)
        self.apply()
        self._note("filled")
        self.rebuild(watched=True)
        self._note("rebuilt")
        self.roll_back()
        self._note("rolled back")
        patch.setattr("cdc.sinks.delta.batch_commit.REWRITE_BYTES", 0)
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
        marks = add_files.DELETION_VECTORS in add_files.reader_features(
            deltalake.DeltaTable(self.mirror)
        )
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
        names = {self.harness.table.qualified: new_generation()}
        rows, half = self.rows, self.harness.topic.ends
        build = self.harness.writer().for_generation(names)
        build.prepare(self.harness.table)
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
            except Exception as error:  # told by the test of that reader
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
    with pytest.MonkeyPatch.context() as patch:
        history.live(patch)
    assert list(history.states) == STATES
    assert not (history.root / "warehouse").exists()
    return history


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
def test_it_is_read(history: History, spark: "SparkSession", reader: Open, state: str) -> None:
    """Or refused by who can't have deletion vectors, while the table has not asked for none."""
    view_state = history.states[state]
    assert view_state.marks is (state.startswith("marked") or state in STATES[-2:])
    if view_state.marks and reader in UNMARKED:
        with pytest.raises(deltalake.exceptions.DeltaProtocolError, match="deletionVectors"):
            reader(spark, view_state.folder)()
    else:
        assert reader(spark, view_state.folder)() == view_state.rows


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
def test_it_is_read_while_it_is_switched(history: History, reader: Open) -> None:
    assert history.open_reads[reader.__name__] in history.either


@pytest.mark.parametrize("state", STATES)
def test_rows_are_counted(history: History, state: str) -> None:
    """By a query always; by `count()`, which knows no marks, only in mirrors without any."""
    view_state = history.states[state]
    table = deltalake.DeltaTable(view_state.folder)
    query = deltalake.QueryBuilder().register("mirror", table)
    counted = query.execute("SELECT count(*) AS n FROM mirror").read_all()
    assert counted["n"].to_pylist() == [len(view_state.rows)]
    marked_rows = add_files.has_deleted_rows(table)
    assert (table.count() == len(view_state.rows)) is not marked_rows


@pytest.mark.parametrize("plain", [True, False])
def test_a_large_mirror_that_was_updated(
    spark: "SparkSession", tmp_path: Path, plain: bool
) -> None:
    """The setting decides whether it has marks, and so who can read it."""
    items = table("readers.public.items")
    harness = Harness(
        spark,
        lambda: Delta(
            "warehouse",
            str(tmp_path),
            "readers",
            without_deletion_vectors=["public.*"] if plain else [],
        ),
        items,
    )
    chance = random.Random(1)
    for number in range(6):
        harness.topic.add("c", row(f"k{number}", number, chance.randbytes(600_000).hex()))
    harness.apply()
    folder = str(tmp_path / "public.items" / "mirror")
    sizes = deltalake.DeltaTable(folder).get_add_actions(flatten=True)["size_bytes"]
    assert sum(sizes.to_pylist()) > REWRITE_BYTES
    harness.topic.add("u", row("k1", 1, "updated"))
    harness.apply()
    expected = {key: str(value["v"]) for key, value in harness.topic.model().items()}
    for reader in READERS:
        if plain or reader not in UNMARKED:
            assert reader(spark, folder)() == expected
        else:
            with pytest.raises(deltalake.exceptions.DeltaProtocolError, match="deletionVectors"):
                reader(spark, folder)()
    assert deltalake.DeltaTable(folder).count() == (len(expected) if plain else len(expected) + 1)


def lying_elsewhere(source: str, path: str, target: str) -> str:
    """Names a file where it lies, as this program did once."""
    return f"file:{source}/{path}"


def test_planted(spark: "SparkSession", tmp_path: Path) -> None:
    history = History(spark, tmp_path)
    fill(history.harness)
    history.apply()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cdc.sinks.delta.files.links.share", lying_elsewhere)
        history.rebuild()
    assert by_spark(spark, history.mirror)() == history.rows
    for reader in (by_duckdb, by_polars, by_pandas, by_pyarrow):
        with pytest.raises((duckdb.IOException, FileNotFoundError)):
            reader(spark, history.mirror)()


@pytest.mark.parametrize("marked", [False, True])
def test_what_was_named_elsewhere_is_gathered(
    spark: "SparkSession", tmp_path: Path, monkeypatch: pytest.MonkeyPatch, marked: bool
) -> None:
    """A warehouse of an earlier version: by the first batch of the next run, for every row."""
    monkeypatch.setattr("cdc.sinks.delta.batch_commit.REWRITE_BYTES", 0)
    history = History(spark, tmp_path)
    fill(history.harness)
    names = {history.harness.table.qualified: new_generation()}
    build = history.harness.sink.for_generation(names)
    build.prepare(history.harness.table)
    for end in ((1, 1), None) if marked else (None,):
        history.harness.apply(end, "earlier", build)
    elsewhere = f"{history.mirror}@{names[history.harness.table.qualified]}"
    last = Commits().last_commit(elsewhere)
    assert last.checkpoint
    with number_commits(spark, last.checkpoint, last.number):
        spark.sql(
            f"CREATE OR REPLACE TABLE delta.`{history.mirror}` SHALLOW CLONE delta.`{elsewhere}`"
        )
    assert all(is_absolute(path) for path in add_files.paths(deltalake.DeltaTable(history.mirror)))
    assert not add_files.has_deleted_rows(deltalake.DeltaTable(history.mirror)) is not marked
    history.harness.topic.add("c", row("new", 1))
    history.apply()
    shutil.rmtree(elsewhere)
    history.place = Path(shutil.move(history.place, tmp_path / "moved"))
    for reader in READERS:
        if reader not in UNMARKED:
            assert reader(spark, history.mirror)() == history.rows
    history.change()
    assert by_query(spark, history.mirror)() == history.rows


def test_what_nobody_looked_at_gets_no_position(spark: "SparkSession", tmp_path: Path) -> None:
    """Somebody else's commit in between has other files: what was read before it isn't true of
    them.
    """
    harness = Harness(
        spark, lambda: Delta("warehouse", str(tmp_path), "readers"), table("readers.public.items")
    )
    fill(harness)
    harness.apply()
    folder = str(tmp_path / "public.items" / "mirror")
    version, last = deltalake.DeltaTable(folder).version(), Commits().last_commit(folder)
    assert last.checkpoint
    spark.sql(f"ALTER TABLE delta.`{folder}` SET TBLPROPERTIES ('somebody' = 'else')")
    with pytest.raises(SinkUnavailable):
        spark_generations.link_all_files(spark, folder, version, last.checkpoint, last.number + 1)
    with pytest.raises(SinkUnavailable):
        spark_generations.drop_deletion_vectors(spark, folder, version)
    assert Commits().last_commit(folder).checkpoint == last.checkpoint
