"""The removal of files: of a log of changes; one that fails, or meets others who remove the same."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pytest
from deltalake.schema import PrimitiveType
from structlog.testing import capture_logs

from cdc.errors import SinkUnavailable
from cdc.sinks.delta import cleanup, folders
from cdc.sinks.delta.cleanup import Cleanups
from cdc.sinks.delta.files.parquet import DataFile, FileNames, write_file
from cdc.sinks.delta.log import add_files
from cdc.sinks.delta.log.commits import CommitInfo, Commits
from cdc.sinks.delta.log.history import CLEARED

NO_SPARK: Any = None


def test_a_removal_that_fails_fails_no_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch is committed. The same files are tried an hour later, not with each batch."""
    tries: list[set[str]] = []

    def remove(_spark: object, _commits: object, _folder: str, candidates: set[str]) -> set[str]:
        tries.append(candidates)
        if len(tries) == 2:
            raise SinkUnavailable("The folder can't be written.", hint="make room")
        return {"replaced.parquet"}

    monkeypatch.setattr(cleanup, "remove_unreferenced", remove)
    cleanups, mirror = Cleanups(Commits()), str(tmp_path / "mirror")

    def clean(interval_s: float) -> None:
        monkeypatch.setattr(cleanup, "CLEANUP_S", interval_s)
        cleanups.remove_replaced(NO_SPARK, mirror)

    with capture_logs() as events:
        for interval_s in (0, 0, 3600, 0):
            clean(interval_s)
    assert tries == [set(), {"replaced.parquet"}, {"replaced.parquet"}]
    assert [(event["event"], event["folder"]) for event in events] == [
        ("files_not_removed", mirror)
    ]


def test_a_log_of_changes_is_rid_of_what_no_commit_has_named(tmp_path: Path) -> None:
    """Its earlier versions stay readable, and mirrors beside it are none of its generations."""
    folder, commits = str(tmp_path / "changes"), Commits()
    schema = deltalake.Schema([deltalake.Field("n", PrimitiveType("long"))])

    def write(n: int) -> DataFile:
        file = write_file(folder, FileNames().generate(), [pa.table({"n": [n]})])
        assert file
        return file

    Path(folder).mkdir()
    (tmp_path / "mirror@unreadable").touch()
    replaced, present, killed = map(write, range(3))
    add_files.create(folder, add_files.add_actions([replaced]), schema, CommitInfo(CLEARED, 1))
    table = commits.table(folder)
    assert table
    actions = add_files.add_actions([present])
    add_files.commit(table, actions, "overwrite", schema, CommitInfo(CLEARED, 2))
    assert commits.table(folder)
    candidates = cleanup.remove_unreferenced(NO_SPARK, commits, folder, set())
    assert candidates == {killed.name}
    assert cleanup.remove_unreferenced(NO_SPARK, commits, folder, candidates) == set()
    assert {path.name for path in Path(folder).glob("*.parquet")} == {replaced.name, present.name}


def test_what_others_have_removed_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generation, file = tmp_path / "generation", tmp_path / "part.parquet"
    (generation / "_delta_log").mkdir(parents=True)
    (generation / "part.parquet").touch()
    file.touch()
    remove_tree: Callable[[Path], None] = shutil.rmtree

    def race(path: Path) -> None:
        monkeypatch.undo()
        remove_tree(path / "_delta_log")
        raise FileNotFoundError(path / "_delta_log")

    monkeypatch.setattr(shutil, "rmtree", race)
    folders.remove_paths(map(str, (generation, file, tmp_path / "gone")))
    assert list(tmp_path.iterdir()) == []
    assert folders.age_s(str(file)) == 0
