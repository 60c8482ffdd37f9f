"""The log of a Delta table: others read the right rows after our commits, and we accept theirs."""

import json
import random
import shutil
import threading
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import deltalake
import pytest
from pyroaring import BitMap64

from cdc.errors import SinkRejected
from cdc.model.position import Position, ViewCheckpoint
from cdc.sinks.delta import vectors
from cdc.sinks.delta.log import CLEARED, FileNames, LastCommit, TableLog, commit_path, removal
from cdc.sinks.delta.mirror import (
    SMALL_FILES,
    Search,
    mark,
    request,
    rewrite_files,
    search_files,
    select,
)
from cdc.sinks.delta.mirror import replace as replace_files
from cdc.sinks.delta.place import CommitConflict, Folder, place
from tests.support import buckets
from tests.support.warehouse import Mirror, Version, create_mirror, versions_table, write_versions

MAGIC_ALONE = b"\x01\0\0\0\4" + vectors.MAGIC + zlib.crc32(vectors.MAGIC).to_bytes(4)


@pytest.fixture
def mirror(tmp_path: Path) -> Mirror:
    return Mirror(tmp_path)


@pytest.mark.parametrize("seed", range(20))
def test_rows_are_found_wherever_they_are(tmp_path: Path, seed: int) -> None:
    """Ids that are equal in parts, are empty or aren't ASCII; rows that are staged several times."""
    rng = random.Random(seed)
    pool = ["", "ä", "a", "aa", "b\U0001f600", *(f"k{number}" for number in range(60))]
    offsets = iter(range(10_000))
    stored = {
        f"m{number}.parquet": [(key, next(offsets)) for key in rng.sample(pool, rng.randint(1, 40))]
        for number in range(3)
    }
    for path, versions in stored.items():
        write_versions(tmp_path, path, versions)
    repeated = rng.random() < 0.5
    count = rng.randint(0, 50)
    keys = rng.choices(pool, k=count) if repeated else rng.sample(pool, count)
    staged: dict[str, list[Version]] = {"r0": [], "r1": [], "d0": []}
    for key in keys:
        staged[rng.choice(list(staged))].append((key, next(offsets)))
    for name, versions in staged.items():
        write_versions(tmp_path, name, versions)
    newest = dict(sorted(version for versions in staged.values() for version in versions))
    expected = {
        path: {number for number, (key, _) in enumerate(versions) if key in newest}
        for path, versions in stored.items()
    }
    if repeated:
        expected |= {
            name: {n for n, (key, offset) in enumerate(staged[name]) if offset < newest[key]}
            for name in ("r0", "r1")
        }
    search = Search("t", str(tmp_path), list(stored), ["r0", "r1"], ["d0"], repeated)
    found = {path: set(BitMap64.deserialize(rows)) for path, rows in search_files(search)}
    assert found == {path: rows for path, rows in expected.items() if rows}


@pytest.mark.parametrize("seed", range(3))
def test_readers_see_the_right_rows_after_each_commit(mirror: Mirror, seed: int) -> None:
    """Rows come several times in a batch; between batches are checkpoints, and logs read afresh."""
    rng = random.Random(seed)
    offsets = iter(range(100_000))
    for _ in range(25):
        keys = rng.choices([f"k{key}" for key in range(60)], k=rng.randint(0, 40))
        former = sorted(mirror.rows)
        gone = former if rng.random() < 0.1 else rng.sample(former, len(former) // 3)
        versions = [(key, next(offsets)) for key in keys]
        mirror.change(versions, [(key, next(offsets)) for key in gone])
        assert mirror.read() == mirror.rows
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


def test_compaction_changes_no_row(mirror: Mirror) -> None:
    """Small files become one, without the rows that are marked in them."""
    log = mirror.log
    for number in range(SMALL_FILES):
        assert select(log.place, mirror.state) == []
        mirror.change([(f"k{number}", number), ("changing", number)])
    state = mirror.state
    selected = select(log.place, state)
    assert len(selected) == SMALL_FILES
    rewriting = request(log, state, selected, FileNames())
    replace_files(log, state, selected, next(rewrite_files(rewriting), None))
    assert len(mirror.state.files) == 1
    assert not mirror.state.has_marks
    assert not log.changed_rows(mirror.state.version)
    assert mirror.read() == mirror.rows


def test_a_state_stays_what_it_is(mirror: Mirror) -> None:
    """Whoever works with it, also in another thread, sees no half of the next version."""
    mirror.change([("a", 1)])
    former = mirror.state
    files = dict(former.files)
    mirror.change([("a", 2), ("b", 3)])
    assert (former.version, former.files) == (1, files)


@pytest.mark.parametrize("kind", ["folder", "bucket"])
def test_of_two_commits_on_one_version_one_succeeds(tmp_path: Path, unique: str, kind: str) -> None:
    """Two writers raise one counter 100 times, each from what it has read."""
    location = f"{buckets.new_bucket(unique)}/mirror" if kind == "bucket" else str(tmp_path)
    create_mirror(TableLog(location))
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
    mirror.change([("a", 1)])
    assert mirror.read() == {"a": 1}


def add_file(mirror: Mirror) -> None:
    deltalake.write_deltalake(str(mirror.folder), versions_table([("b", 7)]), mode="append")


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
    mirror.change([("a", 0), ("d", 5)])
    mirror.change([("a", 1)])
    ours = mirror.state.transactions["cdc"]
    commit(mirror)
    later = range(ours + 1, mirror.state.version + 1)
    assert len(later) >= 1
    assert any(mirror.log.changed_rows(version) for version in later) is changes
    mirror.change([("c", 2)])
    assert mirror.read() == expected


def test_a_feature_that_is_not_known_is_refused_by_name_until_it_is_gone(mirror: Mirror) -> None:
    state = mirror.state
    unknown = {**state.protocol, "writerFeatures": ["deletionVectors", "rowTracking"]}
    mirror.log.place.write(commit_path(1), json.dumps({"protocol": unknown}).encode())
    with pytest.raises(SinkRejected, match="rowTracking"):
        mirror.log.refresh()
    mirror.log.place.write(commit_path(2), json.dumps({"protocol": state.protocol}).encode())
    for log in (mirror.log, TableLog(str(mirror.folder))):
        assert log.refresh()
    mirror.change([("a", 1)])
    assert mirror.read() == {"a": 1}


@pytest.mark.parametrize("absent", [{"stats": None, "deletionVector": None}, {}])
def test_files_that_others_add_without_statistics(mirror: Mirror, absent: dict[str, None]) -> None:
    """Older writers write null for what isn't there."""
    mirror.change([("a", 1), ("b", 2)])
    (file,) = mirror.state.files.values()
    renamed = mirror.folder / "another.parquet"
    renamed.write_bytes((mirror.folder / file["path"]).read_bytes())
    added = {**file, "path": renamed.name, "dataChange": False, "stats": None, **absent}
    optimized = [removal(file, data_change=False), {"add": added}]
    data = b"\n".join(json.dumps(action).encode() for action in optimized)
    mirror.log.place.write(commit_path(2), data)
    state = mirror.state
    assert select(mirror.log.place, state) == []
    superseded = {renamed.name: BitMap64([0]).serialize()}
    changes = mark(mirror.log.place, state, [], superseded, FileNames())
    mirror.log.commit(state.identity, changes, "STREAMING UPDATE", CLEARED)
    assert mirror.read() == {"b": 2}
    assert select(mirror.log.place, mirror.state) == []


def test_a_log_with_a_gap_is_refused(mirror: Mirror) -> None:
    for number in range(3):
        mirror.change([("a", number)])
    (mirror.folder / commit_path(2)).unlink()
    with pytest.raises(SinkRejected, match="lacks version 2"):
        TableLog(str(mirror.folder)).refresh()
    assert TableLog(str(mirror.folder)).state_at(3) is None


def test_a_log_that_was_made_again_is_read_again_and_a_commit_is_a_conflict(mirror: Mirror) -> None:
    """With as many versions as the former one had."""
    mirror.change([("a", 1)])
    former = mirror.state.identity
    shutil.rmtree(mirror.folder / "_delta_log")
    other = Mirror(mirror.folder)
    other.change([("b", 2)])
    with pytest.raises(CommitConflict):
        mirror.log.commit(former, [], "STREAMING UPDATE", CLEARED)
    assert (mirror.state.version, mirror.state.files) == (1, other.state.files)
    shutil.rmtree(mirror.folder / "_delta_log")
    assert mirror.log.refresh() is None


def test_earlier_versions_and_the_history_are_read(mirror: Mirror) -> None:
    for number in range(4):
        mirror.change([("a", number)])
    newest = mirror.state
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
    """Where the file of our last commit is gone, and nobody else can have committed since."""
    stored = [
        ViewCheckpoint(Position("former", (9, 9, 9)), "w", 5, 1.0, 0, "first"),
        ViewCheckpoint(Position("topic", (7, 0)), "w", 6, 2.0, 2**66 + 50, "second"),
    ]
    for checkpoint in stored:
        mirror.log.commit(mirror.state.identity, [], "STREAMING UPDATE", checkpoint)
    for _ in range(2):
        mirror.log.commit(mirror.state.identity, [], "OPTIMIZE", None)
    deltalake.DeltaTable(str(mirror.folder)).create_checkpoint()
    for version in range(3):
        (mirror.folder / commit_path(version)).unlink()
    last = TableLog(str(mirror.folder)).last_commit()
    assert last == LastCommit(replace(stored[1], writer=""))
    (mirror.folder / commit_path(3)).unlink()
    assert "has lost the commit" in TableLog(str(mirror.folder)).last_commit().trouble


def test_in_commit_time_stamps_grow(tmp_path: Path) -> None:
    mirror = Mirror(tmp_path, **{"delta.enableInCommitTimestamps": "true"})
    stamps = []
    for number in range(3):
        mirror.change([("a", number)])
        stamps.append(mirror.state.timestamp)
    assert stamps == sorted(set(stamps))


@pytest.mark.parametrize("damage", [bytes(40), b"", MAGIC_ALONE])
def test_a_damaged_vector_is_refused_with_what_to_do(mirror: Mirror, damage: bytes) -> None:
    """Whether its checksum is wrong, it is cut off, or it has no bitmap in it."""
    mirror.change([("a", 1), ("b", 2)])
    mirror.change([("a", 3)])
    (file,) = mirror.folder.glob("deletion_vector_*.bin")
    file.write_bytes(damage)
    (marked,) = (file for file in mirror.state.files.values() if "deletionVector" in file)
    vector = marked["deletionVector"]
    if damage == MAGIC_ALONE:
        vector = {**vector, "sizeInBytes": 4}
    with pytest.raises(SinkRejected, match="deletion vector") as caught:
        vectors.deleted_rows(vector, mirror.log.place)
    assert "rebuild" in caught.value.hint


def test_the_text_of_an_id_is_that_of_the_specification() -> None:
    """The example of ZeroMQ's page on base 85."""
    data = bytes.fromhex("864fd26fb559f75b")
    assert vectors.encode85(data) == "HelloWorld"
    assert vectors.decode85("HelloWorld") == data
