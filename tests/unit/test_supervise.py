"""Streams side by side: one that dies of anything is told at once, one that hangs keeps nobody else
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
from cdc.apply.supervisor import supervise
from cdc.cli.console import configure_logging
from cdc.errors import CdcError, SinkRejected
from tests.support.wait import wait_until

SECRET_ROW = "a row's value"


class Feed:
    """A stream of a test: works until it is stopped."""

    busy = False

    def __init__(self, name: str, failure: Exception | None = None) -> None:
        self.sink, self.progress = SimpleNamespace(name=name), Progress(name)
        self._failure, self.stopped = failure, threading.Event()

    def run(self, *, until_caught_up: bool = False) -> None:
        self.publish()
        if self._failure:
            raise self._failure
        while not until_caught_up and not self.stopped.wait(0.1):
            self.publish()

    def publish(self) -> None:
        lag = (self.progress.lag_records or 0) + 1
        self.progress = replace(
            self.progress,
            state=RunState.APPLYING,
            lag_records=lag,
            published_at=time.time(),
            busy=self.busy,
        )

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

    def __init__(self, *feeds: Any) -> None:
        self.feeds, self.published = feeds, dict[str, Progress]()
        self.stopping = threading.Event()
        self.results: list[Any] = []
        self.thread = threading.Thread(target=self._work)
        self.thread.start()

    def _work(self) -> None:
        try:
            self.results.append(supervise(self.feeds, self.stopping, on_tick=self._publish))
        except Exception as error:
            self.results.append(error)

    def _publish(self, progress: list[Progress]) -> None:
        self.published = {snapshot.sink: snapshot for snapshot in progress}

    def state(self, sink: str) -> Progress | None:
        return self.published.get(sink)


@pytest.fixture
def runs() -> Iterator[Any]:
    instances: list[Run] = []

    def begin(*feeds: Any) -> Run:
        instances.append(Run(*feeds))
        return instances[-1]

    yield begin
    for instance in instances:
        instance.stopping.set()
        for feed in instance.feeds:
            feed.stop()
        instance.thread.join(10)


def assert_told_at_once(run: Any) -> None:
    """Assert that the death of the first of two streams is told at once."""
    wait_until(lambda: run.state("search"), 10, "a first report")
    wait_until(
        lambda: run.state("cache").state == "failed", 3, "the failed sink to be told", patience=1
    )
    failed = run.state("cache")
    assert "ValueError" in failed.error
    assert "test_supervise.py" in failed.error
    assert SECRET_ROW not in failed.error
    assert failed.hint
    assert run.thread.is_alive()


def test_a_stream_that_dies_of_anything_is_told_while_the_others_work(runs: Any) -> None:
    bad, good = Feed("cache", ValueError(SECRET_ROW)), Feed("search")
    run = runs(bad, good)
    assert_told_at_once(run)
    assert not good.stopped.is_set()
    run.stopping.set()
    run.thread.join(10)
    (errors,) = run.results
    assert [error.exit_code for error in errors] == [1]
    assert all(isinstance(error, CdcError) for error in errors)


def test_planted_a_supervisor_that_keeps_a_failure_to_itself_until_all_have_ended(
    runs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor._Watch, "report", lambda watch: watch._feed.progress)
    with pytest.raises(AssertionError, match="the failed sink to be told"):
        assert_told_at_once(runs(Feed("cache", ValueError(SECRET_ROW)), Feed("search")))


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
    assert run.state("cache").looked_s < 1
    reported = run.state("search")
    assert reported.state == "running"
    assert reported.looked_s >= 1
    hung.release.set()


def test_a_long_batch_is_no_sink_that_never_answers(runs: Any, hung: Hung) -> None:
    """What was behind when it began is told as behind for longer all the time."""
    hung.busy, hung.progress = True, replace(hung.progress, lag_seconds=5.0)
    run = runs(hung)
    wait_until(
        lambda: run.state("search") and run.state("search").lag_seconds > 6, 10, "a second to go by"
    )
    assert run.state("search").looked_s == 0
    assert run.state("search").busy_s >= 1
    hung.release.set()


def test_a_sink_that_never_answers_does_not_keep_the_others_from_being_stopped(
    runs: Any, hung: Hung
) -> None:
    good = Feed("cache")
    run = runs(hung, good)
    wait_until(lambda: run.state("cache"), 10, "a first report")
    run.stopping.set()
    wait_until(good.stopped.is_set, 3, "the other stream to be stopped")
    assert run.thread.is_alive()
    hung.release.set()
