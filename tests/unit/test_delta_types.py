"""Which tables a warehouse can't hold, reported before it is asked to."""

import pytest

from cdc.model.table import Column, Table
from cdc.sinks.delta.columns import refusals


def made_of(*names: str) -> Table:
    return Table(
        "public", "items", tuple(Column(name, "text") for name in ("id", *names)), ("id",), "t"
    )


@pytest.mark.parametrize(
    "name",
    [
        "dotted.name",
        'quote"d',
        "back`tick",
        "select",
        "x" * 63,
        "größe",
        "日付",
        "a-b",
        "a/b",
        "100%",
        "ID2",
        "cdc",
    ],
)
def test_a_name_that_is_carried(name: str) -> None:
    assert refusals(made_of(name)) == []


@pytest.mark.parametrize("character", [" ", ",", ";", "{", "}", "(", ")", "\n", "\t", "="])
def test_a_character_that_no_column_can_have(character: str) -> None:
    (reason,) = refusals(made_of(f"order{character}date", "plain"))
    assert repr(f"order{character}date") in reason
    assert repr(character) in reason


def test_the_name_that_spark_needs_itself() -> None:
    (reason,) = refusals(made_of("_Metadata", "metadata"))
    assert "_Metadata" in reason
