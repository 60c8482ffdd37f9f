"""The only way in which a test waits."""

import time
from collections.abc import Callable
from typing import TypeVar

from tenacity import RetryError, Retrying, retry_if_not_result, stop_after_delay

T = TypeVar("T")
POLL_S = 0.05
PATIENCE = 3.0
"""How many times its limit a wait may take: most limits only keep a test that hangs from doing so
for long, and were chosen where the machine had nothing else to do.
"""


def wait_until(
    condition: Callable[[], T],
    timeout_s: float,
    describe: str | Callable[[], str],
    poll_s: float = POLL_S,
    patience: float = PATIENCE,
) -> T:
    """Return the condition's first true value; fail after `timeout_s * patience` seconds, saying
    what was waited for. `patience` is 1 where the limit is what the test claims.

    Between two looks it waits for `poll_s` seconds, and for twice as long as the look took: what is
    waited for needs the processor more.
    """
    look_s, limit_s = 0.0, timeout_s * patience

    def look() -> T:
        nonlocal look_s
        start = time.monotonic()
        try:
            return condition()
        finally:
            look_s = time.monotonic() - start

    until_true = Retrying(
        retry=retry_if_not_result(bool),
        wait=lambda _: max(poll_s, 2 * look_s),
        stop=stop_after_delay(limit_s),
    )
    try:
        return until_true(look)
    except RetryError:
        description = describe if isinstance(describe, str) else describe()
        raise AssertionError(f"not within {limit_s:g} s: {description}") from None


def answer_within(limit_s: float, ask: Callable[[], T]) -> T:
    """Return an answer that has come within `limit_s` seconds, of three at most: a busy machine may
    make one of them late.
    """
    took_s: list[float] = []
    while len(took_s) < 3:
        start = time.monotonic()
        answer = ask()
        took_s.append(time.monotonic() - start)
        if took_s[-1] < limit_s:
            return answer
    raise AssertionError(f"not within {limit_s:g} s: {took_s}")
