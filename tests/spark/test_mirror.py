"""A warehouse's mirror read as documents: every type, by Spark and by its files alone."""

import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from cdc.codec.table import codec
from cdc.codec.types.nested import column_kind
from cdc.model.table import Column, Table
from cdc.sinks.delta import scan
from cdc.sinks.delta.columns import MIRROR
from cdc.sinks.delta.sink import Delta
from tests.support.forms import TYPES, compact, wide

ODD = ("a.b", "`", "c`d", '"', "a")
"""Names of columns that Spark could take for something else."""


def fill(spark: SparkSession, table: Table, folder: str, rows: list[bytes]) -> None:
    """Rows as a batch brings them, past the stream."""
    table_codec, count = codec(table), len(rows)
    values = zip(*map(table_codec.values, rows), strict=True)
    arrays = [
        pa.array(list(column), type_)
        for column, type_ in zip(values, table_codec.schema.types, strict=True)
    ]
    places = {
        "_cdc_id": pa.array([str(number) for number in range(count)]),
        "_cdc_partition": pa.array([0] * count, pa.int32()),
        "_cdc_offset": pa.array(range(count), pa.int64()),
    }
    batch = pa.RecordBatch.from_arrays(
        [*places.values(), *arrays], names=[*places, *table_codec.schema.names]
    )
    quoted = {column.name: "`" + column.name.replace("`", "``") + "`" for column in table.columns}
    columns = {
        **MIRROR,
        **{quoted[column.name]: column_kind(column).column for column in table.columns},
    }
    schema = ", ".join(f"{name} {type_}" for name, type_ in columns.items())
    frame = spark.range(0, 1, numPartitions=1).mapInArrow(
        lambda parts: (batch for _ in parts), schema
    )
    frame.write.format("delta").mode("append").save(folder)


@pytest.mark.parametrize("small_bytes", [scan.SMALL_BYTES, 0])
def test_every_type_and_name_comes_back_as_the_document_that_others_hold(
    spark: SparkSession, tmp_path: Path, small_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan, "SMALL_BYTES", small_bytes)
    typed = wide([type_ for type_, *_ in TYPES])
    table = replace(typed, columns=(*typed.columns, *(Column(name, "text") for name in ODD)))
    names = [column.name for column in table.columns[1:]]
    values = [*(entry[1] for entry in TYPES), *(f"of {name}" for name in ODD)]
    full = dict(zip(names, values, strict=True))
    empty = dict.fromkeys(names)
    rows = [compact({"id": key, **row}).encode() for key, row in enumerate((full, empty))]
    sink = Delta("warehouse", str(tmp_path), "shop")
    sink.prepare(table)
    assert sink.scan(table, spark).collect() == []
    fill(spark, table, sink.folder(table, "mirror"), rows)
    expected = {
        str(index): json.loads(codec(table).document(row)) for index, row in enumerate(rows)
    }

    def read(*ids: str) -> dict[str, object]:
        return {
            row["id"]: json.loads(row["document"])
            for row in sink.scan(table, spark, ids or None).collect()
        }

    assert read() == expected
    assert read("1", "none") == {"1": expected["1"]}
    grouped = sink.scan_group([table], spark).collect()
    assert {row["id"]: json.loads(row["document"]) for row in grouped} == expected
    assert {row["table"] for row in grouped} == {table.qualified}
    later = replace(table, columns=(*table.columns, Column("strange `name`", "date")))
    for frame in (sink.scan(later, spark), sink.scan_group([later], spark)):
        documents = {row["id"]: json.loads(row["document"]) for row in frame.collect()}
        assert documents == {key: {**row, "strange `name`": None} for key, row in expected.items()}
    sink.close()
