"""The tables of one batch, several at a time: each mostly waits for its two commits."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from cdc.change import Advance, Applied
from cdc.sink import Batch

AT_A_TIME = 2
"""With four the warehouse was no sooner, and a batch of the cache beside it took half as long again."""


def each(batch: Batch, apply: Callable[[Advance], Applied]) -> dict[str, Applied]:
    """What becomes of each table's records, by table; when some fail, the others are done before the first is told."""
    if len(batch.advances) == 1:
        return {advance.table.qualified: apply(advance) for advance in batch.advances}
    from pyspark import inheritable_thread_target

    # Otherwise a job would leave the sink's pool of Spark's scheduler.
    inheriting = inheritable_thread_target(batch.events.sparkSession)
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        # Not `map`, which calls off what hasn't begun when one has failed.
        done = [(advance.table.qualified, pool.submit(inheriting(apply), advance)) for advance in batch.advances]
    return {name: one.result() for name, one in done}
