"""Names of columns that a sink doesn't refuse are carried on every way that it has: made, merged,
completed rows, and rows of another generation.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cdc.model.table import Column, Table
from cdc.sinks.delta.sink import Delta
from tests.contract import laws
from tests.contract.test_contract import SINKS, maker
from tests.scenarios.test_names import CARRIED
from tests.support.warehouse import logged_events

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAMES = (*CARRIED, "p.q", ".lead", "trail.", "p..q", ".", "``", "`x`", "x.*")
"""The latter aren't all for an index."""


def table(unique: str, names: Sequence[str]) -> Table:
    columns = (
        Column("a", "text"),
        Column("b", "bigint"),
        *(Column(name, "text") for name in names),
    )
    return Table("public", "items", columns, ("a", "b"), f"{unique}.public.items")


@pytest.fixture(autouse=True)
def read_by_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    """As large mirrors are: Spark's source reads fewer names than `deltalake`, which reads small ones."""
    monkeypatch.setattr("cdc.sinks.delta.scan.SMALL_BYTES", 0)


@pytest.fixture(params=[*SINKS, "delta, unmarked"])
def harness(
    request: pytest.FixtureRequest, spark: "SparkSession", unique: str, tmp_path: Path
) -> Iterator[laws.Harness]:
    make = maker(request, request.param, unique, tmp_path)
    names = [name for name in NAMES if not make().refusals(table(unique, [name]))]
    assert names[: len(CARRIED)] == list(CARRIED)
    harness = laws.Harness(spark, make, table(unique, names))
    yield harness
    harness.sink.close()


def carry(harness: laws.Harness) -> None:
    names = [column.name for column in harness.table.columns][2:]
    for number in range(4):
        harness.topic.add(
            "c", {"a": f"k{number}", "b": number, **{name: f"{name} {number}" for name in names}}
        )
    harness.apply()
    harness.topic.add("u", {"a": "k1", "b": 1, **dict.fromkeys(names, "other")})
    harness.topic.add("d", {"a": "k2", "b": 2, **dict.fromkeys(names)})
    harness.topic.add("u", {"a": "k3", "b": 3, **dict.fromkeys(names, "new")}, lacking=names[::2])
    harness.apply()
    # As comparisons read it: some names can be written, and not read by Spark.
    assert harness.scanned() == harness.topic.model()
    generation, build = harness.begin_generation()
    harness.apply(writer="rebuild", sink=build)
    harness.sink.promote([harness.table], generation)
    assert harness.scanned() == harness.topic.model()
    if isinstance(harness.sink, Delta):
        places = sorted(logged_events(harness.sink.folder(harness.table, "changes")))
        assert places == sorted((r.partition, r.offset) for r in harness.topic.records if r.value)


def test_names_are_carried(harness: laws.Harness) -> None:
    carry(harness)


@pytest.mark.parametrize(
    ("kind", "names"),
    [("elasticsearch", ["_id"]), ("elasticsearch", ["o", "o.p"]), ("delta", ["_metadata"])],
)
def test_a_sink_that_refused_less_would_be_found(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    spark: "SparkSession",
    unique: str,
    tmp_path: Path,
    kind: str,
    names: list[str],
) -> None:
    """What is refused can't be held: a sink that let it pass would stop later, and all tables with it."""
    make, unheld = maker(request, kind, unique, tmp_path), table(unique, names)
    assert make().refusals(unheld)
    monkeypatch.setattr("cdc.sinks.delta.sink.Delta.refusals", lambda *_: [])
    with pytest.raises(
        Exception, match=r"refuses|can.t make the index|Spark failed|cannot be cast"
    ):
        carry(laws.Harness(spark, make, unheld))
