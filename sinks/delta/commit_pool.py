"""The tables of one batch, several at a time: each mostly waits for its two commits."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

AT_A_TIME = 2
"""With four the warehouse was no sooner, and a batch of the cache beside it took half as long again."""
Step = TypeVar("Step")
Result = TypeVar("Result")


def each(spark: "SparkSession", steps: Mapping[str, Step], apply: Callable[[Step], Result]) -> dict[str, Result]:
    """What becomes of each table's step, by table; when some fail, the others are done before the first is told."""
    if len(steps) == 1:
        return {name: apply(step) for name, step in steps.items()}
    from pyspark import inheritable_thread_target

    # Otherwise a job would leave the sink's pool of Spark's scheduler.
    inheriting = inheritable_thread_target(spark)
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        # Not `map`, which calls off what hasn't begun when one has failed.
        done = [(name, pool.submit(inheriting(apply), step)) for name, step in steps.items()]
    return {name: one.result() for name, one in done}
