"""Streams side by side: one that dies of anything is reported at once, one that hangs keeps nobody else
from telling.
"""

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from cdc.apply import supervisor
from cdc.apply.progress import Progress, RunState
from cdc.apply.supervisor import LONGEST_PAUSE_S, AfterError, BackOff, supervise
from cdc.cli.console import configure_logging
from cdc.cli.run import RunLimits
from cdc.errors import (
    CdcError,
    DivergenceError,
    Fenced,
    SettingsError,
    SinkRejected,
    SparkError,
    Unexpected,
    WorkerLost,
)
from tests.support.wait import wait_until

SECRET_ROW = "a row's value"


class Feed:
    """A stream of a test: fails in its first runs, and then works until it is stopped."""

    busy = False
    closed = 0

    def __init__(self, name: str, *failures: Exception) -> None:
        self.sink, self.progress = SimpleNamespace(name=name), Progress(name)
        self.failures = list(failures)
        self.stopped = threading.Event()

    def run(self, *, until_caught_up: bool = False) -> None:
        self.publish()
        if self.failures:
            raise self.failures.pop(0)
        while not until_caught_up and not self.stopped.wait(0.1):
            self.publish()

    def publish(self) -> None:
        lag = (self.progress.lag_records or 0) + 1
        news: dict[str, Any] = {"lag_records": lag, "published_at": time.time(), "busy": self.busy}
        self.progress = replace(self.progress, state=RunState.APPLYING, **news)

    def note_restart(self) -> None:
        restarts = {"error": self.progress.restarts.get("error", 0) + 1}
        self.progress = replace(self.progress, restarts=restarts, restarted="error")

    def close(self) -> None:
        self.closed += 1

    def stop(self) -> None:
        self.stopped.set()


class Hung(Feed):
    """A stream whose sink never answers when it is asked for its position."""

    def run(self, *, until_caught_up: bool = False) -> None:
        self.publish()
        self.release.wait()

    release = threading.Event()


class Run:
    """`cdc run` over some streams, in a thread."""

    def __init__(self, *feeds: Any, **options: Any) -> None:
        self.feeds, self.published = feeds, dict[str, Progress]()
        self.options = options
        self.stopping = threading.Event()
        self.results: list[Any] = []
        self.thread = threading.Thread(target=self._work)
        self.thread.start()

    def _work(self) -> None:
        try:
            errors = supervise(self.feeds, self.stopping, **self.options, on_tick=self._publish)
            self.results.append(errors)
        except Exception as error:
            self.results.append(error)

    def _publish(self, progress: list[Progress]) -> None:
        self.published = {snapshot.sink: snapshot for snapshot in progress}

    def state(self, sink: str) -> Progress | None:
        return self.published.get(sink)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "TICK_S", 0.05)


@pytest.fixture
def runs() -> Iterator[Any]:
    instances: list[Run] = []

    def begin(*feeds: Any, **options: Any) -> Run:
        instances.append(Run(*feeds, **options))
        return instances[-1]

    yield begin
    for instance in instances:
        instance.stopping.set()
        for feed in instance.feeds:
            feed.stop()
        instance.thread.join(60)


def test_a_stream_that_dies_of_anything_is_reported_while_the_others_work(runs: Any) -> None:
    bad = Feed("cache", ValueError(SECRET_ROW))
    good = Feed("search")
    run = runs(bad, good)
    wait_until(lambda: run.state("search"), 10, "a first report")
    wait_until(lambda: run.state("cache").state == "failed", 10, "the report of the failed sink")
    failed = run.state("cache")
    assert "ValueError" in failed.error
    assert "test_supervise.py" in failed.error
    assert SECRET_ROW not in failed.error
    assert failed.hint
    assert (run.thread.is_alive(), good.stopped.is_set()) == (True, False)
    run.stopping.set()
    run.thread.join(60)
    (errors,) = run.results
    assert [error.exit_code for error in errors] == [1]
    assert all(isinstance(error, CdcError) for error in errors)


def test_the_errors_come_in_the_order_of_the_streams() -> None:
    feeds: Any = (
        Feed("cache", RuntimeError(SECRET_ROW)),
        Feed("search"),
        Feed("warehouse", SinkRejected("No.", hint="h")),
    )
    errors = supervise(feeds, threading.Event(), until_caught_up=True)
    assert [error.exit_code for error in errors] == [1, 7]
    assert SECRET_ROW not in json.dumps([[error.message, error.hint] for error in errors])


def test_the_trace_is_logged_once_without_what_the_error_quotes(
    capfd: pytest.CaptureFixture[str],
) -> None:
    configure_logging()
    feeds: Any = (Feed("cache", RuntimeError(SECRET_ROW)),)
    supervise(feeds, threading.Event())
    logged = capfd.readouterr()
    assert logged.out == ""
    assert logged.err.count("in run") == 1
    assert "RuntimeError" in logged.err
    assert SECRET_ROW not in logged.err


@pytest.fixture
def hung() -> Iterator[Hung]:
    feed = Hung("search")
    feed.release = threading.Event()
    yield feed
    feed.release.set()


def test_a_sink_that_never_answers_does_not_stop_the_reports_of_the_others(
    runs: Any, hung: Hung
) -> None:
    run = runs(hung, Feed("cache"))
    wait_until(
        lambda: run.state("cache") and run.state("cache").lag_records,
        10,
        "the cache to be reported",
    )
    lag = run.state("cache").lag_records or 0
    wait_until(
        lambda: run.state("cache").lag_records > lag + 10, 10, "the cache to be reported again"
    )
    wait_until(lambda: run.state("search").looked_s >= 1, 10, "a second without an answer")
    wait_until(lambda: run.state("cache").looked_s < 1, 10, "a look at the cache")
    assert run.state("search").state == "running"


def test_a_long_batch_is_no_sink_that_never_answers(runs: Any, hung: Hung) -> None:
    """What was behind when it began is reported as behind for longer all the time."""
    hung.busy, hung.progress = True, replace(hung.progress, lag_seconds=5.0)
    run = runs(hung)
    wait_until(
        lambda: run.state("search") and run.state("search").lag_seconds > 6, 10, "a second to go by"
    )
    assert run.state("search").looked_s == 0
    assert run.state("search").busy_s >= 1


def test_a_sink_that_never_answers_does_not_keep_the_others_from_being_stopped(
    runs: Any, hung: Hung
) -> None:
    good = Feed("cache")
    run = runs(hung, good)
    wait_until(lambda: run.state("cache"), 10, "a first report")
    run.stopping.set()
    wait_until(good.stopped.is_set, 3, "the other stream to be stopped")
    assert run.thread.is_alive()


def test_a_stream_that_has_failed_starts_again_and_says_when_and_why(
    runs: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The pause is long enough to be seen, the second one twice as long."""
    configure_logging()
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 1.0)
    feed = Feed("cache", ValueError(SECRET_ROW), KeyError(SECRET_ROW))
    good = Feed("search")
    began = time.time()
    run = runs(feed, good, after_error=AfterError.RESTART)
    wait_until(lambda: run.state("cache") and run.state("cache").restart_at, 5, "the failure")
    failed = run.state("cache")
    assert (failed.state, "ValueError" in failed.error) == ("failed", True)
    assert began < failed.restart_at <= time.time() + 1.0
    wait_until(lambda: run.state("cache").state == "running", 15, "the stream to work again")
    working = run.state("cache")
    assert (working.error, working.restart_at) == (None, None)
    assert (working.restarts, working.restarted) == ({"error": 2}, "error")
    assert (good.stopped.is_set(), feed.closed) == (False, 0)
    logged = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert [event["restarts_in_s"] for event in logged] == [1.0, 2.0]
    run.stopping.set()
    run.thread.join(60)
    assert (run.results, feed.closed) == ([[]], 1)


def test_a_run_that_is_stopped_waits_for_no_start(runs: Any) -> None:
    run = runs(Feed("cache", ValueError(SECRET_ROW)), after_error=AfterError.RESTART)
    wait_until(lambda: run.state("cache") and run.state("cache").restart_at, 5, "the failure")
    run.stopping.set()
    run.thread.join(60)
    assert [error.exit_code for error in run.results[0]] == [1]


@pytest.mark.parametrize(
    ("error", "is_final"),
    [
        (Unexpected("A bug.", hint="h"), False),
        (SinkRejected("It refuses.", hint="h"), False),
        (DivergenceError("The log is shorter.", hint="h"), False),
        (WorkerLost("Five times.", hint="h"), False),
        (SettingsError("Another key.", hint="h"), True),
        (Fenced("Another writer.", hint="h"), True),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_a_person_has_to_mend_and_a_second_writer_start_nothing(
    runs: Any, error: CdcError, is_final: bool
) -> None:
    run = runs(Feed("cache", error), after_error=AfterError.RESTART)
    if not is_final:
        wait_until(lambda: run.state("cache") and run.state("cache").restart_at, 5, "the pause")
        run.stopping.set()
    run.thread.join(5)
    assert run.results == [[error]]


def limits(*, until_caught_up: bool = False, for_s: float | None = None) -> RunLimits:
    return RunLimits(threading.Event(), until_caught_up, for_s, None)


@pytest.mark.parametrize("until_caught_up", [False, True])
@pytest.mark.parametrize("failures", [1, 0])
def test_without_spark_a_stream_that_is_paused_or_waits_for_its_sink_ends_too(
    runs: Any, until_caught_up: bool, failures: int
) -> None:
    """It doesn't touch Spark, so that it doesn't fail by itself; whatever starts the run again would
    never do so. Beside a stream that fails, or alone.
    """
    paused, failed = Feed("cache"), Feed("search", SparkError("Gone.", hint="h"))
    options = limits(until_caught_up=until_caught_up)
    run = runs(
        *[paused, failed][: 1 + failures],
        is_over=options.is_over(lambda: False),
        after_error=options.after_error,
    )
    wait_until(paused.stopped.is_set, 5, "the paused stream to be stopped")
    run.thread.join(60)
    assert [error.exit_code for error in run.results[0]] == [9] * failures


def test_a_run_ends_once_its_seconds_are_over() -> None:
    is_over = limits(for_s=0.1).is_over(lambda: True)
    assert not is_over()
    wait_until(is_over, 5, "the end of the run")
    assert not limits().is_over(lambda: True)()


def test_pauses_double_up_to_ten_minutes_and_start_over_after_a_long_run() -> None:
    now = 0.0
    back_off = BackOff(lambda: now)
    pauses = [back_off.next_pause_s() for _ in range(9)]
    assert pauses == [10, 20, 40, 80, 160, 320, 600, 600, 600]
    back_off.begin()
    now = LONGEST_PAUSE_S + 1
    assert back_off.next_pause_s() == 10


def test_the_first_error_ends_a_run_that_is_to_fail_fast() -> None:
    """Its error comes first, whatever the order of the streams."""
    feeds: Any = (Feed("cache"), Feed("search"), Feed("warehouse", SinkRejected("No.", hint="h")))
    errors = supervise(feeds, threading.Event(), after_error=AfterError.END_RUN)
    assert [error.exit_code for error in errors] == [7]
    assert all(feed.stopped.is_set() for feed in feeds)
