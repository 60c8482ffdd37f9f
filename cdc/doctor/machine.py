"""This machine: Java, Spark, memory, disk, and clocks of servers against its own."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import psutil

from cdc.model.finding import Finding, find
from cdc.model.installation import install_command

OLDEST_JAVA = 17
ROOM_BYTES = 2 << 30
"""Memory that Spark and its workers take, at least."""
STATE_BYTES = 1 << 30
CLOCK_S = 2.0
"""Seconds by which a clock may be off: lag in seconds is wrong by as much."""


@dataclass(frozen=True)
class MachineFacts:
    """What was read of this machine; sizes in bytes."""

    java: int | None
    """Major version; None where there is no Java."""
    spark: bool
    memory_free: int
    state_free: int
    state: str
    """The folder in which the state of runs lies."""


def read_machine(state: Path) -> MachineFacts:
    """Read the facts. Asks `java -version`, which takes a tenth of a second."""
    folder = next(path for path in (state, *state.absolute().parents) if path.exists())
    return MachineFacts(
        _java_major(),
        find_spec("pyspark") is not None,
        psutil.virtual_memory().available,
        shutil.disk_usage(folder).free,
        str(folder),
    )


def _java_major() -> int | None:
    home = os.environ.get("JAVA_HOME")
    program = shutil.which("java", path=f"{home}/bin" if home else None)
    if program is None:
        return None
    answer = subprocess.run([program, "-version"], check=False, capture_output=True, text=True)
    version = re.search(r'version "(?:1\.)?(\d+)', answer.stderr)
    return int(version[1]) if version else None


def check_machine(facts: MachineFacts) -> Iterator[Finding]:
    """Judge this machine."""
    if facts.java is None:
        message = "There is no Java runtime on this machine, which Spark needs."
        yield find("machine-unfit/java", "java", message, "apt install openjdk-17-jre-headless")
    elif facts.java < OLDEST_JAVA:
        message = f"Java {facts.java} is too old for Spark, which needs {OLDEST_JAVA}."
        yield find("machine-unfit/old-java", "java", message, "apt install openjdk-17-jre-headless")
    if not facts.spark:
        message = "PySpark isn't installed, which `run`, `rebuild` and `verify` need."
        yield find("machine-unfit/spark", "pyspark", message, install_command("spark"))
    if facts.memory_free < ROOM_BYTES:
        message = (
            f"{facts.memory_free >> 20} MiB of memory are free; Spark and its workers take 2 GiB."
        )
        yield find("memory-low/machine", "memory", message, "ps aux --sort -rss")
    if facts.state_free < STATE_BYTES:
        message = f"{facts.state_free >> 20} MiB are free in {facts.state}."
        yield find("disk-low/state", facts.state, message, f"du -sh {facts.state}")


def check_clock(server: str, off_s: float) -> Iterator[Finding]:
    """Judge a server's clock, which is so many seconds ahead of this machine's."""
    if abs(off_s) > CLOCK_S:
        order = "ahead of" if off_s > 0 else "behind"
        message = f"The clock of {server} is {abs(off_s):.0f} s {order} this machine's."
        yield find("clock-off", server, message, "timedatectl status")
