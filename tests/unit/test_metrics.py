"""What Prometheus finds after comparisons."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from cdc.apply.progress import Progress
from cdc.observe.http_server import Listener
from cdc.observe.metrics import Metrics
from cdc.verify.comparison import Comparison
from tests.support import http


@pytest.fixture
def metrics() -> Iterator[Metrics]:
    with closing(Metrics(Listener(0))) as server:
        yield server


def fetched(metrics: Metrics) -> dict[str, float]:
    text = http.get(f"{metrics.url}/metrics").raise_for_status().text
    pairs = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def test_the_last_comparison_is_told(metrics: Metrics) -> None:
    for missing in (3, 2):
        metrics.publish_comparisons(
            [Comparison("cache", "public.busy", source_rows=10, missing=missing, undecided=1)]
        )
    metrics.count_failure()
    values = fetched(metrics)
    assert values['cdc_verify_differences{kind="missing",sink="cache",table="public.busy"}'] == 2
    assert values['cdc_verify_differences{kind="extra",sink="cache",table="public.busy"}'] == 0
    assert values['cdc_verify_undecided{sink="cache",table="public.busy"}'] == 1
    assert values['cdc_verify_source_rows{sink="cache",table="public.busy"}'] == 10
    assert values["cdc_verify_failures_total"] == 1
    assert values["cdc_verify_timestamp_seconds"] > 1.7e9


@pytest.mark.parametrize(
    "unproved",
    [
        Comparison("cache", "public.busy", undecided=1),
        Comparison("cache", "public.busy", problem="It waits."),
    ],
    ids=["undecided", "not compared"],
)
def test_rows_that_differ_are_told_until_the_view_is_found_equal(
    metrics: Metrics, unproved: Comparison
) -> None:
    figures = []
    for result in (
        Comparison("cache", "public.busy", missing=3),
        unproved,
        Comparison("cache", "public.busy"),
    ):
        metrics.publish_comparisons([result])
        name = 'cdc_verify_differences{kind="missing",sink="cache",table="public.busy"}'
        figures.append(fetched(metrics)[name])
    assert figures == [3, 3, 0]


def test_a_view_that_is_compared_no_more_has_no_figures(metrics: Metrics) -> None:
    kept, dropped = (Comparison("cache", f"public.{name}", missing=1) for name in ("a", "b"))
    figures = []
    for results in ([kept, dropped], [kept]):
        metrics.publish_comparisons(results)
        figures.append({name for name in fetched(metrics) if 'table="public.b"' in name})
    assert len(figures[0]) == 5
    assert figures[1] == set()


def test_a_comparison_that_can_not_be_made_is_told_until_one_can(metrics: Metrics) -> None:
    answers = [fetched(metrics)["cdc_verify_up"]]
    metrics.count_failure()
    answers.append(fetched(metrics)["cdc_verify_up"])
    metrics.publish_comparisons([])
    assert [*answers, fetched(metrics)["cdc_verify_up"]] == [1, 0, 1]


def test_restarts_are_counted_by_reason(metrics: Metrics) -> None:
    metrics.publish_restarts([Progress("cache", restarts={"truncate": 2})])
    assert fetched(metrics)['cdc_query_restarts{reason="truncate",sink="cache"}'] == 2
