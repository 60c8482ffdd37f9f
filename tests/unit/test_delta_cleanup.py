"""The removal of files: of a log of changes; one that fails, or meets others who remove the same."""

import os
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pytest
from structlog.testing import capture_logs

from cdc.errors import SinkUnavailable
from cdc.sinks.delta import cleanup
from cdc.sinks.delta.cleanup import Cleanups
from cdc.sinks.delta.log import (
    CLEARED,
    NO_TABLE,
    File,
    FileNames,
    Logs,
    TableLog,
    additions,
    creation,
    removal_of_all,
)
from cdc.sinks.delta.parquet import write_file
from tests.support.warehouse import struct

NO_SPARK: Any = None


def test_a_removal_that_fails_fails_no_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch is committed. The same files are tried an hour later, not with each batch."""
    tries: list[set[str]] = []

    def remove(_logs: object, _folder: str, candidates: set[str]) -> set[str]:
        tries.append(candidates)
        if len(tries) == 2:
            raise SinkUnavailable("The folder can't be written.", hint="make room")
        return {"replaced.parquet"}

    monkeypatch.setattr(cleanup, "remove_unreferenced", remove)
    cleanups = Cleanups(Logs())
    mirror = str(tmp_path / "mirror")

    def clean(interval_s: float) -> None:
        monkeypatch.setattr(cleanup, "CLEANUP_S", interval_s)
        cleanups.tidy(NO_SPARK, mirror)

    with capture_logs() as events:
        for interval_s in (0, 0, 3600, 0):
            clean(interval_s)
    assert tries == [set(), {"replaced.parquet"}, {"replaced.parquet"}]
    assert [(event["event"], event["folder"]) for event in events] == [("not_tidied", mirror)]


def test_a_log_of_changes_is_rid_of_what_no_commit_has_named(tmp_path: Path) -> None:
    """Its earlier versions stay readable, and mirrors beside it are none of its generations."""
    folder = str(tmp_path / "changes")
    logs = Logs()

    def write(n: int) -> File:
        file = write_file(folder, FileNames().generate(), [pa.table({"n": [n]})])
        assert file
        return file

    Path(folder).mkdir()
    (tmp_path / "mirror@unreadable").touch()
    replaced, present, killed = map(write, range(3))
    log = logs[folder]
    created = [*creation(struct(n="long")), *additions([replaced])]
    log.commit(NO_TABLE, created, "WRITE", CLEARED)
    assert log.state
    changes = [*removal_of_all(log.state), *additions([present])]
    log.commit(log.state.identity, changes, "WRITE", CLEARED)
    assert cleanup.remove_unreferenced(logs, folder, set()) == set()
    assert (tmp_path / "changes" / killed["path"]).exists(), "somebody may be about to commit it"
    a_day_ago = time.time() - cleanup.ABANDONED_S - 60
    os.utime(tmp_path / "changes" / killed["path"], (a_day_ago, a_day_ago))
    assert cleanup.remove_unreferenced(logs, folder, set()) == set()
    names = {path.name for path in Path(folder).glob("*.parquet")}
    assert names == {replaced["path"], present["path"]}


def test_a_checkpoint_comes_however_many_commits_a_batch_makes(tmp_path: Path) -> None:
    """Two here. What a killed process was about to write goes some time later."""
    folder = str(tmp_path)
    logs = Logs()
    cleanups = Cleanups(logs)
    log = logs[folder]
    log.commit(NO_TABLE, creation(struct(n="long")), "WRITE", None)
    for name in (f".{uuid4()}.tmp", f"_delta_log/.{uuid4()}.tmp"):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (1.0, 1.0))
    for _ in range(cleanup.CHECKPOINT_COMMITS):
        for _ in range(2):
            assert log.state
            log.commit(log.state.identity, [], "WRITE", None)
        cleanups.tidy(NO_SPARK, folder)
    assert len(list(tmp_path.glob("_delta_log/*.checkpoint.parquet"))) == 2
    assert TableLog(folder).refresh() == log.state
    assert cleanup.remove_unreferenced(logs, folder, set()) == set()
    assert not [*tmp_path.glob(".*.tmp"), *tmp_path.glob("_delta_log/.*.tmp")]
