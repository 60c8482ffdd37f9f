"""Failures inside Spark come as text: give them back their class, and never let a row's value
through.
"""

import re

from py4j.protocol import Py4JError, Py4JNetworkError
from pyspark.errors import PySparkException

from cdc.errors import (
    CdcError,
    SinkError,
    SinkUnavailable,
    SparkError,
    WorkerLost,
)
from cdc.sink.remedy import classify
from cdc.spark.session import MEMORY_HINT

LOST = re.compile(
    r"Python worker (?:exited unexpectedly|failed to connect back|process is dead)|ExecutorLostFailure|SlaveLost"
    r"|Executor heartbeat timed out|EOFException occurred while reading .* from Python worker"
    # Killed before it reported its port or its number: only the trace shows it.
    r"|java\.(?:io\.EOF|net\.Socket)Exception(?s:.{0,1000}?)PythonWorkerFactory\.create"
)

PYTHON = re.compile(
    r"""ModuleNotFoundError: (No module named '[\w.]+')|(Cannot run program "[^"]+")|\[(PYTHON_VERSION_MISMATCH)\]"""
)
PYTHON_HINT = (
    "pip install '.[spark]' with the driver's version of Python under the same path on every host,"
    " then PYSPARK_PYTHON=/opt/cdc/bin/python cdc -p FILE run --master ..."
)


def explain(error: Exception, sink: str) -> CdcError:
    """Give a failure its class, also one inside Spark, which Spark reports as text only."""
    if isinstance(error, CdcError):
        return error
    text = str(error)
    if f"{SinkUnavailable.__module__}.{SinkUnavailable.__name__}: " in text:
        return SinkUnavailable(
            f"{sink} can't be read.", hint="is the server up? the same command goes on", sink=sink
        )
    if "OutOfMemoryError" in text:
        return SparkError("Spark has run out of memory.", hint=MEMORY_HINT)
    if found := PYTHON.search(text):
        reason = next(filter(None, found.groups()))
        return SparkError(
            f"The Python of Spark's executors doesn't serve: {reason}.", hint=PYTHON_HINT
        )
    if LOST.search(text):
        return WorkerLost(
            "Spark has lost a worker in mid-batch.",
            hint="is there memory left on this machine? the next start goes on from where it stands",
            sink=sink,
        )
    if isinstance(error, Py4JNetworkError):
        return SparkError(
            "Spark's process doesn't answer.", hint="start again; views go on from where they stand"
        )
    if not isinstance(error, PySparkException | Py4JError):
        return classify(error, sink, "the next start")
    # Spark's message may quote a value; its class never does.
    condition = re.search(r"\[([A-Z][A-Z0-9_.]+)\]", text)
    description = condition[1] if condition else type(error).__name__
    return SinkError(f"Spark failed: {description}.", hint="the log has the trace", sink=sink)
