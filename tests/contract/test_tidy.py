"""What a warehouse no longer needs is removed, and nothing else."""

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock
from uuid import uuid4

import deltalake
import pyarrow as pa
import pytest

from cdc.sinks.delta import cleanup, generations
from cdc.sinks.delta.batch import TableCommit
from cdc.sinks.delta.log import Logs, TableLog
from cdc.sinks.delta.place import place
from cdc.sinks.delta.sink import Delta
from tests.contract import laws
from tests.contract.crashes import die, survived
from tests.support.envelopes import table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(params=["marked", "unmarked"])
def tidied(
    request: pytest.FixtureRequest, tmp_path: Path, unique: str, monkeypatch: pytest.MonkeyPatch
) -> Delta:
    """A warehouse that looks after each batch for what is to be removed; with rows marked as deleted, or without."""
    monkeypatch.setattr("cdc.sinks.delta.cleanup.CLEANUP_S", 0)
    monkeypatch.setattr("cdc.sinks.delta.cleanup.ABANDONED_S", 0)
    patterns = ["*"] if request.param == "unmarked" else []
    return Delta("warehouse", str(tmp_path), unique, without_deletion_vectors=patterns)


def test_replaced_files_are_removed(tidied: Delta, spark: "SparkSession", unique: str) -> None:
    """A merge later, with their marks, and what a writer that was killed has left; not what another generation has."""
    harness = laws.Harness(spark, lambda: tidied, table(f"{unique}.public.items"))
    mirror = Path(tidied.folder(harness.table, "mirror"))

    def change(number: int) -> set[str]:
        harness.topic.add("u", laws.row("k", 1, str(number)))
        harness.apply()
        return {
            path.name
            for path in mirror.iterdir()
            if path.is_file() and not path.name.startswith(".")
        }

    harness.topic.add("c", laws.row("other", 1))
    first, second = change(0), change(1)
    assert first < second
    orphan, foreign, old_file = (
        f"part-{uuid4()}.parquet",
        "part-00000-at-work.parquet",
        "part-00000-given-up.parquet",
    )
    for name in (orphan, foreign, old_file):
        (mirror / name).write_bytes(b"")
    long_ago = time.time() - cleanup.UNCOMMITTED_S - 60
    for name in (orphan, old_file):
        os.utime(mirror / name, (long_ago, long_ago))
    log = TableLog(str(mirror))
    commit = log.last_commit()
    live = log.state
    assert live
    assert commit.checkpoint
    clone = f"{mirror}@kept"
    generations.clone(live, str(mirror), clone, commit.checkpoint)
    rows = sorted(spark.read.format("delta").load(clone).collect())
    third = change(2)
    change(3)
    fifth = change(4)
    assert foreign in third
    assert not {orphan, old_file} & third
    assert not (third - second - {foreign}) & fifth
    assert harness.view() == harness.topic.model()
    assert sorted(spark.read.format("delta").load(clone).collect()) == rows
    place(clone).remove_all()
    change(5)
    last = change(6)
    assert not last & second - {Path(path).name for path in in_use(mirror)}
    assert foreign in last, "somebody is writing it"
    assert harness.view() == harness.topic.model()


def listed(folder: str) -> list[str]:
    """The files of a table."""
    paths: list[str] = pa.table(deltalake.DeltaTable(folder).get_add_actions())["path"].to_pylist()
    return paths


def in_use(mirror: Path) -> list[str]:
    state = TableLog(str(mirror)).refresh()
    assert state
    return cleanup.list_paths(state)


def test_generations_are_tidied(tidied: Delta, spark: "SparkSession", unique: str) -> None:
    laws.a_generation_is_built_unseen(
        laws.Harness(spark, lambda: tidied, table(f"{unique}.public.items"))
    )


def test_links_go_with_who_needs_them(
    spark: "SparkSession", unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a switch left that was killed before its commit; what was shown, and what was kept."""
    monkeypatch.setattr("cdc.sinks.delta.cleanup.CLEANUP_S", 0)
    monkeypatch.setattr("cdc.sinks.delta.cleanup.ABANDONED_S", 0)
    sink = Delta("warehouse", str(tmp_path), unique)
    harness = laws.Harness(spark, lambda: sink, table(f"{unique}.public.items"))
    laws.fill_view(harness)
    names, mirror = {harness.table.qualified: "another"}, Path(sink.folder(harness.table, "mirror"))
    harness.apply(writer="another", sink=sink.for_generation(names))

    def files() -> dict[str, int]:
        """Return the number of links of each file by name."""
        return {path.name: path.stat().st_nlink for path in mirror.glob("*.parquet")}

    old_files = files()
    with survived(), mock.patch.object(TableLog, "commit", die):
        sink.promote([harness.table], names)
    assert [number for name, number in files().items() if name not in old_files] == [2]
    assert harness.view() == harness.topic.model()
    replaced_names = sink.promote([harness.table], names)
    assert sorted(files().values()) == [2, 3, 3]
    sink.drop_unreferenced([harness.table], replaced_names)
    assert sorted(files().values()) == [2, 2, 2]
    sink.drop_unreferenced([harness.table], {})
    assert sorted(files().values()) == [1, 2, 2]
    for number in range(3):
        harness.topic.add("u", laws.row("k1", 1, f"later {number}"))
        harness.apply(writer="later")
    # Of the last two batches: the rows that one has brought, and those that it has left alone.
    assert len(files()) <= 4
    assert set(files().values()) == {1}
    assert harness.view() == harness.topic.model()


def test_files_of_a_killed_batch_go_from_the_log_of_changes(
    tidied: Delta, spark: "SparkSession", unique: str
) -> None:
    harness = laws.Harness(spark, lambda: tidied, table(f"{unique}.public.items"))
    changes = tidied.folder(harness.table, "changes")
    laws.fill(harness)
    batch = harness.batch(None, harness.topic.ends, "one")
    with survived(), mock.patch.object(TableCommit, "append", die):
        tidied.apply(batch)
    killed = {name for name in os.listdir(changes) if name.endswith(".parquet")}
    assert killed
    for number in range(2):
        harness.topic.add("u", laws.row("k1", 1, str(number)))
        harness.apply()
    present = {name for name in os.listdir(changes) if name.endswith(".parquet")}
    assert present == set(listed(changes))
    assert not present & killed


def test_what_is_gone_is_not_kept(tidied: Delta, spark: "SparkSession", unique: str) -> None:
    """A rebuild was killed after its switch, and goes on when the files that it would have kept were removed."""
    harness = laws.Harness(spark, lambda: tidied, table(f"{unique}.public.items"))
    laws.fill_view(harness)
    names = {harness.table.qualified: "another"}
    harness.apply(writer="another", sink=tidied.for_generation(names))
    live = tidied.folder(harness.table, "mirror")
    assert generations.switch(TableLog(live), TableLog(f"{live}@another"), {}, may_have_marks=True)
    for _ in range(2):
        harness.topic.add("u", laws.row("k1", 1, "later"))
        harness.apply(writer="later")
    assert not tidied.promote([harness.table], names)
    assert generations.generation_names(live) == ["another"]
    assert harness.view() == harness.topic.model()


def test_what_lies_deeper_is_in_use(spark: "SparkSession", tmp_path: Path) -> None:
    """Another writer may put files and marks into folders of the table's own; deltalake lists all marks as unused."""
    folder = str(tmp_path / "table")
    logs = Logs()
    properties = {"delta.enableDeletionVectors": "true", "delta.randomizeFilePrefixes": "true"}
    spark.range(10).repartition(1).write.format("delta").options(**properties).save(folder)
    spark.sql(f"DELETE FROM delta.`{folder}` WHERE id = 3")
    marks = list(Path(folder).glob("*/deletion_vector_*.bin"))
    assert marks
    candidates = cleanup.remove_unreferenced(logs, folder, set())
    cleanup.remove_unreferenced(logs, folder, candidates)
    assert all(path.exists() for path in marks)
    assert spark.read.format("delta").load(folder).count() == 9
