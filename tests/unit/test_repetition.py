"""A repeated step: nothing ends its thread, and a failure that lasts is logged once."""

import itertools
import threading

import pytest
from structlog.testing import capture_logs

from cdc.control.repetition import repeating
from cdc.errors import SourceError
from tests.support.wait import wait_until


@pytest.mark.parametrize("failure", [OSError(24, "Too many open files"), ValueError("never met")])
def test_a_failure_is_logged_once_and_the_step_is_tried_again(failure: Exception) -> None:
    calls = itertools.count()
    succeeded = threading.Event()

    def step() -> None:
        if next(calls) < 50:
            raise failure
        succeeded.set()

    with capture_logs() as entries, repeating(step, 0.001, subject="the step", event="step_failed"):
        assert succeeded.wait(10)
    assert [entry["event"] for entry in entries] == ["step_failed"]


def test_another_failure_and_one_after_a_success_are_logged() -> None:
    outcomes = iter(["away", "away", "locked", None, "locked"])
    done = threading.Event()

    def step() -> None:
        reason = next(outcomes, "over")
        if reason == "over":
            done.set()
        elif reason:
            raise SourceError(reason, hint="none")

    with capture_logs() as entries, repeating(step, 0.001, subject="the step", event="step_failed"):
        assert done.wait(10)
    assert [entry["error"] for entry in entries] == ["away", "locked", "locked"]


def test_the_step_ends_with_the_block() -> None:
    calls = itertools.count()
    before = set(threading.enumerate())
    with repeating(lambda: next(calls), 0.001, subject="the step", event="step_failed"):
        (thread,) = set(threading.enumerate()) - before
        wait_until(lambda: next(calls) > 1, 10, "the step is called")
    thread.join(10)
    assert not thread.is_alive()
