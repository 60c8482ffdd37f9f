"""What the pipeline file may ask of an index, and what an index is by default, without a server."""

from dataclasses import replace
from pathlib import Path

import pytest

from cdc.config import settings
from cdc.config.source_settings import IndexSettings
from cdc.errors import SettingsError
from cdc.model import column_names
from cdc.model.table import Column, IndexOptions, Table
from cdc.sinks.elasticsearch.index.fields import field, merge_field

FILE = """\
pipeline: shop
kafka: localhost:9092
connect: http://localhost:8083
source:
  dsn: postgresql://localhost/shop
  tables:
  - table: public.items
    index: {index}
sinks:
  search: {{type: elasticsearch, url: "http://localhost:9200"}}
"""


def load(tmp_path: Path, index: str) -> IndexSettings:
    path = tmp_path / "shop.yaml"
    path.write_text(FILE.format(index=index))
    return settings.load(path, {}).source.tables[0].index


@pytest.mark.parametrize(
    "text",
    [
        "{number_of_shards: 3, analysis: {analyzer: {de: {type: german}}}}",
        "{index: {number_of_shards: 3, analysis: {analyzer: {de: {type: german}}}}}",
        "{index.number_of_shards: 3, index.analysis.analyzer.de.type: german}",
    ],
)
def test_settings_are_the_same_however_they_are_nested(tmp_path: Path, text: str) -> None:
    result = load(tmp_path, f"{{settings: {text}}}")
    assert result.settings == {"number_of_shards": 3, "analysis.analyzer.de.type": "german"}
    assert load(tmp_path, f"{{settings: {result.settings}}}") == result


def test_an_analysis_is_a_setting_of_its_own(tmp_path: Path) -> None:
    """Its parts may have any name, such as `index` for the analyzer with which documents are stored."""
    text = "{analyzer: {index: {type: custom, tokenizer: standard, filter: [lowercase]}}}"
    expected = {
        "analysis.analyzer.index.type": "custom",
        "analysis.analyzer.index.tokenizer": "standard",
        "analysis.analyzer.index.filter": ["lowercase"],
    }
    assert load(tmp_path, f"{{analysis: {text}}}").options.settings == expected
    assert load(tmp_path, f"{{settings: {{analysis: {text}}}}}").options.settings == expected
    both = load(tmp_path, f"{{analysis: {text}, settings: {{number_of_shards: 2}}}}")
    assert both.options.settings == {"number_of_shards": 2, **expected}


def test_fields_are_as_json_has_them(tmp_path: Path) -> None:
    text = "{fields: {made: {null_value: 2013-01-02}, name: {fields: {raw: {type: keyword}}}}}"
    result = load(tmp_path, text)
    assert result.fields == {
        "made": {"null_value": "2013-01-02"},
        "name": {"fields": {"raw": {"type": "keyword"}}},
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{field: {}}", "did you mean fields"),
        ("{fields: [price]}", "settings are needed"),
        ("{fields: {price: double}}", "index.fields.price"),
        ("{fields: {name: {fields: raw}}}", "sub-fields of name are settings by name"),
        ("{settings: {gc_deletes: 1s}}", "gc_deletes can't be set"),
        ("{settings: {index: {mapping: {source: {mode: synthetic}}}}}", "mapping.source.mode can't be set"),
        ("{settings: {translog.durability: async}}", "translog.durability can't be set"),
        ("{settings: {number_of_shards: three}}", "number_of_shards is a whole number"),
        ("{settings: {index.blocks.write: true}}", "blocks.write can't be set"),
        ("{settings: {mode: logsdb}}", "mode can't be set"),
        ("{fields: {_source: {enabled: false}}}", "_source can't be set"),
        ("{fields: {dynamic: true}}", "index.fields.dynamic"),
        ("{fields: {a: {type: object, properties: {b: {dynamic: strict}}}}}", "of a can't be strict"),
        ("{fields: {name: {type: alias, path: id}}}", "name can't be alias"),
        ("{analysis: {filter: {a: {type: stop}}}, settings: {analysis.filter.b.type: stop}}", "two places"),
    ],
)  # fmt: skip
def test_what_an_index_can_not_be_asked(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load(tmp_path, text)
    assert message in f"{caught.value.message} {caught.value.hint}"
    assert "shop.yaml:8" in caught.value.message


def test_a_column_that_is_not_there() -> None:
    columns = (Column("id", "bigint"), Column("price", "numeric(10,2)"))
    options = IndexOptions({"price": {"type": "double"}})
    table = Table("public", "items", columns, ("id",), "t", index=options)
    column_names.require_indexed([table])
    wrong = replace(table, index=IndexOptions({"prize": {"type": "double"}}))
    with pytest.raises(SettingsError, match=r"public\.items names prize") as caught:
        column_names.require_indexed([table, wrong])
    assert caught.value.hint == "did you mean price?"


DOUBLES = ["numeric", "numeric(10,2)", "numeric(10,2)[]", "numeric(2,4)", "numeric(19,0)"]
DOUBLES += ["numeric(16,-3)", "money", "xid8"]


@pytest.mark.parametrize(
    ("type_", "field_type"),
    [
        *((type_, "double") for type_ in DOUBLES),
        *((type_, "long") for type_ in ("numeric(18,0)", "numeric(16,-2)", "bigint", "oid")),
        ("hstore", "flattened"),
        ("jsonb", "object"),
        ("timestamp(3) with time zone", "date"),
    ],
)
def test_fields_of_types(type_: str, field_type: str) -> None:
    assert field(type_)["type"] == field_type
    if type_.startswith(("numeric", "money", "xid8")):
        assert field(type_)["ignore_malformed"] is True
        assert field(type_)["fields"]["exact"]["type"] == "keyword"


def test_a_field_is_added_to_or_given_a_type() -> None:
    text, keyword = field("text"), field("text")["fields"]["keyword"]
    assert merge_field(text, {}) == text
    assert merge_field(text, {"analyzer": "simple"}) == {**text, "analyzer": "simple"}
    raw = {"type": "keyword"}
    assert merge_field(text, {"fields": {"raw": raw}})["fields"] == {"keyword": keyword, "raw": raw}
    assert merge_field(text, {"type": "keyword"}) == {"type": "keyword"}
    flattened = {"type": "flattened"}
    assert merge_field(field("jsonb"), flattened) == field("hstore")
    assert merge_field(field("jsonb"), {**flattened, "ignore_above": 9})["ignore_above"] == 9
