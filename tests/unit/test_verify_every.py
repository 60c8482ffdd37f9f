"""`cdc verify --every` outlives the servers that it asks, and ends with Spark."""

from collections.abc import Callable, Iterator
from contextlib import closing

import psycopg
import pytest
from pyspark.errors import PySparkException

from cdc.cli.verify import repeat
from cdc.observe.http_server import Listener
from cdc.observe.metrics import Metrics
from cdc.verify.comparison import Comparison
from tests.support import http

SECRET = "hunter2-a-row"


class Rounds:
    """Comparisons that end in these ways, and how often one was made. After them Ctrl-C is pressed."""

    def __init__(self, *ends: Exception | Comparison) -> None:
        self.count, self._ends = 0, iter(ends)

    def compare(self) -> list[Comparison]:
        end = next(self._ends, None)
        if end is None:
            raise KeyboardInterrupt
        self.count += 1
        if isinstance(end, Exception):
            raise end
        return [end]


@pytest.fixture
def metrics() -> Iterator[Metrics]:
    with closing(Metrics(Listener(0))) as server:
        yield server


def until_ended(rounds: Rounds, metrics: Metrics, spark_has_ended: Callable[[], bool]) -> None:
    repeat(rounds.compare, 0.0, ["cache", "search"], metrics, spark_has_ended, as_json=False)


def test_a_comparison_that_fails_in_a_library_is_counted_and_the_next_is_made(
    metrics: Metrics, capsys: pytest.CaptureFixture[str]
) -> None:
    rounds = Rounds(
        psycopg.OperationalError(f"server closed the connection: {SECRET}"),
        PySparkException(f"[TASK_FAILED] cdc.errors.SinkUnavailable: {SECRET}"),
        Comparison("cache", "public.orders", 3, 3),
    )
    with pytest.raises(KeyboardInterrupt):
        until_ended(rounds, metrics, lambda: False)
    assert rounds.count == 3
    figures = http.get(f"{metrics.url}/metrics").raise_for_status().text
    assert "cdc_verify_failures_total 2.0" in figures
    assert "cdc_verify_up 1.0" in figures
    errors = capsys.readouterr().err
    assert "Postgres went away while it was asked." in errors
    assert "cache or search can't be read." in errors
    assert SECRET not in errors


def test_it_ends_once_spark_has_ended(metrics: Metrics) -> None:
    rounds = Rounds(PySparkException("gone"), Comparison("cache", "public.orders", 3, 3))
    with pytest.raises(PySparkException, match="gone"):
        until_ended(rounds, metrics, lambda: True)
    assert rounds.count == 1
