"""Spark without the memory that it needs: in a process of its own, which doesn't survive it."""

import os
import subprocess
import sys

from cdc.context import spark_on
from cdc.errors import SparkError
from cdc.explain import explain

TOO_LONG = 1_500_000_000


def exhaust() -> None:
    """Ask too much of a plan, which only fails, then of a task, which ends Spark."""
    try:
        with spark_on("local[1]") as spark:
            try:
                spark.range(1).selectExpr(f"length(repeat('x', {TOO_LONG}))").collect()
            except Exception as error:
                told = explain(error, "cache")
                print(told.exit_code, told, told.hint)
            spark.range(1).selectExpr(f"length(repeat('x', {TOO_LONG} + int(id)))").collect()
    except SparkError as error:
        print(error.exit_code, error, error.hint)


def test_spark_that_runs_out_of_memory_says_so() -> None:
    done = subprocess.run(
        [sys.executable, "-m", __name__],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "SPARK_DRIVER_MEMORY": "512m"},
    )
    said = [line for line in done.stdout.splitlines() if "SPARK_DRIVER_MEMORY=2g" in line]
    assert len(said) == 2, done.stdout + done.stderr
    assert said[0].startswith("9 Spark has run out of memory.")
    assert said[1].startswith("9 Spark's process ran out of its memory.")


if __name__ == "__main__":
    exhaust()
