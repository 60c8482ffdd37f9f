"""A repeated step: nothing ends its thread, and a failure that lasts is reported once."""

import itertools
import threading

import pytest

from cdc.control.repetition import repeating
from cdc.errors import CdcError, SourceError
from tests.support.wait import wait_until


@pytest.mark.parametrize("failure", [OSError(24, "Too many open files"), ValueError("never met")])
def test_a_failure_is_reported_once_and_the_step_is_tried_again(failure: Exception) -> None:
    calls = itertools.count()
    succeeded = threading.Event()

    def step() -> None:
        if next(calls) < 50:
            raise failure
        succeeded.set()

    reported = list[CdcError]()
    with repeating(step, 0.001, subject="the step", report=reported.append):
        assert succeeded.wait(60)
    assert len(reported) == 1


def test_another_failure_and_one_after_a_success_are_reported() -> None:
    outcomes = iter(["away", "away", "locked", None, "locked"])
    done = threading.Event()

    def step() -> None:
        reason = next(outcomes, "over")
        if reason == "over":
            done.set()
        elif reason:
            raise SourceError(reason, hint="none")

    reported = list[CdcError]()
    with repeating(step, 0.001, subject="the step", report=reported.append):
        assert done.wait(60)
    assert [failure.message for failure in reported] == ["away", "locked", "locked"]


def test_the_step_ends_with_the_block() -> None:
    calls = itertools.count()
    before = set(threading.enumerate())
    with repeating(lambda: next(calls), 0.001, subject="the step", report=print):
        (thread,) = set(threading.enumerate()) - before
        wait_until(lambda: next(calls) > 1, 10, "the step is called")
    thread.join(60)
    assert not thread.is_alive()
