"""The rows that a batch supersedes, against a plain search row by row."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyroaring import BitMap64

from cdc.sinks.delta import mirror
from cdc.sinks.delta.columns import NO_COLUMNS, schema
from cdc.sinks.delta.log import (
    CLEARED,
    DELETION_VECTORS,
    NO_TABLE,
    FileNames,
    TableLog,
    creation,
    new_file,
)
from cdc.sinks.delta.mirror import Search, rewrite_files, search_files
from tests.support.warehouse import values_by_id

SCHEMA = pa.schema(
    [("_cdc_id", pa.string()), ("_cdc_partition", pa.int32()), ("_cdc_offset", pa.int64())]
)
Version = tuple[str, int]


def write(folder: Path, name: str, versions: Sequence[Version], group: int = 7) -> str:
    ids = [key for key, _ in versions]
    offsets = [offset for _, offset in versions]
    table = pa.table([ids, [0] * len(ids), offsets], schema=SCHEMA)
    pq.write_table(table, folder / name, row_group_size=group)
    return name


def found(search: Search) -> dict[str, set[int]]:
    return {path: set(BitMap64.deserialize(rows)) for path, rows in search_files(search)}


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
        write(tmp_path, path, versions)
    repeated = rng.random() < 0.5
    count = rng.randint(0, 50)
    keys = rng.choices(pool, k=count) if repeated else rng.sample(pool, count)
    staged: dict[str, list[Version]] = {"r0": [], "r1": [], "d0": []}
    for key in keys:
        staged[rng.choice(list(staged))].append((key, next(offsets)))
    for name, versions in staged.items():
        write(tmp_path, name, versions)
    newest = {key: offset for versions in staged.values() for key, offset in versions}
    for versions in staged.values():
        for key, offset in versions:
            newest[key] = max(newest[key], offset)
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
    assert found(search) == {path: rows for path, rows in expected.items() if rows}


def test_marks_add_up_and_a_file_without_rows_goes(tmp_path: Path) -> None:
    """Batch after batch; rows that are staged twice come with marks of their own."""
    log = TableLog(str(tmp_path))
    log.commit(
        NO_TABLE, creation(schema(NO_COLUMNS, "mirror"), [DELETION_VECTORS]), "CREATE TABLE", None
    )
    rng = random.Random(0)
    offsets = iter(range(100_000))
    live: dict[str, int] = {}
    for number in range(30):
        keys = rng.choices([f"k{key}" for key in range(50)], k=rng.randint(1, 40))
        versions = [(key, next(offsets)) for key in keys]
        deleted = [(key, next(offsets)) for key in rng.sample(sorted(live), len(live) // 3)]
        name = f"part-{number}.parquet"
        gone = f"deleted-{number}.parquet"
        write(tmp_path, name, versions)
        write(tmp_path, gone, deleted)
        state = log.refresh()
        assert state is not None
        search = Search("t", str(tmp_path), list(state.files), [name], [gone], repeated=True)
        stats = json.dumps({"numRecords": len(versions)})
        file = new_file(name, (tmp_path / name).stat().st_size, stats)
        actions = mirror.mark(log.place, state, [file], dict(search_files(search)), FileNames())
        log.commit(state.identity, actions, "STREAMING UPDATE", CLEARED)
        live |= dict(versions)
        for key, _ in deleted:
            del live[key]
        assert values_by_id(tmp_path, "_cdc_id", "_cdc_offset") == live


def test_compaction_changes_no_row(tmp_path: Path) -> None:
    """Small files become one, without the rows that are marked in them."""
    log = TableLog(str(tmp_path))
    log.commit(
        NO_TABLE, creation(schema(NO_COLUMNS, "mirror"), [DELETION_VECTORS]), "CREATE TABLE", None
    )
    live: dict[str, int] = {}
    for number in range(mirror.SMALL_FILES):
        assert log.state is not None
        assert mirror.select(log.place, log.state) == []
        versions = [(f"k{number}", number), ("changing", number)]
        name = write(tmp_path, f"part-{number}.parquet", versions)
        file = new_file(name, (tmp_path / name).stat().st_size, json.dumps({"numRecords": 2}))
        search = Search("t", str(tmp_path), list(log.state.files), [name], [])
        actions = mirror.mark(log.place, log.state, [file], dict(search_files(search)), FileNames())
        log.commit(log.state.identity, actions, "STREAMING UPDATE", CLEARED)
        live |= dict(versions)
    assert log.state is not None
    selected = mirror.select(log.place, log.state)
    assert len(selected) == mirror.SMALL_FILES
    request = mirror.request(log, log.state, selected, FileNames())
    mirror.replace(log, log.state, selected, next(rewrite_files(request), None))
    assert len(log.state.files) == 1
    assert not log.state.has_marks
    assert not log.changed_rows(log.state.version)
    assert values_by_id(tmp_path, "_cdc_id", "_cdc_offset") == live
