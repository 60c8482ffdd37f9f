"""A pool of driver threads that commit the tables of one batch.

Each mostly waits for two commits.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

THREADS = 2
"""With four the warehouse was no faster, and a batch of the cache at the same time took half as
long again."""
Task = TypeVar("Task")
Result = TypeVar("Result")


def run_all(
    spark: "SparkSession", tasks: Mapping[str, Task], run: Callable[[Task], Result]
) -> dict[str, Result]:
    """Run each table's task and return the results by table.

    When some fail, the others are finished before the first error is raised.
    """
    if len(tasks) == 1:
        return {name: run(task) for name, task in tasks.items()}
    from pyspark import inheritable_thread_target

    # Otherwise a job would leave the sink's pool of Spark's scheduler.
    inheriting = inheritable_thread_target(spark)
    with ThreadPoolExecutor(THREADS) as pool:
        # Not `map`: it cancels the tasks that haven't started when one has failed.
        futures = [(name, pool.submit(inheriting(run), task)) for name, task in tasks.items()]
    return {name: future.result() for name, future in futures}
