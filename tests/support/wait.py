"""The only way in which a test waits."""

from collections.abc import Callable
from typing import TypeVar

from tenacity import RetryError, Retrying, retry_if_not_result, stop_after_delay, wait_fixed

T = TypeVar("T")
POLL_S = 0.05


def wait_until(
    condition: Callable[[], T],
    timeout_s: float,
    describe: str | Callable[[], str],
    poll_s: float = POLL_S,
) -> T:
    """Return the condition's first true value; fail after `timeout_s` seconds, saying what was
    waited for.
    """
    until_true = Retrying(
        retry=retry_if_not_result(bool), wait=wait_fixed(poll_s), stop=stop_after_delay(timeout_s)
    )
    try:
        return until_true(condition)
    except RetryError:
        description = describe if isinstance(describe, str) else describe()
        raise AssertionError(f"not within {timeout_s:g} s: {description}") from None
