"""Write the archive of Spark's classes: `python -m cdc.runtime.class_archive`, which `make setup` runs.

Some seconds, once for an environment; each start of Spark after it takes a third less CPU.
"""

import os
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pyspark.sql import SparkSession

from cdc.compose import artifacts
from cdc.errors import SparkError
from cdc.spark.session import ARCHIVE, QUIET, session

WRITE_S = 300.0
"""Seconds in which Java has written the archive after Spark has ended, also on a busy machine."""


def write(jars: Sequence[Path], archive: Path = ARCHIVE) -> None:
    """Start Spark, load what a start loads, and let Java write its classes when Spark ends.

    Raises:
        SparkError: Spark doesn't start, or Java hasn't written them. OSError: no room, no right.
    """
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=archive.parent) as folder:
        recorded = Path(folder, "classes")
        # Java would print a line for each class that can't be archived, some thousand.
        options = [QUIET, f"-XX:ArchiveClassesAtExit={recorded}", "-Xlog:disable"]
        settings = {"spark.driver.extraJavaOptions": shlex.join(options)}
        spark = session("local[2]", jars, settings)
        process = getattr(spark.sparkContext._gateway, "proc")  # noqa: B009  # not of a remote Spark
        load_classes(spark, Path(folder))
        spark.stop()
        # Spark's process ends with its standard input.
        process.stdin.close()
        try:
            process.wait(WRITE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.returncode != 0 or not recorded.exists():
            raise SparkError(
                "Java hasn't written an archive of Spark's classes.",
                hint="is there room for 200 MB? then again: python -m cdc.runtime.class_archive",
            )
        with recorded.open("rb") as whole:
            os.fsync(whole)
        recorded.rename(archive)


def load_classes(spark: SparkSession, folder: Path) -> None:
    """Do what each verb does in Spark: write and read a Delta table, run Python over frames and over
    numbers.
    """
    table = str(folder / "table")
    spark.range(10).write.format("delta").save(table)
    rows = spark.read.format("delta").load(table)
    rows.mapInArrow(lambda batches: batches, "id long").groupBy("id").count().collect()
    spark.sparkContext.parallelize(range(2), 2).mapPartitions(list).collect()


if __name__ == "__main__":
    write(artifacts.spark_jars())
