"""How the process of Spark ends: one for each end, for a start takes ten seconds of CPU."""

import os
import subprocess
import sys
from functools import cache

import psutil

from cdc.errors import SparkError
from cdc.runtime.servers import spark_on
from cdc.spark.failures import explain
from cdc.spark.session import is_running, settings_for
from tests.support.wait import wait_until

TOO_LONG = 1_500_000_000
WIDE = 70_000
"""Rows of 8 KiB: more than the memory that `run` gives."""


def exhaust() -> None:
    """Ask too much of a plan, which only fails, then of a task, which ends Spark."""
    try:
        with spark_on("local[1]") as spark:
            try:
                spark.range(1).selectExpr(f"length(repeat('x', {TOO_LONG}))").collect()
            except Exception as error:
                explanation = explain(error, "cache")
                print(explanation.exit_code, explanation, explanation.hint)
            spark.range(1).selectExpr(f"length(repeat('x', {TOO_LONG} + int(id)))").collect()
    except SparkError as error:
        print(error.exit_code, error, error.hint)


def vanish() -> None:
    """Keep more of wide rows than there is memory for. Then end Spark's process and tell of it, as a
    stream does: what is left to fail is stopping Spark.
    """
    try:
        with spark_on("local[2]") as spark:
            wide = (
                spark.range(0, WIDE, 1, 2)
                .selectExpr("repeat(sha2(string(id), 256), 128) AS row")
                .persist()
            )
            print(wide.selectExpr("sum(length(row))").collect()[0][0] >> 20, "MiB")
            (java,) = [child for child in psutil.Process().children() if child.name() == "java"]
            assert is_running(spark)
            java.kill()
            wait_until(lambda: not is_running(spark), 10, "the end of Spark's process")
            raise SparkError("A batch failed.", hint="")
    except SparkError as error:
        print(error.exit_code, error, error.hint)


def idle() -> None:
    """Leave Python workers that wait for a task."""
    with spark_on("local[2]") as spark:
        print(
            len(spark.range(0, 2, 1, 2).mapInArrow(lambda batches: batches, "id long").collect()),
            "rows",
        )


def refuse() -> None:
    """Start a JVM with an option that it doesn't know."""
    os.environ["JDK_JAVA_OPTIONS"] = "-XX:NoSuchOption=1"
    try:
        with spark_on("local[2]"):
            print("unreachable")
    except SparkError as error:
        print(error.exit_code, error)


@cache
def run(cause: str) -> str:
    """Run this module with little memory, once; return its output of both streams."""
    command = [sys.executable, "-m", __name__, cause]
    little = {**os.environ, "SPARK_DRIVER_MEMORY": "512m"}
    return subprocess.run(
        command, check=True, text=True, env=little, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ).stdout


def test_spark_that_runs_out_of_memory_says_so() -> None:
    lines = [line for line in run("exhaust").splitlines() if "SPARK_DRIVER_MEMORY=2g" in line]
    assert len(lines) == 2
    assert lines[0].startswith("9 Spark has run out of memory.")
    assert lines[1].startswith("9 Spark's process ran out of its memory.")


def test_spark_whose_process_ends_while_it_is_being_stopped_says_so() -> None:
    assert "9 Spark's process was ended (exit code -9)." in run("vanish")


def test_only_a_local_driver_keeps_to_the_loopback_address() -> None:
    """Executors on other hosts couldn't reach it there."""
    for master, is_local in {
        "local[2]": True,
        "spark://h:1": False,
    }.items():
        loopback = [
            value for value in settings_for(master, [], []).values() if value == "127.0.0.1"
        ]
        assert bool(loopback) == is_local, master


def test_spark_that_cannot_start_says_so_and_why() -> None:
    output = run("refuse")
    assert "9 Spark's process was ended before it answered." in output
    assert "NoSuchOption" in output


def test_what_a_batch_keeps_may_be_more_than_its_memory() -> None:
    """As it goes to disk; written in the default way, it is held until a hundred pieces of 4 MB are."""
    assert f"{WIDE >> 7} MiB" in run("vanish")


def test_spark_starts_and_idle_workers_end_without_a_word() -> None:
    assert run("idle") == "2 rows\n"


if __name__ == "__main__":
    {"exhaust": exhaust, "idle": idle, "refuse": refuse, "vanish": vanish}[sys.argv[1]]()
