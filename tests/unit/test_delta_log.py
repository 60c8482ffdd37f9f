"""The log of a Delta table as we write it: others read the right rows after each commit, and we go on
from what others commit.
"""

import json
import random
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import deltalake
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyroaring import BitMap64

from cdc.errors import SinkRejected
from cdc.model.position import Position, ViewCheckpoint
from cdc.sinks.delta import vectors
from cdc.sinks.delta.log import (
    CLEARED,
    DELETION_VECTORS,
    NO_TABLE,
    FileNames,
    LastCommit,
    TableLog,
    commit_path,
    creation,
    removal,
)
from cdc.sinks.delta.mirror import mark, select
from cdc.sinks.delta.place import CommitConflict, Folder, place
from tests.support import buckets
from tests.support.warehouse import struct, values_by_id

SCHEMA = pa.schema([("id", pa.string()), ("n", pa.int64())])


def create(log: TableLog, **properties: str) -> None:
    protocol, metadata = creation(struct(id="string", n="long"), [DELETION_VECTORS])
    metadata["metaData"]["configuration"] |= properties
    log.commit(NO_TABLE, [protocol, metadata], "CREATE TABLE", None)


class Mirror:
    """Rows by id, changed by files that are added and rows that are marked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = TableLog(str(folder))
        self.rows: dict[str, int] = {}

    def change(self, rows: dict[str, int], deleted: set[str]) -> None:
        state = self.log.refresh()
        assert state is not None
        marks = vectors.VectorFile(uuid4())
        actions = []
        for path, add in list(state.files.items()):
            ids = pq.read_table(self.folder / path)["id"].to_pylist()
            found = [number for number, key in enumerate(ids) if key in rows or key in deleted]
            former = add.get("deletionVector")
            bitmap = BitMap64(found)
            if former:
                bitmap |= vectors.deleted_rows(former, self.log.place)
            if not found or (former and len(bitmap) == former["cardinality"]):
                continue
            actions.append(removal(add))
            if len(bitmap) < len(ids):
                stats = {**json.loads(add["stats"]), "tightBounds": False}
                marked = {**add, "stats": json.dumps(stats), "deletionVector": marks.add(bitmap)}
                actions.append({"add": marked})
        if marks.data:
            self.log.place.write(marks.name, marks.data)
        if rows:
            actions.append({"add": self.write(rows)})
        self.log.commit(state.identity, actions, "STREAMING UPDATE", CLEARED)
        self.rows = {key: n for key, n in self.rows.items() if key not in deleted} | rows

    def write(self, rows: dict[str, int]) -> dict[str, Any]:
        name = f"part-{uuid4()}.parquet"
        table = pa.table([list(rows), list(rows.values())], schema=SCHEMA)
        pq.write_table(table, self.folder / name)
        return {
            "path": name,
            "partitionValues": {},
            "size": (self.folder / name).stat().st_size,
            "modificationTime": 1,
            "dataChange": True,
            "stats": json.dumps({"numRecords": len(rows)}),
        }


@pytest.fixture
def mirror(tmp_path: Path) -> Mirror:
    mirror = Mirror(tmp_path)
    create(mirror.log)
    return mirror


def read(folder: Path) -> dict[str, int]:
    return values_by_id(folder, "id", "n")


@pytest.mark.parametrize("seed", range(3))
def test_readers_see_the_right_rows_after_each_commit(mirror: Mirror, seed: int) -> None:
    """Random batches; between them checkpoints, and logs that are read from their beginning."""
    rng = random.Random(seed)
    for number in range(25):
        pool = [f"k{key}" for key in range(60)]
        chosen = rng.sample(pool, rng.randint(0, 30))
        deleted = set(rng.sample(pool, rng.randint(0, 20))) - set(chosen)
        if rng.random() < 0.1:
            deleted = set(mirror.rows) - set(chosen)
        mirror.change(dict.fromkeys(chosen, number), deleted)
        assert read(mirror.folder) == mirror.rows
        if rng.random() < 0.2:
            deltalake.DeltaTable(str(mirror.folder)).create_checkpoint()
        if rng.random() < 0.3:
            state = mirror.log.state
            mirror.log = TableLog(str(mirror.folder))
            fresh = mirror.log.refresh()
            assert fresh is not None
            assert state is not None
            assert (fresh.version, fresh.files) == (state.version, state.files)
            assert fresh.transactions == state.transactions
            assert fresh.transactions["cdc"] == fresh.version


def test_a_state_stays_what_it_is(mirror: Mirror) -> None:
    """Whoever works with it, also in another thread, sees no half of the next version."""
    mirror.change({"a": 1}, set())
    former = mirror.log.state
    assert former is not None
    files = dict(former.files)
    mirror.change({"a": 2, "b": 3}, set())
    assert (former.version, former.files) == (1, files)


@pytest.mark.parametrize("kind", ["folder", "bucket"])
def test_of_two_commits_on_one_version_one_succeeds(tmp_path: Path, unique: str, kind: str) -> None:
    """Two writers raise one counter 100 times, each from what it has read."""
    location = f"{buckets.new_bucket(unique)}/mirror" if kind == "bucket" else str(tmp_path)
    create(TableLog(location))
    logs = [TableLog(location) for _ in range(2)]
    conflicts = []

    def raise_counter(log: TableLog) -> None:
        raised = 0
        while raised < 50:
            state = log.refresh()
            assert state is not None
            counter = state.transactions.get("counter", 0)
            transaction = {"txn": {"appId": "counter", "version": counter + 1}}
            try:
                log.commit(state.identity, [transaction], "STREAMING UPDATE", CLEARED)
                raised += 1
            except CommitConflict:
                conflicts.append(counter)

    threads = [threading.Thread(target=raise_counter, args=(log,)) for log in logs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    state = TableLog(location).refresh()
    assert state is not None
    assert (state.version, state.transactions["counter"]) == (100, 100)
    assert len(list(place(location).files())) == 101


def test_a_commit_whose_answer_was_lost_is_recognised(
    mirror: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_new = Folder.write_new

    def unanswered(place: Folder, path: str, data: bytes) -> bool:
        write_new(place, path, data)
        return write_new(place, path, data)

    monkeypatch.setattr(Folder, "write_new", unanswered)
    mirror.change({"a": 1}, set())
    assert read(mirror.folder) == {"a": 1}


def add_file(mirror: Mirror) -> None:
    deltalake.write_deltalake(
        str(mirror.folder), pa.table([["b"], [7]], schema=SCHEMA), mode="append"
    )


def optimize(mirror: Mirror) -> None:
    deltalake.DeltaTable(str(mirror.folder)).optimize.compact()


@pytest.mark.parametrize(
    ("commit", "changes", "expected"),
    [
        (add_file, True, {"a": 1, "b": 7, "c": 2, "d": 5}),
        (optimize, False, {"a": 1, "c": 2, "d": 5}),
    ],
)
def test_commits_of_others_are_gone_on_from(
    mirror: Mirror, commit: Callable[[Mirror], None], changes: bool, expected: dict[str, int]
) -> None:
    mirror.change({"a": 0, "d": 5}, set())
    mirror.change({"a": 1}, set())
    ours = mirror.log.state.transactions["cdc"] if mirror.log.state else 0
    commit(mirror)
    state = mirror.log.refresh()
    assert state is not None
    later = range(ours + 1, state.version + 1)
    assert len(later) >= 1
    assert any(mirror.log.changed_rows(version) for version in later) is changes
    mirror.change({"c": 2}, set())
    assert read(mirror.folder) == expected


def test_what_is_not_known_is_refused_by_name(mirror: Mirror) -> None:
    state = mirror.log.state
    assert state is not None
    protocol = {**state.protocol, "writerFeatures": ["deletionVectors", "rowTracking"]}
    data = json.dumps({"protocol": protocol}).encode()
    mirror.log.place.write(commit_path(1), data)
    with pytest.raises(SinkRejected, match="rowTracking"):
        mirror.log.refresh()


def test_a_feature_that_is_gone_is_not_refused(mirror: Mirror) -> None:
    state = mirror.log.state
    assert state is not None
    unknown = {**state.protocol, "writerFeatures": ["deletionVectors", "rowTracking"]}
    for version, protocol in enumerate((unknown, state.protocol), 1):
        data = json.dumps({"protocol": protocol}).encode()
        mirror.log.place.write(commit_path(version), data)
        if version == 1:
            with pytest.raises(SinkRejected):
                mirror.log.refresh()
    for log in (mirror.log, TableLog(str(mirror.folder))):
        assert log.refresh()
    mirror.change({"a": 1}, set())
    assert read(mirror.folder) == {"a": 1}


@pytest.mark.parametrize("absent", [{"stats": None, "deletionVector": None}, {}])
def test_files_that_others_add_without_statistics(mirror: Mirror, absent: dict[str, None]) -> None:
    """Older writers write null for what isn't there."""
    mirror.change({"a": 1, "b": 2}, set())
    state = mirror.log.state
    assert state is not None
    (file,) = state.files.values()
    renamed = mirror.folder / "another.parquet"
    renamed.write_bytes((mirror.folder / file["path"]).read_bytes())
    added = {**file, "path": renamed.name, "dataChange": False, "stats": None, **absent}
    optimized = [removal(file, data_change=False), {"add": added}]
    data = b"\n".join(json.dumps(action).encode() for action in optimized)
    mirror.log.place.write(commit_path(2), data)
    state = mirror.log.refresh()
    assert state is not None
    assert select(mirror.log.place, state) == []
    superseded = {renamed.name: BitMap64([0]).serialize()}
    changes = mark(mirror.log.place, state, [], superseded, FileNames())
    mirror.log.commit(state.identity, changes, "STREAMING UPDATE", CLEARED)
    assert read(mirror.folder) == {"b": 2}
    marked = mirror.log.state
    assert marked is not None
    assert select(mirror.log.place, marked) == []


def test_a_commit_on_a_table_that_was_made_again_is_a_conflict(mirror: Mirror) -> None:
    """It has as many versions as the former one."""
    mirror.change({"a": 1}, set())
    state = mirror.log.state
    assert state is not None
    former = state.identity
    shutil.rmtree(mirror.folder / "_delta_log")
    other = Mirror(mirror.folder)
    create(other.log)
    other.change({"b": 2}, set())
    with pytest.raises(CommitConflict):
        mirror.log.commit(former, [], "STREAMING UPDATE", CLEARED)


def test_a_log_with_a_gap_is_refused(mirror: Mirror) -> None:
    for number in range(3):
        mirror.change({"a": number}, set())
    (mirror.folder / commit_path(2)).unlink()
    with pytest.raises(SinkRejected, match="lacks version 2"):
        TableLog(str(mirror.folder)).refresh()
    assert TableLog(str(mirror.folder)).state_at(3) is None


def test_a_log_that_was_made_again_is_read_again(mirror: Mirror) -> None:
    """With as many versions as the former one had."""
    mirror.change({"a": 1}, set())
    shutil.rmtree(mirror.folder / "_delta_log")
    other = Mirror(mirror.folder)
    create(other.log)
    other.change({"b": 2}, set())
    state = mirror.log.refresh()
    assert state is not None
    assert (state.version, state.files) == (1, other.log.state and other.log.state.files)
    shutil.rmtree(mirror.folder / "_delta_log")
    assert mirror.log.refresh() is None


def test_earlier_versions_and_the_history_are_read(mirror: Mirror) -> None:
    for number in range(4):
        mirror.change({"a": number}, set())
    newest = mirror.log.refresh()
    assert newest is not None
    deltalake.DeltaTable(str(mirror.folder)).create_checkpoint()
    for log in (mirror.log, TableLog(str(mirror.folder))):
        log.refresh()
        assert [commit["version"] for commit in log.history()] == [4, 3, 2, 1, 0]
        assert [log.state_at(version) is not None for version in range(6)] == [True] * 5 + [False]
        earlier = log.state_at(3)
        assert earlier is not None
        assert set(earlier.files) & set(newest.files) == set()
    (mirror.folder / commit_path(1)).unlink()
    assert [commit["version"] for commit in mirror.log.history()] == [4, 3, 2]


def test_a_checkpoint_keeps_the_position(mirror: Mirror) -> None:
    """Where the file of our last commit is gone, and nobody else has committed in between that we
    can't see.
    """
    stored = [
        ViewCheckpoint(Position("former", (9, 9, 9)), "w", 5, 1.0, 0, "first"),
        ViewCheckpoint(Position("topic", (7, 0)), "w", 6, 2.0, 2**66 + 50, "second"),
    ]
    for checkpoint in stored:
        assert mirror.log.state
        mirror.log.commit(mirror.log.state.identity, [], "STREAMING UPDATE", checkpoint)
    for _ in range(2):
        assert mirror.log.state
        mirror.log.commit(mirror.log.state.identity, [], "OPTIMIZE", None)
    deltalake.DeltaTable(str(mirror.folder)).create_checkpoint()
    for version in range(3):
        (mirror.folder / commit_path(version)).unlink()
    last = TableLog(str(mirror.folder)).last_commit()
    assert last == LastCommit(replace(stored[1], writer=""))
    (mirror.folder / commit_path(3)).unlink()
    assert "has lost the commit" in TableLog(str(mirror.folder)).last_commit().trouble


def test_in_commit_time_stamps_grow(tmp_path: Path) -> None:
    mirror = Mirror(tmp_path)
    create(mirror.log, **{"delta.enableInCommitTimestamps": "true"})
    stamps = []
    for number in range(3):
        mirror.change({"a": number}, set())
        state = mirror.log.state
        assert state is not None
        stamps.append(state.timestamp)
    assert stamps == sorted(set(stamps))


def test_the_text_of_an_id_is_that_of_the_specification() -> None:
    """The example of ZeroMQ's page on base 85."""
    data = bytes.fromhex("864fd26fb559f75b")
    assert vectors.encode85(data) == "HelloWorld"
    assert vectors.decode85("HelloWorld") == data
