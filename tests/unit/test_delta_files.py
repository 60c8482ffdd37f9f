"""What a worker holds of a file that it writes, and how commits of files fail."""

import json
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pytest

from cdc.errors import SinkUnavailable
from cdc.sinks.delta.columns import merged
from cdc.sinks.delta.log import NO_TABLE, TableLog, additions, creation
from cdc.sinks.delta.parquet import GROUP_BYTES, GROUP_ROWS, row_groups, write_file
from cdc.sinks.delta.place import writing
from tests.support.warehouse import struct


@pytest.mark.parametrize(("width", "groups"), [(1, 1), (100_000, 4)], ids=["narrow", "wide"])
def test_a_row_group_is_bounded_by_bytes_as_well(width: int, groups: int) -> None:
    part = pa.table({"text": ["x" * width] * 100})
    sizes = [(group.num_rows, group.nbytes) for group in row_groups(iter([part] * 24))]
    assert sum(rows for rows, _ in sizes) == 2400
    assert len(sizes) == groups
    assert all(size < GROUP_BYTES + part.nbytes for _, size in sizes)


def test_a_row_group_is_bounded_by_rows() -> None:
    part = pa.table({"number": [1] * 1000})
    assert [group.num_rows for group in row_groups(iter([part] * 101))] == [GROUP_ROWS, 1000]


def test_a_text_that_parquet_has_no_bound_of_hides_no_row(tmp_path: Path) -> None:
    """Parquet leaves out the bounds of a row group with a text of more than 4096 bytes."""
    folder, schema = str(tmp_path), pa.schema({"note": pa.string()})
    notes = [["apple", "banana"], ["mango", "z" * 5000]]
    groups = (pa.table({"note": group}, schema=schema) for group in notes)
    file = write_file(folder, "part-1.parquet", groups)
    assert file
    created = [*creation(struct(note="string")), *additions([file])]
    TableLog(folder).commit(NO_TABLE, created, "WRITE", None)
    query = deltalake.QueryBuilder().register("t", deltalake.DeltaTable(folder))
    rows = query.execute("SELECT note FROM t WHERE note = 'mango'").read_all()
    assert rows["note"].to_pylist() == ["mango"]


def test_a_row_group_of_nulls_leaves_the_bounds_of_the_others(tmp_path: Path) -> None:
    schema = pa.schema({"note": pa.string()})
    groups = (pa.table({"note": group}, schema=schema) for group in (["a", "b"], [None]))
    file = write_file(str(tmp_path), "part-1.parquet", groups)
    assert file
    stats = json.loads(file["stats"])
    assert (stats["minValues"], stats["maxValues"]) == ({"note": "a"}, {"note": "b"})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("OSError: [Errno 28] No space left on device: '/w/part-1.parquet' of row 7", "No space left on device"),
        ("Generic LocalFileSystem error\n ↳ Unable to copy\n ↳ File too large (os error 27)\n", "File too large"),
        ("[Errno 30] Read-only file system: '/w/part-1.parquet'", "Read-only file system"),
        ("IO error: Read-only file system (os error 30)", "Read-only file system"),
        ("something with a value in it", "OSError"),
    ],
)  # fmt: skip
def test_what_a_disk_says_is_reported_and_nothing_else(text: str, reason: str) -> None:
    with pytest.raises(SinkUnavailable) as caught, writing("/w"):
        raise OSError(text)
    assert caught.value.message == f"The warehouse folder /w can't be written: {reason}."


def test_columns_and_fields_of_structs_are_added() -> None:
    def array(type_: Any) -> Any:
        return {"type": "array", "elementType": type_, "containsNull": True}

    stored = struct(a="string", gone="long", items=array(struct(x="long", old="date")))
    required = struct(b="date", a="string", items=array(struct(new="date", x="long")))
    items = array(struct(x="long", old="date", new="date"))
    assert merged(stored, required) == struct(a="string", gone="long", items=items, b="date")
