"""The archive of Spark's classes, as `make setup` writes it: Java itself says whether it fits."""

import os
import subprocess
from pathlib import Path

import pyspark

from cdc.spark.session import archive_options

SUBMIT = Path(pyspark.__file__).parent / "bin" / "spark-submit"
ONLY_SHARED = "-Xshare:on"
"""Java's option to end at once where the archive doesn't fit."""


def start(options: list[str], *words: str) -> "subprocess.CompletedProcess[str]":
    """Start Spark's own process, which prints its version."""
    command = [str(SUBMIT), "--version", "--driver-java-options", " ".join(options), *words]
    local = {**os.environ, "SPARK_LOCAL_IP": "127.0.0.1"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=local)


def test_java_maps_the_archive() -> None:
    options = archive_options()
    assert options, "make setup writes the archive"
    started = start([ONLY_SHARED, *options])
    assert started.returncode == 0, started.stderr
    assert pyspark.__version__ in started.stderr


def test_an_archive_of_another_class_path_is_as_good_as_none() -> None:
    first = min((SUBMIT.parents[1] / "jars").glob("*.jar"))
    other = "--driver-class-path", str(first)
    assert start([ONLY_SHARED, *archive_options()], *other).returncode != 0
    started = start(archive_options(), *other)
    assert started.returncode == 0
    assert "[warning]" not in started.stdout + started.stderr


def test_a_missing_archive_is_left_out(tmp_path: Path) -> None:
    assert archive_options(tmp_path / "missing.jsa") == []
