"""What executors write for a warehouse, without Spark: files, what they say of them, and what they
read back.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyroaring import BitMap64

from cdc.codec.decode_options import DecodeOptions
from cdc.errors import SinkRejected
from cdc.model.outcome import Advance
from cdc.model.position import Position
from cdc.model.table import Column, Table
from cdc.sink.lane import ChunkLimits, Lane, PartitionOutcome
from cdc.sink.lane_task import LaneRun
from cdc.sink.rejection import Skip
from cdc.sinks.delta import parquet
from cdc.sinks.delta.batch import TableCommit
from cdc.sinks.delta.executor import Staged, StoredRows, ViewState, WarehouseWriter
from cdc.sinks.delta.log import File, FileNames, TableState
from tests.support.envelopes import PLACEHOLDER, Topic, encoded
from tests.support.envelopes import table as items

ITEMS = items("t.public.items")


def row(a: str, n: int | None = 1, v: str | None = "x") -> dict[str, Any]:
    return {"a": a, "b": 1, "v": v, "n": n}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for kind in ("changes", "mirror"):
        (tmp_path / kind).mkdir()
    return tmp_path


def view(folder: Path, topic: Topic, **options: Any) -> ViewState:
    start = (0,) * topic.partitions
    state = ViewState(
        topic.table, "id", str(folder / "changes"), str(folder / "mirror"), start, start, None
    )
    return replace(state, **options)


def run(state: ViewState, topic: Topic, rows: int = 100) -> tuple[list[PartitionOutcome], Staged]:
    """Run all records of a topic through one task."""
    writer = WarehouseWriter(
        {topic.table.topic: state},
        FileNames(),
        archives=state.changes is not None,
        limits=ChunkLimits(rows, 2**30),
    )
    advance = Advance(topic.table, None, Position("id", topic.ends))
    task = LaneRun(Lane((advance,), DecodeOptions(PLACEHOLDER), writer, Skip()))
    for partition in range(topic.partitions):
        records = [
            (encoded(r.key), encoded(r.value), r.offset)
            for r in topic.records
            if r.partition == partition
        ]
        task.fold(topic.table.topic, partition, records)
    reports, staged = task.finish(), Staged()
    for message in (message for report in reports for message in report.writer_results):
        staged.add(msgspec.json.decode(message, type=Staged))
    return reports, staged


def read_files(folder: Path, kind: str, files: list[File]) -> list[dict[str, Any]]:
    return [
        record
        for file in files
        for record in pq.read_table(folder / kind / file["path"]).to_pylist()
    ]


def test_every_event_and_the_newest_of_each_row(folder: Path) -> None:
    topic = Topic(ITEMS, 1)
    topic.add("c", row("k", 1))
    topic.add("u", row("k", 2), lacking=["v"], lsn=7)
    topic.add("c", row("gone"))
    topic.add("d", row("gone"))
    (report,), staged = run(view(folder, topic), topic)
    assert (report.applied.written, report.applied.deleted, report.applied.read) == (1, 1, 5)
    events = read_files(folder, "changes", staged.events)
    assert [
        (record["_cdc_op"], record["_cdc_offset"], record["_cdc_kept"], record["v"])
        for record in events
    ] == [
        ("c", 0, None, "x"),
        ("u", 1, ["v"], None),
        ("c", 2, None, "x"),
        # The key is all that is known of it.
        ("d", 3, None, None),
    ]
    assert [(record["a"], record["b"], record["n"]) for record in events][-1] == ("gone", 1, None)
    assert (events[1]["_cdc_lsn"], events[1]["_cdc_topic"], events[1]["_cdc_id"]) == (
        7,
        "id",
        '["k",1]',
    )
    assert read_files(folder, "mirror", staged.rows) == [
        {"_cdc_id": '["k",1]', "_cdc_partition": 0, "_cdc_offset": 1, **row("k", 2)}
    ]
    assert [record["_cdc_id"] for record in read_files(folder, "mirror", staged.deleted)] == [
        '["gone",1]'
    ]
    assert not staged.repeated
    stats = json.loads(staged.rows[0]["stats"])
    assert (stats["numRecords"], stats["maxValues"]["n"], stats["nullCount"]["v"]) == (1, 2, 0)


def test_a_part_gets_nothing_that_it_knows(folder: Path) -> None:
    topic = Topic(ITEMS, 1)
    for number in range(4):
        topic.add("c", row(f"k{number}", number))
    (report,), staged = run(view(folder, topic, logged=(3,), mirrored=(2,)), topic)
    assert [record["_cdc_offset"] for record in read_files(folder, "changes", staged.events)] == [3]
    assert [record["_cdc_offset"] for record in read_files(folder, "mirror", staged.rows)] == [2, 3]
    assert (report.applied.stale, report.applied.written) == (2, 2)
    _, staged = run(view(folder, topic, changes=None), topic)
    assert (staged.events, len(staged.rows)) == ([], 1)


def test_a_small_mirror_is_searched_by_the_tasks(folder: Path) -> None:
    """A row of an earlier batch, and one that comes in two chunks of this one."""
    topic = Topic(ITEMS, 1)
    for number in range(3):
        topic.add("c", row(f"k{number}", number))
    _, first = run(view(folder, topic, files=[]), topic)
    assert first.superseded == {}
    (stored,) = first.rows
    topic.add("u", row("k1", 2))
    topic.add("d", row("k0"))
    topic.add("u", row("k1", 3))
    state = view(folder, topic, files=[stored["path"]], logged=(3,), mirrored=(3,))
    _, staged = run(state, topic, rows=1)
    (rows,) = staged.rows
    found = {path: set(BitMap64.deserialize(bits)) for path, bits in staged.superseded.items()}
    assert found == {stored["path"]: {0, 1}, rows["path"]: {0}}
    _, staged = run(replace(state, files=None), topic)
    assert staged.superseded == {}


def test_a_file_of_the_mirror_that_a_task_cant_read_is_reported(folder: Path) -> None:
    topic = Topic(ITEMS, 1)
    topic.add("c", row("k"))
    (report,), _ = run(view(folder, topic, files=["gone.parquet"]), topic)
    assert report.failure == "unavailable"
    assert "can't be read: No such file or directory" in report.message


def test_what_several_tasks_found_is_added_up() -> None:
    staged = Staged(superseded={"one": BitMap64([1, 2]).serialize()})
    staged.add(
        Staged(superseded={"one": BitMap64([2, 7]).serialize(), "two": BitMap64([3]).serialize()})
    )
    found = {path: set(BitMap64.deserialize(bits)) for path, bits in staged.superseded.items()}
    assert found == {"one": {1, 2, 7}, "two": {3}}


def test_rows_of_several_chunks(folder: Path) -> None:
    topic = Topic(ITEMS, 1)
    topic.add("c", row("k", 1))
    topic.add("c", row("other"))
    topic.add("u", row("k", 2), lacking=["v"])
    (report,), staged = run(view(folder, topic), topic, rows=1)
    assert staged.repeated
    # The second was begun when the third row was to be filled.
    assert (len(staged.rows), len(staged.events)) == (2, 1)
    assert [record["v"] for record in read_files(folder, "mirror", staged.rows)] == ["x", "x", "x"]
    assert (report.applied.written, report.rejected) == (3, [])
    topic.records.pop()
    assert not run(view(folder, topic), topic, rows=1)[1].repeated


def test_a_folder_that_takes_no_more_is_reported(tmp_path: Path) -> None:
    topic = Topic(ITEMS, 1)
    topic.add("c", row("k"))
    (report,), staged = run(view(tmp_path, topic), topic)
    assert report.failure == "unavailable"
    assert (
        report.message
        == f"The warehouse folder {tmp_path}/changes can't be written: No such file or directory."
    )
    assert staged == Staged()


def test_half_a_file_is_removed(folder: Path) -> None:
    def tables() -> Any:
        yield pa.table({"_cdc_id": ["1"]})
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        parquet.write_file(str(folder / "mirror"), "part-1.parquet", tables())
    assert not list((folder / "mirror").iterdir())


def test_rows_are_read_back_by_their_ids(tmp_path: Path) -> None:
    """From any row group, without those that are marked; what a file lacks is null."""
    tables = (
        pa.table({"_cdc_id": [f"{number}", f"{number + 1}"], "n": [number, number + 1]})
        for number in (10, 20, 30)
    )
    assert parquet.write_file(str(tmp_path), "part-1.parquet", tables)
    schema = pa.schema([("_cdc_id", pa.string()), ("n", pa.int32()), ("later", pa.string())])
    ids = pa.array(["11", "20", "31", "nobody"])

    def read(keep: list[bool] | None = None) -> list[dict[str, Any]]:
        tables = parquet.rows_with_ids(
            f"{tmp_path}/part-1.parquet", ids, schema, keep and pa.array(keep)
        )
        return [record for part in tables for record in part.to_pylist()]

    assert [(record["_cdc_id"], record["n"], record["later"]) for record in read()] == [
        ("11", 11, None),
        ("20", 20, None),
        ("31", 31, None),
    ]
    assert [record["n"] for record in read([True, False, True, True, True, True])] == [20, 31]


def test_what_comes_again_is_met(folder: Path) -> None:
    stored_rows = StoredRows(ITEMS, str(folder / "mirror"), None)
    assert [stored_rows.note_chunk(ids) for ids in (["a", "b"], ["c"], ["d", "b"])] == [
        False,
        False,
        True,
    ]
    assert StoredRows(ITEMS, "", None).note_chunk(["a", "a"])


def test_columns_of_names_that_parquet_takes_for_paths(folder: Path) -> None:
    dotted = replace(ITEMS, columns=(*ITEMS.columns, Column("v.w", "text")))
    topic = Topic(dotted, 1)
    topic.add("c", {**row("k"), "v.w": "kept"})
    topic.add("c", {**row("other"), "v.w": "x"})
    topic.add("u", {**row("k"), "v.w": "kept"}, lacking=["v.w"])
    _, staged = run(view(folder, topic), topic, rows=1)
    assert [record["v.w"] for record in read_files(folder, "mirror", staged.rows)] == [
        "kept",
        "x",
        "kept",
    ]


class OneFolder:
    """Tables of which all parts lie in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)

    def folder(self, _table: Table, _kind: str) -> str:
        return self._folder


def commit_in(folder: Path, names: FileNames) -> TableCommit:
    """The commit of a batch to a mirror in version 1."""
    advance = Advance(ITEMS, None, Position("id", (1,)))
    state = ViewState(ITEMS, "id", None, str(folder), (0,), (0,), 1)
    tables: Any = OneFolder(folder)
    pending: Any = {"mirror": None}
    return TableCommit(advance, tables, pending, {"mirror": TableState(1)}, state, names)


def test_discarding_opens_no_table_where_nothing_was_committed(tmp_path: Path) -> None:
    """A table that can't be opened is often why the batch failed: that failure is reported."""
    log = tmp_path / "_delta_log"
    log.mkdir()
    (log / f"{0:020}.json").write_text("no JSON")
    names = FileNames()
    file = tmp_path / names.generate()
    file.write_bytes(b"rows")
    with pytest.raises(SinkRejected, match="damaged"):
        commit_in(tmp_path, names).discard(committed=True)
    assert file.exists()
    commit_in(tmp_path, names).discard(committed=False)
    assert not file.exists()
