"""Which columns are refused by name, and what the way out is; pure, so that it can be asked before
anything is made.
"""

import re
from dataclasses import replace

import pytest
import yaml

from cdc.errors import SourceError
from cdc.model import column_names
from cdc.model.table import Column, Projection, Table
from cdc.sinks.elasticsearch.index import fields


def made_of(*columns: str, key: str = "id", **types: str) -> Table:
    shapes = (Column(name, types.get(name, "text")) for name in (key, *columns))
    return Table("public", "items", tuple(shapes), (key,), "t")


@pytest.mark.parametrize("name", ["_cdc_id", "_CDC", "_cdc"])
def test_our_own_names_are_refused_for_every_view(name: str) -> None:
    (why,) = column_names.refusals(made_of(name, "cdc", "x_cdc"))
    assert name in why


@pytest.mark.parametrize(
    "pair",
    [
        ("Name", "name"),
        ("GRÖSSE", "größe"),
        ("İd", "id"),
        ("\u212aelvin", "kelvin"),
        ("\u017f", "S"),
    ],
)
def test_names_that_differ_in_case_only_are_found(pair: tuple[str, str]) -> None:
    (why,) = column_names.case_collisions(["other", *pair])
    assert all(name in why for name in pair)
    assert column_names.case_collisions(["a", "b", "a_", "ab"]) == []


def test_one_error_names_all_columns_and_which_to_leave_out() -> None:
    table = made_of("fine", "_cdc_x", "bits", bits="bit varying")
    error = column_names.refusal_error(table, column_names.refusals)
    assert isinstance(error, SourceError)
    assert all(name in error.message for name in ("public.items", "_cdc_x", "bits"))
    match = re.search(r"\{.*\}", error.hint)
    assert match
    entry = {"table": "public.items", "exclude": ["_cdc_x", "bits"]}
    assert yaml.safe_load(match[0]) == entry


@pytest.mark.parametrize(
    "name",
    ['q"uo', "back\\slash", "null", "Yes", "no", "- a", "new\nline", "a, b]", "1", "é", ": #"],
)
def test_the_way_out_is_yaml_whatever_the_name(name: str) -> None:
    error = column_names.refusal_error(
        made_of(name),
        lambda table: [column.name for column in table.columns if column.name == name],
    )
    assert error
    assert yaml.safe_load(error.hint.removeprefix("write ").rsplit(" in the pipeline file", 1)[0])[
        "exclude"
    ] == [name]


def test_one_sink_can_give_columns_other_names() -> None:
    """Those of the key, too. The other sinks have the table as it is."""
    table = made_of("_id", "order date", "fine", key="_source")
    error = column_names.refusal_error(table, fields.refusals, "search")
    assert error
    assert error.message.startswith("public.items can't be held by search: column _id has the name")
    match = re.search(r"\{.*\}", error.hint)
    assert match
    assert "in sinks.search.tables" in error.hint
    entry = yaml.safe_load(match[0])
    assert entry == {"table": "public.items", "rename": {"_source": "NAME", "_id": "NAME"}}
    names = {"_id": "own_id", "_source": "origin"}
    renamed = replace(table, projections={"search": Projection(rename=names)}).for_sink("search")
    assert fields.refusals(renamed) == []
    assert renamed.key == ("_source",)


def test_a_key_has_another_way_out() -> None:
    error = column_names.refusal_error(made_of(key="_cdc_k"), column_names.refusals)
    assert error
    assert "exclude" not in error.hint
    assert "choose another key" in error.hint
    assert "ALTER TABLE public.items RENAME COLUMN" in error.hint


@pytest.mark.parametrize("name", ["order date", "a;b", ".".join("a" * 20)])
def test_an_index_holds_it(name: str) -> None:
    """Further names are in `tests/contract/test_names.py`."""
    assert fields.refusals(made_of(name)) == []


@pytest.mark.parametrize(
    "columns",
    [
        *([name] for name in ("_field_names", "trail.", " ", "a. .b", ".", ".".join("a" * 21))),
        ["x.y", "x.y.z"],
    ],
    ids=str,
)
def test_an_index_refuses_it_by_name(columns: list[str]) -> None:
    """Further names are in `tests/scenarios/test_names.py`."""
    (why,) = fields.refusals(made_of(*columns))
    assert columns[-1].strip() in why
