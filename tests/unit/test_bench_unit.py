"""What the bench makes of its measurements: no number without equality, hops, what is met."""

from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from bench import cases, latency, paths
from bench.batches import Batch, spans
from bench.output import report
from bench.output.cost import Cost
from bench.output.figure import Figure
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
    settings = {"against": "rival", **goals}
    figure = Figure("W4", "rows/s", **settings, ours=[100.0], rival=[90.0])
    assert report.verdict(figure) == answer


def test_latency_is_met_by_both_percentiles() -> None:
    hops = {"visible": [0.1] * 98 + [0.4] * 2}
    aims: list[tuple[float, ...]] = [(0.1, 0.4), (0.1, 0.3), (0.05, 0.5), ()]
    answers = [report.verdict(Figure("cache", "s", hops=hops, asked=aim)) for aim in aims]
    assert answers == ["yes", "no", "no", ""]
