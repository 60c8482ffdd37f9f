"""The removal of files that fails, or meets others who remove the same."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from cdc.errors import SinkUnavailable
from cdc.sinks.delta import cleanup, folders
from cdc.sinks.delta.cleanup import Cleanups
from cdc.sinks.delta.log.commits import Commits

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
