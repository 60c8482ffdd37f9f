"""Members of documents in the warehouse: structs and lists, which everybody's readers of Delta tables
read, and which grow with what the members are made of.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deltalake
import polars
import pyarrow as pa
import pytest

from cdc.model.table import Column, Shape, Table
from cdc.sink.contract import SchemaMismatch
from cdc.sinks.delta.sink import Delta
from tests.contract.laws import Harness
from tests.contract.test_readers import database

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.support.envelopes import Row

PRODUCT = Shape((Column("name", "text"), Column("weight", "double precision")), True, False)
ITEMS = Shape(
    (
        Column("line", "integer"),
        Column("price", "numeric(10,2)"),
        Column("notes", "jsonb"),
        Column("product", "jsonb", shape=PRODUCT),
    ),
    is_object=True,
    many=True,
)
LABELS = Shape((Column("tag", "text"),), is_object=False, many=True)
COLUMNS = (
    Column("id", "integer"),
    Column("customer", "jsonb", shape=Shape((Column("name", "text"),), True, False)),
    Column("items", "jsonb", shape=ITEMS),
    Column("labels", "jsonb", shape=LABELS),
    Column("odd", "jsonb", shape=Shape((Column("two words", "text"),), True, False)),
)
NESTED = ("customer", "items", "labels", "odd")
Documents = Mapping[int, "Row"]


def view(topic: str) -> Table:
    return Table("view", "order_docs", COLUMNS, ("id",), topic, reshaped=True)


def item(line: int, **more: Any) -> "Row":
    product = {"name": f"p{line}", "weight": line + 0.5}
    return {"line": line, "price": "1.50", "notes": {"n": [1, None]}, "product": product, **more}


def document(number: int, *items: "Row", customer: "Row | None" = None) -> "Row":
    return {
        "id": number,
        "customer": customer,
        "items": list(items),
        "labels": ["a", None, 'q"ü'],
        "odd": {"two words": "x"},
    }


def as_row(document: "Row") -> "Row":
    """A row of the view's topic: what is nested is text."""
    return {
        name: json.dumps(value, ensure_ascii=False)
        if name in NESTED and value is not None
        else value
        for name, value in document.items()
    }


def by_duckdb(folder: str) -> list["Row"]:
    result = database().execute(f"SELECT * FROM delta_scan('{folder}')")
    names = [column[0] for column in result.description]
    return [dict(zip(names, values, strict=True)) for values in result.fetchall()]


def by_deltalake(folder: str) -> list["Row"]:
    query = deltalake.QueryBuilder().register("mirror", deltalake.DeltaTable(folder))
    rows: list[Row] = pa.table(query.execute("SELECT * FROM mirror").read_all()).to_pylist()
    return rows


READERS: list[Callable[[str], list["Row"]]] = [
    by_duckdb,
    by_deltalake,
    lambda folder: deltalake.DeltaTable(folder).to_pyarrow_table().to_pylist(),
    lambda folder: polars.read_delta(folder).to_dicts(),
    lambda folder: polars.scan_delta(folder).collect().to_dicts(),
]


def filled(value: Any, expected: Any) -> Any:
    """What a reader has to give for a value: fields that it lacks are null, json is text."""
    if isinstance(expected, list):
        return [filled(part, expected[0]) for part in value] if expected else value
    if isinstance(expected, dict) and value is not None:
        return {
            name: json.dumps(value[name])
            if name == "notes" and value.get(name) is not None
            else filled(value.get(name), part)
            for name, part in expected.items()
        }
    return value


def check(harness: Harness, folder: str, expected: Documents, model: "Row") -> None:
    """Every reader has these documents, with the fields of `model`; and so has the view itself."""
    for read in READERS:
        rows = {
            row["id"]: {name: row[name] for name in ("customer", "items", "labels")}
            for row in read(folder)
        }
        assert rows == {
            number: {
                name: filled(row[name], model[name]) for name in ("customer", "items", "labels")
            }
            for number, row in expected.items()
        }
    scanned = {int(key): row for key, row in harness.view().items()}
    assert scanned.keys() == expected.keys()
    for number, row in expected.items():
        assert scanned[number]["labels"] == row["labels"]
        assert scanned[number]["odd"] == row["odd"]
        assert has(scanned[number]["items"], row["items"])


def has(shown: Any, expected: Any) -> bool:
    """Whether a document has a value; fields that were added later are null, and may be there."""
    if isinstance(expected, list):
        return len(shown) == len(expected) and all(map(has, shown, expected))
    if isinstance(expected, dict):
        return all(has(shown[name], part) for name, part in expected.items())
    return bool(shown == expected)


@pytest.mark.parametrize("unmarked", [True, False], ids=["rewritten", "with deletion vectors"])
def test_members_are_structs_and_lists_that_grow(
    spark: "SparkSession", tmp_path: Path, unmarked: bool
) -> None:
    patterns = ["*"] if unmarked else []
    harness = Harness(
        spark,
        lambda: Delta("warehouse", str(tmp_path), "p", without_deletion_vectors=patterns),
        view("p.view.order_docs"),
    )
    folder = f"{tmp_path}/view.order_docs/mirror"
    expected = {
        1: document(1, item(1), item(2, product=None), customer={"name": "Ann"}),
        2: document(2),
        3: document(3, item(3, notes=None)),
    }
    for row in expected.values():
        harness.topic.add("c", as_row(row))
    harness.apply()
    fields = {
        f.name: json.loads(f.type.to_json()) for f in deltalake.DeltaTable(folder).schema().fields
    }
    assert fields["items"]["type"] == "array"
    assert [part["name"] for part in fields["items"]["elementType"]["fields"]] == [
        "line",
        "price",
        "notes",
        "product",
    ]
    # A name that a struct can't have: the member stays text.
    assert fields["odd"] == "string"
    if unmarked:
        check(harness, folder, expected, document(0, item(1), customer={"name": ""}))
    # A column more in two members, in front of others; rows of before are left as they are.
    grown = replace(PRODUCT, members=(Column("size", "bigint"), *PRODUCT.members))
    parts = {
        "items": replace(
            ITEMS,
            members=(
                Column("taxed", "boolean"),
                *ITEMS.members[:-1],
                Column("product", "jsonb", shape=grown),
            ),
        ),
        "customer": Shape((Column("name", "text"), Column("city", "text")), True, False),
    }
    harness.table = replace(
        harness.table, columns=tuple(replace(c, shape=parts.get(c.name, c.shape)) for c in COLUMNS)
    )
    harness.sink = harness.writer()
    product = {"size": 9, "name": "big", "weight": 2.0}
    expected[2] = document(
        2, item(7, taxed=True, product=product), customer={"name": "Bob", "city": "Ulm"}
    )
    expected[4] = document(4, item(8, taxed=None))
    for number in (2, 4):
        harness.topic.add("u", as_row(expected[number]))
    harness.topic.add("d", as_row(expected.pop(3)))
    harness.apply(writer="two")
    model = document(0, item(1, taxed=True, product=product), customer={"name": "", "city": ""})
    if unmarked:
        check(harness, folder, expected, model)
    else:
        spark_rows = spark.read.format("delta").load(folder).collect()
        sizes = {
            row["id"]: [part["product"] and part["product"]["size"] for part in row["items"]]
            for row in spark_rows
        }
        assert sizes == {1: [None, None], 2: [9], 4: [None]}
    # A column less: what has it already keeps it, and another type asks for a rebuild.
    harness.table = replace(harness.table, columns=COLUMNS)
    harness.sink = harness.writer()
    changed = replace(ITEMS, members=(Column("line", "text"), *ITEMS.members[1:]))
    widened = replace(
        harness.table,
        columns=tuple(replace(c, shape=changed) if c.name == "items" else c for c in COLUMNS),
    )
    with pytest.raises(SchemaMismatch):
        Delta("warehouse", str(tmp_path), "p").prepare(widened)
