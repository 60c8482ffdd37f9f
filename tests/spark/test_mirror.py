"""A warehouse's mirror read as documents: every type, by Spark and by its files alone."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from cdc.codec.table import codec
from cdc.model.table import Column, Table
from sinks.delta.files.columns import MIRROR, column_type
from sinks.delta.sink import Delta
from tests.support.forms import TYPES, compact, wide

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def fill(spark: "SparkSession", made: Table, folder: str, rows: list[bytes]) -> None:
    """Rows as a batch brings them, past the stream."""
    own, count = codec(made), len(rows)
    values = zip(*map(own.values, rows), strict=True)
    held = [
        pa.array(list(column), type_)
        for column, type_ in zip(values, own.schema.types, strict=True)
    ]
    places = {
        "_cdc_id": pa.array([str(at) for at in range(count)]),
        "_cdc_partition": pa.array([0] * count, pa.int32()),
        "_cdc_offset": pa.array(range(count), pa.int64()),
    }
    batch = pa.RecordBatch.from_arrays(
        [*places.values(), *held], names=[*places, *own.schema.names]
    )
    quoted = {column.name: "`" + column.name.replace("`", "``") + "`" for column in made.columns}
    columns = {
        **MIRROR,
        **{quoted[column.name]: column_type(made, column.name) for column in made.columns},
    }
    schema = ", ".join(f"{name} {type_}" for name, type_ in columns.items())
    frame = spark.range(0, 1, numPartitions=1).mapInArrow(
        lambda parts: (batch for _ in parts), schema
    )
    frame.write.format("delta").mode("append").save(folder)


def test_every_type_comes_back_as_the_document_that_others_hold(
    spark: "SparkSession", tmp_path: Path
) -> None:
    made = wide([type_ for type_, *_ in TYPES])
    names = [column.name for column in made.columns[1:]]
    rows = [compact({"id": 0, **dict(zip(names, (one[1] for one in TYPES), strict=True))}).encode()]
    rows.append(compact({"id": 1, **dict.fromkeys(names)}).encode())
    sink = Delta("warehouse", str(tmp_path), "shop")
    sink.prepare(made)
    assert sink.scan(made, spark).collect() == []
    fill(spark, made, sink.folder(made, "mirror"), rows)
    expected = {str(at): json.loads(codec(made).document(row)) for at, row in enumerate(rows)}

    def read(*ids: str) -> dict[str, object]:
        return {
            row["id"]: json.loads(row["document"])
            for row in sink.scan(made, spark, ids or None).collect()
        }

    assert read() == expected
    assert read("1", "none") == {"1": expected["1"]}
    grouped = sink.scan_group([made], spark).collect()
    assert {row["id"]: json.loads(row["document"]) for row in grouped} == expected
    assert {row["table"] for row in grouped} == {made.qualified}
    later = Table(
        made.schema,
        made.name,
        (*made.columns, Column("strange `name`", "date")),
        made.key,
        made.topic,
    )
    for frame in (sink.scan(later, spark), sink.scan_group([later], spark)):
        found = {row["id"]: json.loads(row["document"]) for row in frame.collect()}
        assert found == {key: {**row, "strange `name`": None} for key, row in expected.items()}
    sink.close()


def test_names_that_spark_takes_for_its_own(spark: "SparkSession", tmp_path: Path) -> None:
    columns = (
        Column("id", "bigint", False),
        *(Column(name, "text") for name in ("a.b", "`", "c`d", '"', "a")),
    )
    made = Table("public", "odd", columns, ("id",), "t.public.odd")
    row = {"id": 0, **{column.name: f"of {column.name}" for column in columns[1:]}}
    sink = Delta("warehouse", str(tmp_path), "shop")
    sink.prepare(made)
    fill(spark, made, sink.folder(made, "mirror"), [compact(row).encode()])
    for frame in (
        sink.scan(made, spark),
        sink.scan(made, spark, ["0"]),
        sink.scan_group([made], spark),
    ):
        assert [json.loads(found["document"]) for found in frame.collect()] == [row]
    sink.close()
