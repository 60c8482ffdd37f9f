"""Rows of a mirror as the other views have them, without Spark."""

import json
import shutil
from decimal import Decimal
from math import inf
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyroaring import BitMap64

from cdc.model.table import Column, Table
from cdc.sinks.delta.columns import schema
from cdc.sinks.delta.log import (
    DELETION_VECTORS,
    NO_TABLE,
    FileNames,
    TableLog,
    additions,
    creation,
    new_file,
)
from cdc.sinks.delta.mirror import mark
from cdc.sinks.delta.scan import Mirror, documents, read_mirror, read_share

VALUES: list[tuple[str, pa.DataType, Any, str]] = [
    # What the codec's tests of every type compare as JSON, which hides how it is written.
    ("text", pa.string(), 'a"\\\n\x1f\x7fü', '"a\\"\\\\\\n\\u001f\x7fü"'),
    ("real", pa.float32(), 1e20, "1e20"),
    ("double precision", pa.float64(), inf, '"Infinity"'),
    ("numeric(8,7)", pa.decimal128(8, 7), Decimal("0.0000000"), '"0.0000000"'),
    ("jsonb", pa.string(), '{"a": 1.00}', '{"a": 1.00}'),
    ("json[]", pa.list_(pa.string()), ["1", None], "[1,null]"),
]


def items(type_: str) -> Table:
    columns = (Column('v"', type_), Column("later", "date"), Column("id", "bigint"))
    return Table("public", "t", columns, ("id",), "t.public.t")


def part(type_: pa.DataType, *values: Any) -> pa.RecordBatch:
    """Make a part whose columns have an order of their own; one was added later, and is missing."""
    numbers = [*range(len(values))]
    columns = {"_cdc_id": [*map(str, numbers)], "_cdc_offset": numbers, "id": numbers}
    arrays = [pa.array(values, type_), *(pa.array(listed) for listed in columns.values())]
    return pa.RecordBatch.from_arrays(arrays, names=['v"', *columns])


@pytest.mark.parametrize(("type_", "arrow_type", "value", "text"), VALUES)
def test_values(type_: str, arrow_type: pa.DataType, value: Any, text: str) -> None:
    """Values of json come last."""
    (document,) = documents(items(type_), part(arrow_type, value)).to_pylist()
    members = [f'"v\\"":{text}', '"later":null,"id":0']
    in_order = reversed(members) if type_.startswith("json") else members
    assert document == f"{{{','.join(in_order)}}}"
    json.loads(document)


def test_files_of_a_mirror(tmp_path: Path) -> None:
    """One that can't be read, or isn't the mirror's, is reported by a row without an id."""
    good, foreign, torn, gone = (f"{name}.parquet" for name in ("good", "other", "torn", "gone"))
    for name, rows in (
        (good, part(pa.string(), "a", "b")),
        (foreign, part(pa.list_(pa.int64()), [1])),
    ):
        pq.write_table(pa.Table.from_batches([rows]), tmp_path / name)
    (tmp_path / torn).write_bytes((tmp_path / good).read_bytes()[:-9])

    def ids(*files: str) -> list[str | None]:
        folder = str(tmp_path / f"table {'-'.join(files)}")
        for name in files:
            if (tmp_path / name).exists():
                Path(folder).mkdir(exist_ok=True)
                shutil.copy(tmp_path / name, folder)
        listed = [new_file(name, 1, '{"numRecords": 2}') for name in files]
        created = [*creation(schema(items("text"), "mirror")), *additions(listed)]
        TableLog(folder).commit(NO_TABLE, created, "WRITE", None)
        return [
            key
            for rows in read_mirror(Mirror(items("text"), folder, 0))
            for key in rows.column("id").to_pylist()
        ]

    assert ids() == []
    assert ids(good) == ["0", "1"]
    for bad in (foreign, torn, gone):
        assert ids(good, bad) == ["0", "1", None]


def test_marked_rows_are_left_out(tmp_path: Path) -> None:
    rows = part(pa.string(), *("abcde"))
    pq.write_table(pa.Table.from_batches([rows]), tmp_path / "part.parquet")
    log = TableLog(str(tmp_path))
    columns = schema(items("text"), "mirror")
    log.commit(NO_TABLE, creation(columns, [DELETION_VECTORS]), "WRITE", None)
    assert log.state
    file = new_file("part.parquet", 1, '{"numRecords": 5}')
    superseded = {"part.parquet": BitMap64([1, 4]).serialize()}
    changes = mark(log.place, log.state, [file], superseded, FileNames())
    log.commit(log.state.identity, changes, "WRITE", None)
    mirror = Mirror(items("text"), str(tmp_path), 1)
    (read,) = read_mirror(mirror)
    assert read.column("id").to_pylist() == ["0", "2", "3"]
    (chosen,) = read_share(mirror, 1, pa.array(["3", "4"]), 0)
    assert chosen.to_pylist() == [
        {"table": "public.t", "id": "3", "document": '{"v\\"":"d","later":null,"id":3}'}
    ]
