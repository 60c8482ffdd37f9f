"""What an index is made with: by the columns' types, by the pipeline file, and when it was made by something else."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from cdc.model.generation import new_generation
from cdc.model.table import Column, IndexOptions, Table, row_id
from cdc.sink.contract import RowsRejected, SchemaMismatch
from cdc.sinks.elasticsearch.sink import Elasticsearch
from tests.contract.laws import Harness

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.conftest import Stack

REBUILD = "cdc -p FILE rebuild search --table public.items"
COLUMNS = {
    "id": "bigint",
    "price": "numeric(10,2)",
    "name": "text",
    "made": "timestamp with time zone",
    "attrs": "jsonb",
    "a.b": "smallint",
}


def items(
    names: str,
    *,
    fields: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    name: str = "items",
) -> Table:
    columns = tuple(Column(name, COLUMNS.get(name, "numeric(10,2)")) for name in names.split())
    return Table(
        "public", name, columns, ("id",), "t", index=IndexOptions(fields or {}, settings or {})
    )


@pytest.fixture
def sink(stack: "Stack", unique: str) -> Iterator[Elasticsearch]:
    sink = Elasticsearch("search", stack.endpoints.elasticsearch, unique)
    yield sink
    sink.close()


@pytest.fixture
def server(stack: "Stack") -> Iterator[httpx.Client]:
    with httpx.Client(base_url=stack.endpoints.elasticsearch, timeout=60) as client:
        yield client


def rebuilt(sink: Elasticsearch, table: Table) -> None:
    """Rebuild a view without rows, as `cdc rebuild` does."""
    names = {table.qualified: new_generation()}
    sink.for_generation(names).prepare(table)
    sink.promote([table], names)
    sink.prepare(table)


def indexed(
    server: httpx.Client, sink: Elasticsearch, table: Table, *documents: Mapping[str, Any]
) -> None:
    for number, document in enumerate(documents):
        path = f"/{sink.alias(table)}/_doc/{number}"
        server.put(path, json=document, params={"refresh": "true"}).raise_for_status()


def hits(
    server: httpx.Client, sink: Elasticsearch, table: Table, query: Mapping[str, Any]
) -> list[int]:
    answer = (
        server.post(f"/{sink.alias(table)}/_search", json={"query": query})
        .raise_for_status()
        .json()
    )
    return sorted(int(hit["_id"]) for hit in answer["hits"]["hits"])


def settings_of(server: httpx.Client, sink: Elasticsearch, table: Table) -> dict[str, Any]:
    (body,) = server.get(f"/{sink.alias(table)}/_settings").raise_for_status().json().values()
    settings: dict[str, Any] = body["settings"]["index"]
    return settings


def layout_of(server: httpx.Client, sink: Elasticsearch, table: Table) -> Any:
    """The mapping and settings of the live index, as the server has them."""
    (body,) = server.get(f"/{sink.alias(table)}").raise_for_status().json().values()
    return body["mappings"], body["settings"]


def assert_no_probe(server: httpx.Client, pipeline: str) -> None:
    listed = server.get(f"/{pipeline}-*/_alias").raise_for_status().json()
    assert not [index for index in listed if ".probe." in index]


def test_an_index_whose_note_a_user_has_removed(server: httpx.Client, sink: Elasticsearch) -> None:
    """It stays in use, and gets its note again; a field that differs is refused by the server."""
    table = items("id name")
    sink.prepare(table)
    server.put(f"/{sink.alias(table)}/_mapping", json={"_meta": {"team": "x"}}).raise_for_status()
    changed = replace(table, columns=(table.columns[0], Column("name", "integer")))
    with pytest.raises(SchemaMismatch, match="name"):
        sink.prepare(changed)
    sink.prepare(table)
    with pytest.raises(SchemaMismatch, match="other fields"):
        sink.prepare(changed)


def test_a_column_that_was_text_and_is_a_number(server: httpx.Client, sink: Elasticsearch) -> None:
    priced = items("id price")
    sink.prepare(replace(priced, columns=(priced.columns[0], Column("price", "public.price"))))
    with pytest.raises(SchemaMismatch, match="price") as caught:
        sink.prepare(priced)
    assert "letter by letter" in caught.value.message
    assert caught.value.hint == REBUILD
    rebuilt(sink, priced)
    indexed(
        server,
        sink,
        priced,
        {"price": "9.50"},
        {"price": "12.00"},
        {"price": "100.98"},
        {"price": "NaN"},
    )
    assert hits(server, sink, priced, {"range": {"price": {"gte": 10, "lte": 20}}}) == [1]
    assert hits(server, sink, priced, {"term": {"price.exact": "NaN"}}) == [3]


OF_THE_FILE = {
    "analysis.analyzer.de.tokenizer": "standard",
    "analysis.analyzer.de.filter": ["lowercase"],
}
OTHER_LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "an analyzer": ({}, {"fields": {"name": {"analyzer": "simple"}}}, "fields.*: name"),
    "an analyzer of the file's own": (
        {},
        {"fields": {"name": {"analyzer": "de"}}, "settings": OF_THE_FILE},
        "fields.*: name",
    ),
    "one more sub-field": ({}, {"fields": {"name": {"fields": {"raw": {"type": "keyword"}}}}}, "fields.*: name"),
    "a sub-field less": ({"fields": {"name": {"fields": {"raw": {"type": "keyword"}}}}}, {}, "fields.*: name"),
    "another type": ({}, {"fields": {"price": {"type": "long"}}}, "fields.*: price"),
    "shards": ({}, {"settings": {"number_of_shards": 2}}, "settings.*: number_of_shards"),
    "an analyzer that is changed": (
        {"settings": OF_THE_FILE},
        {"settings": OF_THE_FILE | {"analysis.analyzer.de.filter": ["lowercase", "stop"]}},
        "settings.*: analysis.analyzer.de.filter",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_LAYOUTS)
def test_what_an_open_index_can_not_take_waits_for_a_rebuild(
    server: httpx.Client, sink: Elasticsearch, name: str
) -> None:
    """Also what the server takes without a word, for none of its documents would be found by it.

    The index goes on as it was made, so that readers get current rows until it is replaced; so does a
    standby, for a rollback.
    """
    first_layout, second_layout, message = OTHER_LAYOUTS[name]
    first = items("id price name", **first_layout)
    sink.prepare(first)
    made = layout_of(server, sink, first)
    assert sink.rehearse(first) == []
    # What an open index could take isn't taken alone.
    second_layout = {
        **second_layout,
        "settings": {**second_layout.get("settings", {}), "refresh_interval": "7s"},
    }
    table = items("id price name", **second_layout)
    sink.prepare(table)
    assert layout_of(server, sink, first) == made
    with pytest.raises(SchemaMismatch, match=message) as caught:
        sink.rehearse(table)
    assert (caught.value.hint, caught.value.waits) == (REBUILD, False)
    if message.startswith("fields"):
        with pytest.raises(SchemaMismatch, match=message):
            sink.require_fit(table)
    # A column that comes meanwhile is found, in the way of then.
    grown = items("id price name a.b", **second_layout)
    sink.prepare(grown)
    indexed(server, sink, grown, {"a.b": 7})
    assert hits(server, sink, grown, {"term": {"a.b": 7}}) == [0]
    rebuilt(sink, grown)
    assert sink.rehearse(grown) == []
    (former,) = sink.generations(grown)[1:]
    sink.for_generation({grown.qualified: former}).prepare(grown)
    assert layout_of(server, sink, first) != made


def test_a_build_of_another_layout_begins_again(sink: Elasticsearch) -> None:
    """It would show readers what the file asked for when it began. A column of another type waits all the same."""
    build = sink.for_generation({"public.items": new_generation()})
    build.prepare(items("id name"))
    changed = items("id name", fields={"name": {"analyzer": "simple"}})
    build.prepare(changed)
    with pytest.raises(SchemaMismatch, match="name"):
        build.rehearse(changed)
    build.clear(changed)
    build.prepare(changed)
    assert build.rehearse(changed) == []
    retyped = replace(changed, columns=(changed.columns[0], Column("name", "integer")))
    with pytest.raises(SchemaMismatch, match="name") as caught:
        build.prepare(retyped)
    assert caught.value.waits


def test_what_an_open_index_takes_is_told_before(
    server: httpx.Client, sink: Elasticsearch, unique: str
) -> None:
    sink.prepare(items("id name"))
    table = items(
        "id name price", fields={"price": {"type": "long"}}, settings={"refresh_interval": "7s"}
    )
    assert sink.rehearse(table) == ["field price", "setting refresh_interval"]
    assert "refresh_interval" not in settings_of(server, sink, table)
    assert_no_probe(server, unique)
    sink.prepare(table)
    assert sink.rehearse(table) == []
    fields = {"price": {"type": "long"}, "made": {"type": "nothing"}}
    wrong = items("id name price made", fields=fields)
    for ask in (sink.rehearse, sink.prepare):
        with pytest.raises(SchemaMismatch, match=r"column made: .*nothing"):
            ask(wrong)
    often = items("id name", settings={"refresh_interval": "often"})
    with pytest.raises(SchemaMismatch, match="often"):
        sink.rehearse(often)
    sink.prepare(often)
    # Nothing of it, rather than half.
    assert settings_of(server, sink, table)["refresh_interval"] == "7s"


def test_what_a_killed_process_has_left_is_removed(
    server: httpx.Client, sink: Elasticsearch
) -> None:
    """Nobody takes a probe for a generation."""
    table = items("id name")
    sink.prepare(table)
    probe = sink._indices.probe(table)
    server.put(f"/{probe}").raise_for_status()
    assert len(sink.generations(table)) == 1
    assert f"index {probe}" in sink.remains([table])
    sink.remove([table])
    assert sink.remains([table]) == []


def test_planted_changes_that_nobody_compares(
    server: httpx.Client, sink: Elasticsearch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server takes one more sub-field, and finds no older document by it."""
    monkeypatch.setattr("cdc.sinks.elasticsearch.sink.require_same_fields", lambda *_: None)
    sink.prepare(items("id name"))
    indexed(server, sink, items("id name"), {"name": "a"})
    table = items("id name", fields={"name": {"fields": {"raw": {"type": "keyword"}}}})
    sink.prepare(table)
    assert hits(server, sink, table, {"term": {"name.keyword": "a"}}) == [0]
    assert hits(server, sink, table, {"term": {"name.raw": "a"}}) == []


def test_more_fields_than_an_index_takes(sink: Elasticsearch) -> None:
    """A decimal is two of them. The hint is what helps, and one field less would not."""
    names = " ".join(f"n{number}" for number in range(1000))
    needed = limit_asked_for(sink, items(f"id name a.b.c {names}"))
    with pytest.raises(SchemaMismatch, match="total fields"):
        sink.prepare(items(f"id name a.b.c {names}", settings={LIMIT: needed - 1}))
    sink.prepare(items(f"id name a.b.c {names}", settings={LIMIT: needed}))
    # Columns that come later, beside those that were dropped.
    settings = {LIMIT: needed}
    more = limit_asked_for(sink, items("id a.b.d more", settings=settings))
    with pytest.raises(SchemaMismatch, match="total fields"):
        sink.prepare(items("id a.b.d more", settings={LIMIT: more - 1}))
    sink.prepare(items("id a.b.d more", settings={LIMIT: more}))


LIMIT = "mapping.total_fields.limit"


def limit_asked_for(sink: Elasticsearch, table: Table) -> int:
    """Return the limit that the refusal of a table names, in its message and in its hint."""
    with pytest.raises(SchemaMismatch, match="total fields") as caught:
        sink.prepare(table)
    (limit,) = re.findall(rf"\{{settings: \{{{re.escape(LIMIT)}: (\d+)}}}}", caught.value.hint)
    assert f"it needs {int(limit):,}" in caught.value.message
    return int(limit)


def test_settings_are_those_of_the_file(server: httpx.Client, sink: Elasticsearch) -> None:
    """Some change while the index is read, and go back; a new generation has them when it is shown."""
    plain = items("id name")
    replicated = items("id name", settings={"number_of_replicas": 2, "refresh_interval": "7s"})
    wide = items("id name", settings={"number_of_replicas": 1, "number_of_shards": 2})
    sink.prepare(plain)
    for _ in range(2):
        sink.prepare(replicated)
        settings = settings_of(server, sink, replicated)
        assert (settings["number_of_replicas"], settings["refresh_interval"]) == ("2", "7s")
        assert settings["auto_expand_replicas"] == "false"
        sink.prepare(plain)
        settings = settings_of(server, sink, plain)
        assert settings["auto_expand_replicas"] == "0-1"
        assert "refresh_interval" not in settings
    rebuilt(sink, wide)
    settings = settings_of(server, sink, wide)
    assert (settings["number_of_replicas"], settings["number_of_shards"]) == ("1", "2")
    rebuilt(sink, plain)
    settings = settings_of(server, sink, plain)
    assert (settings["auto_expand_replicas"], settings["number_of_shards"]) == ("0-1", "1")
    assert "refresh_interval" not in settings


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a type of a module that isn't there": ({"fields": {"price": {"type": "wildcard"}}}, "column price: .*wildcard"),
    "an analyzer that isn't there": ({"fields": {"name": {"analyzer": "germann"}}}, "column name: .*germann"),
    "a parameter": ({"fields": {"price": {"analyser": "simple"}}}, "column price: .*analyser"),
    "a sub-field's type": ({"fields": {"name": {"fields": {"raw": {"type": "kewyord"}}}}}, "column name: .*kewyord"),
    "a setting": ({"settings": {"number_of_shard": 2}}, "number_of_shard"),
    "a filter": ({"settings": OF_THE_FILE | {"analysis.analyzer.de.filter": ["folded"]}}, "folded"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_server_does_not_know_is_refused_by_name(
    server: httpx.Client, sink: Elasticsearch, unique: str, name: str
) -> None:
    """That table alone waits: others can be made, and it can be made once it is put right."""
    layout, message = REFUSED[name]
    wrong = items("id price name", **layout)
    for ask in (sink.rehearse, sink.prepare):
        with pytest.raises(SchemaMismatch, match=message) as caught:
            ask(wrong)
        assert "public.items" in caught.value.message
        assert "pipeline file" in caught.value.hint
    assert_no_probe(server, unique)
    with pytest.raises(SchemaMismatch, match=message):
        sink.for_generation({wrong.qualified: new_generation()}).prepare(wrong)
    sink.prepare(items("id price name", name="others"))
    sink.prepare(items("id price name"))


def test_columns_come_and_go(server: httpx.Client, sink: Elasticsearch) -> None:
    """A new one gets its field; what a dropped one was is remembered."""
    sink.prepare(items("id name"))
    table = items("id name price")
    sink.prepare(table)
    indexed(server, sink, table, {"price": "9.50"}, {"price": "12.00"})
    assert hits(server, sink, table, {"range": {"price": {"gt": 9.6}}}) == [1]
    sink.prepare(items("id name"))
    sink.prepare(table)
    with pytest.raises(SchemaMismatch, match=r"column weight: .*nothing"):
        sink.prepare(items("id name weight", fields={"weight": {"type": "nothing"}}))
    with pytest.raises(SchemaMismatch, match=r"fields.*: price"):
        sink.rehearse(items("id price", fields={"price": {"type": "keyword"}}))


def test_paths_of_json_are_searched_where_the_file_says_so(
    spark: "SparkSession", sink: Elasticsearch
) -> None:
    """All of a document is found by its path, as text; a value that isn't one of members is refused by its field."""
    table = items("id attrs", fields={"attrs": {"type": "flattened"}})
    harness = Harness(spark, lambda: sink, table)
    values = [
        {"address": {"city": "Köln"}, "tags": ["red", "blue"], "": 0},
        [{"size": 41}, {"size": 42}],
        {"long": "x" * 40_000},
        None,
    ]
    for number, value in enumerate(values):
        harness.topic.add(
            "c", {"id": number, "attrs": None if value is None else json.dumps(value)}
        )
    harness.apply()
    assert [harness.view()[row_id([number])]["attrs"] for number in range(len(values))] == values
    sink.refresh(table)
    with httpx.Client(base_url=sink.url) as server:
        assert hits(server, sink, table, {"term": {"attrs.address.city": "Köln"}}) == [0]
        assert hits(server, sink, table, {"terms": {"attrs.size": [42]}}) == [1]
        assert hits(server, sink, table, {"term": {"attrs.tags": "blue"}}) == [0]
    harness.topic.add("c", {"id": 9, "attrs": '"a text"'})
    with pytest.raises(RowsRejected, match="field attrs") as caught:
        harness.apply()
    assert "a text" not in caught.value.message


def test_a_field_that_can_not_hold_a_value(spark: "SparkSession", sink: Elasticsearch) -> None:
    """Its row is named, and the others are there; nothing is dropped in silence, unless the file says so."""
    table = items("id name", fields={"name": {"type": "integer"}})
    harness = Harness(spark, lambda: sink, table)
    harness.topic.add("c", {"id": 1, "name": "12"})
    harness.apply()
    assert harness.view()[row_id([1])]["name"] == "12"
    harness.topic.add("c", {"id": 2, "name": "twelve"})
    with pytest.raises(RowsRejected, match="field name") as caught:
        harness.apply()
    assert "twelve" not in caught.value.message
