"""The thread that compares definitions: nothing ends it, and its delay is known."""

import itertools
import threading
from contextlib import nullcontext

import pytest

from cdc.config.settings import Pipeline
from cdc.control import definitions
from cdc.postgres import source
from tests.support.pipelines import pipeline
from tests.support.wait import wait_until


@pytest.mark.parametrize("failure", [OSError(24, "Too many open files"), ValueError("never met")])
def test_whatever_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch, failure: Exception) -> None:
    monkeypatch.setattr(definitions, "COMPARE_S", 0.01)
    monkeypatch.setattr(source, "connect_to_read", lambda _: nullcontext())
    compared = itertools.count()
    monkeypatch.setattr(definitions, "compare", lambda _: next(compared))
    calls, fails = itertools.count(), 50

    def load() -> Pipeline:
        if next(calls) < fails:
            raise failure
        return pipeline("shop", "", "public.orders")

    before = set(threading.enumerate())
    with definitions.compare_periodically(load) as uncompared_s:
        (comparing,) = set(threading.enumerate()) - before
        wait_until(lambda: next(calls) > fails / 2, 5, "it fails again and again")
        growing = uncompared_s()
        wait_until(lambda: next(compared) > 0, 5, "it has compared")
        wait_until(lambda: uncompared_s() < growing, 5, "that is known")
    # What is stubbed here must not come back while it is at work.
    comparing.join(60)
    assert not comparing.is_alive()
