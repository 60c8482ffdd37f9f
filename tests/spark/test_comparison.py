"""Rows of views compared with their source, one by one: `cdc.verify.bucket_hashes` and
`cdc.verify.canonical`.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from cdc.model.table import Column, Derivation, Table
from cdc.sinks.memory import Memory
from cdc.verify import bucket_hashes

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DEEP = 1500
"""Lists within lists: Spark's parser takes 1,000, jsonb several thousand."""
LONG = 10_000_000


def make_table(*columns: tuple[str, str]) -> Table:
    listed = (Column("id", "bigint"), *(Column(name, type_) for name, type_ in columns))
    return Table("public", "items", listed, ("id",), "t.public.items")


def differing(
    spark: "SparkSession", table: Table, pairs: dict[str, tuple[str, str]]
) -> dict[str, tuple[str, str]]:
    """Return, by id, the kind and the column of each difference between the source's documents and
    a view's.
    """
    source, view = (
        spark.createDataFrame(
            [(key, pair[side]) for key, pair in pairs.items()], "id string, document string"
        )
        for side in (0, 1)
    )
    differences = bucket_hashes.compare_rows(table, source, view).collect()
    return {row["id"]: (row["kind"], row["column"]) for row in differences}


def nested(depth: int, inner: str = "") -> str:
    return f'{{"id":1,"v":{"[" * depth}{inner}{"]" * depth}}}'


def test_rows_of_closed_windows_are_left_out_and_counted(spark: "SparkSession") -> None:
    documents = {
        "open": '{"id":1,"final":false}',
        "closed": '{"id":2,"final":true}',
        "other": '{"id":3,"note":"true"}',
    }
    table = make_table(("final", "boolean"))
    sink = Memory("cache")
    sink.views[table.qualified] = documents
    for closes, listed, count in ((False, set(documents), 0), (True, {"open", "other"}, 1)):
        view = replace(table, derivation=Derivation("SELECT 1", (), ("cache",), closes=closes))
        rows = bucket_hashes.scan(sink, view, spark).collect()
        assert {row["id"] for row in rows} == listed
        assert bucket_hashes.count_closed(sink, view, spark) == count


@pytest.mark.parametrize("type_", ["jsonb", "double precision"])
def test_deep_documents(spark: "SparkSession", type_: str) -> None:
    """With columns whose text is compared as it is, and with others."""
    pairs = {
        "same": (nested(DEEP), nested(DEEP)),
        "other": (nested(DEEP), nested(DEEP, "1")),
        "shallow": (nested(DEEP), nested(1)),
        "ghost": (nested(1), nested(DEEP)),
        "no document": (nested(DEEP), "nonsense"),
        "empty": (nested(DEEP), "{}"),
    }
    differences = differing(spark, make_table(("v", "jsonb"), ("n", type_)), pairs)
    assert {key: kind for key, (kind, _) in differences.items()} == dict.fromkeys(
        [*pairs][1:], "different"
    )


def test_long_documents(spark: "SparkSession") -> None:
    """Ten megabytes of what has to be escaped: one changed character is seen."""
    long = '\\"\\u00e9' * (LONG // 8)
    pairs = {
        "same": (f'{{"id":1,"v":"{long}"}}', f'{{"v":"{long}","id":1}}'),
        "other": (f'{{"id":1,"v":"{long}"}}', f'{{"id":1,"v":"{long[:-1]}8"}}'),
    }
    assert differing(spark, make_table(("v", "text")), pairs) == {"other": ("different", "v")}


def test_json_is_compared_as_an_index_can_have_it(spark: "SparkSession") -> None:
    """Of a key twice the last value counts, and nothing else does; a number that no index takes
    equals the string of its text.
    """
    number = "-1" + "0" * 999 + ".5"
    short = "1" * 900

    def document(value: str) -> str:
        return f'{{"id":1,"v":{value}}}'

    values = {
        "the last": ('{"a":1,"b":3,"a":2}', '{"b":3,"a":2}'),
        "the last within": ('[{"a":{"b":1},"a":{"c":1}}]', '[{"a":{"c":1}}]'),
        "long": (f'{{"n":{number}}}', f'{{"n":"{number}"}}'),
        "long, by itself": (number, f'"{number}"'),
        "the first": ('{"a":1,"a":2}', '{"a":1}'),
        "another last": ('{"a":1,"a":2}', '{"a":1,"a":3}'),
        "another number": (f'{{"n":{number}}}', f'{{"n":"{number}1"}}'),
        "short": (f'{{"n":{short}}}', f'{{"n":"{short}"}}'),
        "its key": (f'{{"{number}":1}}', f'{{"{short}":1}}'),
    }
    pairs = {key: (document(source), document(view)) for key, (source, view) in values.items()}
    for type_ in ("json", "double precision"):
        differences = differing(spark, make_table(("v", "json"), ("n", type_)), pairs)
        assert set(differences) == set(list(pairs)[4:])
