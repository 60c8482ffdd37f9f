"""The only way in which a test waits."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
POLL_S = 0.05


def wait_until(condition: Callable[[], T], timeout_s: float, describe: str | Callable[[], str]) -> T:
    """Return the condition's first true value; fail after `timeout_s` seconds, saying what was waited for."""
    deadline = time.monotonic() + timeout_s
    while True:
        if value := condition():
            return value
        if time.monotonic() > deadline:
            what = describe if isinstance(describe, str) else describe()
            raise AssertionError(f"not within {timeout_s:g} s: {what}")
        time.sleep(POLL_S)
