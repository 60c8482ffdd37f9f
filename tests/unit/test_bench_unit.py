"""What the bench makes of its measurements: no number without equality, hops, percentiles, the
table, the plots.
"""

import json
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import cases, latency, paths
from bench.__main__ import SCALES, Part, parts, places
from bench.batches import Batch, spans
from bench.output import plots, report
from bench.output.cost import Cost
from bench.output.figure import Figure
from bench.rivals import plain
from cdc.errors import DivergenceError
from cdc.model.position import Position


def stage(*, equal: bool) -> Any:
    meter = SimpleNamespace(cost=Cost(seconds=5.0))
    stream = SimpleNamespace(began=1.0, batches=lambda: [batch(2.0, 3.0, 100)])
    context = SimpleNamespace(sinks=lambda _: [])
    return SimpleNamespace(
        meter=lambda: nullcontext(meter),
        apply=lambda _: stream,
        equal=lambda *_: equal,
        context=context,
    )


def batch(began: float, durable: float, end: int) -> Batch:
    return Batch(began, durable, 10, {"t": (end, 0)})


def test_no_number_without_equality() -> None:
    good, bad = (Figure("apply", "records/s", 1.0, "rival", changes=100) for _ in range(2))
    cases.measure_ours(stage(equal=True), object(), good)  # type: ignore[arg-type]
    assert good.ours == [50.0]
    with pytest.raises(DivergenceError):
        cases.measure_ours(stage(equal=False), object(), bad)  # type: ignore[arg-type]
    assert bad.ours == []
    paths.equal(stage(equal=True), "whole path")
    with pytest.raises(DivergenceError):
        paths.equal(stage(equal=False), "whole path")


def test_cpu_allows_what_its_cores_can_pay_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    figure = Figure("drain", "changes/s", 0.8, changes=1000)
    paths.book(figure, 10.0, Cost(cpu_s={"spark": 12.0, "postgres": 4.0}))
    assert figure.limit == [125.0]
    assert report.summary(figure)["ratio"] == 0.8
    assert report.summary(figure)["cpu_s_per_million"] == {"postgres": 4000.0, "spark": 12000.0}


def test_hops_are_those_of_the_batch_that_holds_the_record() -> None:
    committed = datetime(2026, 1, 1, tzinfo=UTC)
    start = committed.timestamp()
    first, second = ("1", committed), ("2", committed + timedelta(seconds=1))
    arrived = {first: (0, 9, start + 0.25), second: (0, 10, start + 1.25)}
    batches = [batch(start + 0.5, start + 1, 10), batch(start + 2, start + 3, 11)]
    hops = latency.times({first: committed, second: second[1]}, arrived, batches, "t")
    assert hops == {"Kafka": [0.25, 0.25], "begun": [0.5, 1.0], "durable": [1.0, 2.0]}
    assert batches[0].past({"t": Position("x", (10, 0))})
    assert not batches[0].past({"t": Position("x", (11, 0))})
    assert spans(batches, start + 1, 0.25) == [(1.0, 2.0, 10.0)]
    assert len(spans(batches, start + 1, 0.5)) == 2


def test_percentiles() -> None:
    percentiles = report.percentiles([float(value) for value in range(100, 0, -1)])
    assert percentiles == {"p50": 51.0, "p95": 96.0, "p99": 100.0, "max": 100.0}


def figures() -> list[Figure]:
    hops = {"Kafka": [0.1, 0.2], "durable": [0.3, 0.5], "visible": [0.4, 12.0]}
    return [
        Figure(
            "W1 mixed",
            "changes/s",
            0.8,
            ours=[1000.0],
            limit=[2000.0],
            over_time={"cache": [(0.0, 1.0, 5.0)]},
        ),
        Figure("W7 cache", "µs/change", 1.1, at_most=True, ours=[5.5], limit=[5.5], part="growth"),
        Figure("cache at 20/s (10%)", "s", hops=hops, unseen=3, asked=(0.2, 0.5)),
    ]


def test_the_table() -> None:
    rates, late = report.tables(figures()).split("\n\n")
    head, rule, mixed, growth = rates.splitlines()
    assert len({len(line) for line in (head, rule, mixed, growth)}) == 1
    assert mixed.replace(" ", "") == "|W1mixed,changes/s|2,000||1,000|0.50oflimit|>=0.8oflimit|no||"
    assert (
        growth.replace(" ", "")
        == "|W7cache,µs/change|5.50||5.50|1.00oflimit|<=1.1oflimit|yes|growth|"
    )
    cells = late.splitlines()[-1].replace(" ", "")
    assert cells == "|cacheat20/s(10%)(3unseen)|12|12|12|12|0.20,0.50|no|0.20|0.50||"


@pytest.mark.parametrize(
    ("goals", "answer"),
    [
        ({"goal": 1.0, "rate": 100.0}, "yes"),
        ({"goal": 1.0, "rate": 101.0}, "no"),
        ({"goal": 1.3}, "no"),
        ({"goal": 1.3, "at_most": True}, "yes"),
        ({"rate": 99.0, "at_most": True}, "no"),
        ({"goal": 1.0, "against": "limit"}, "no"),
        ({}, ""),
    ],
)
def test_all_that_is_asked_is_met(goals: dict[str, Any], answer: str) -> None:
    """A ratio to what wasn't measured isn't reached either."""
    assert (
        report.verdict(
            Figure("W4", "rows/s", **{"against": "rival", **goals}, ours=[100.0], rival=[90.0])
        )
        == answer
    )


def test_latency_is_met_by_both_percentiles() -> None:
    hops = {"visible": [0.1] * 98 + [0.4] * 2}
    answers = [
        report.verdict(Figure("cache", "s", hops=hops, asked=aim))
        for aim in ((0.1, 0.4), (0.1, 0.3), (0.05, 0.5), ())
    ]
    assert answers == ["yes", "no", "no", ""]


def test_both_ratios_are_shown() -> None:
    figure = Figure(
        "W1",
        "changes/s",
        1.0,
        "rival",
        rate=50.0,
        ours=[80.0],
        limit=[100.0],
        rival=[40.0],
        part="mixed",
    )
    line = report.tables([figure]).splitlines()[-1]
    assert [cell.strip() for cell in line.split("|")[5:-1]] == [
        "0.80 of limit, 2.00 of rival",
        ">= 1 of rival, >= 50",
        "yes",
        "mixed",
    ]


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_a_place_is_made_once(scale: Any) -> None:
    chosen = parts(scale)
    assert len({part.name for part in chosen}) == len(chosen)
    runs = [place for place, _ in groupby(part.place for part in chosen) if place != Part.place]
    assert sorted([Part.place, *runs]) == sorted(places(scale, stage(equal=True)))


def test_the_rival_keeps_the_newest_of_each_row() -> None:
    records: list[plain.Record] = [
        (0, 7, "c", {"id": 7}),
        (1, 8, "c", {"id": 8}),
        (2, 7, "d", None),
    ]
    assert plain.newest(records) == {7: (2, None), 8: (1, {"id": 8})}
    (body,) = plain.bulks([(7, 2, None), (8, 1, {"id": 8})])
    deletion, action, row = map(json.loads, body.splitlines())
    assert deletion == {"delete": {"_id": "7", "version": 2, "version_type": "external_gte"}}
    assert (action["index"]["_id"], row) == ("8", {"id": 8})
    large = {"note": "x" * (plain.BULK_BYTES // 2)}
    assert [body.count(b"\n") for body in plain.bulks([(key, key, large) for key in range(5)])] == [
        4,
        4,
        2,
    ]
    assert plain.bulks([]) == []


def test_what_is_told_as_soon_as_it_is_known() -> None:
    drained, _, late = figures()
    drained.ours = [3000.0, 1000.0, 1500.0]
    drained.costs, drained.changes = [Cost(1.0, {"spark": 0.5}, {"spark": 100.0})], 1000
    assert report.describe(drained).splitlines() == [
        "W1 mixed, changes/s",
        "    limit: median 2,000, min 2,000, max 2,000",
        "    ours: median 1,500, min 1,000, max 3,000",
        "    CPU s per million: spark 500",
        "    peak MB: spark 100",
    ]
    assert "    visible: p50 12, p95 12, p99 12, max 12" in report.describe(late).splitlines()


def test_a_picture_for_each_kind_of_figure(tmp_path: Path) -> None:
    plots.draw(tmp_path, "S", figures())
    assert {path.name for path in tmp_path.iterdir()} == {
        f"S-{name}.png" for name in ("rates", "throughput", "latency", "growth")
    }
    plots.draw(tmp_path / "none", "S", [])
