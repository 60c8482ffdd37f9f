"""The tables of one batch, several at a time: each mostly waits for its two commits."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from cdc.change import Advance, Applied

AT_A_TIME = 4


def each(apply: Callable[[Advance], Applied], advances: Sequence[Advance]) -> dict[str, Applied]:
    """What becomes of each table's records, by table; when some fail, the others are done before the first is told."""
    if len(advances) == 1:
        return {advances[0].table.qualified: apply(advances[0])}
    from pyspark import inheritable_thread_target

    with ThreadPoolExecutor(AT_A_TIME) as pool:
        # Without it a job would leave the sink's pool of Spark's scheduler.
        done = pool.map(inheritable_thread_target(apply), advances)
        return {advance.table.qualified: one for advance, one in zip(advances, done, strict=True)}
