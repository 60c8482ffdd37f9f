"""Failures inside Spark come as text: give them back their class, and never let a row's value
through.
"""

import re

from py4j.protocol import Py4JError, Py4JNetworkError
from pyspark.errors import PySparkException

from cdc.errors import (
    CdcError,
    ConnectorError,
    KafkaUnavailable,
    SinkError,
    SinkUnavailable,
    SparkError,
    WorkerLost,
)
from cdc.sink.remedy import classify
from cdc.spark.session import MEMORY_HINT

BROKER = re.compile(r"org\.apache\.kafka\.common\.errors\.(\w+)")
FINAL_ERRORS = (
    "Authorization",
    "Authentication",
    "InvalidTopic",
    "InvalidGroup",
    "UnsupportedVersion",
    "CorruptRecord",
)
"""Kafka errors that won't pass by waiting; all others do."""
RECORDS_GONE = re.compile(
    r"KafkaIllegalStateException|OffsetOutOfRange|\[KAFKA_DATA_LOSS|\[KAFKA_START_OFFSET_DOES_NOT_MATCH"
    r"|START_OFFSET_GREATER_THAN_END_OFFSET\]"
)
"""A topic is shorter than it was, or another one of its name: the client's exceptions, and the
conditions of Spark's source (error/kafka-error-conditions.json of its jar).
"""
LOST = re.compile(
    r"Python worker (?:exited unexpectedly|failed to connect back|process is dead)|ExecutorLostFailure|SlaveLost"
    r"|Executor heartbeat timed out|EOFException occurred while reading .* from Python worker"
    # Killed before it had told its port or its number: the trace alone says so.
    r"|java\.(?:io\.EOF|net\.Socket)Exception(?s:.{0,1000}?)PythonWorkerFactory\.create"
)


def explain(error: Exception, sink: str) -> CdcError:
    """Give a failure its class, also one inside Spark, which tells it as text only."""
    if isinstance(error, CdcError):
        return error
    text = str(error)
    return _of_server(text, sink) or _of_spark(error, text, sink)


def _of_server(text: str, sink: str) -> CdcError | None:
    """Recognise failures of the broker, of a sink's server, and of Spark's processes by their text;
    None for others.
    """
    if RECORDS_GONE.search(text):
        return ConnectorError(
            "Kafka no longer holds records that the view still needs.",
            hint=f"cdc -p FILE rebuild {sink}",
            sink=sink,
        )
    if broker := BROKER.search(text):
        return _of_broker(broker[1], sink)
    if f"{SinkUnavailable.__module__}.{SinkUnavailable.__name__}: " in text:
        return SinkUnavailable(
            f"{sink} can't be read.", hint="is the server up? the same command goes on", sink=sink
        )
    if "OutOfMemoryError" in text:
        return SparkError("Spark has run out of memory.", hint=MEMORY_HINT)
    if LOST.search(text):
        return WorkerLost(
            "Spark has lost a worker in mid-batch.",
            hint="is there memory left on this machine? the next start goes on from where it stands",
            sink=sink,
        )
    return None


def _of_broker(name: str, sink: str) -> ConnectorError:
    if name.startswith(FINAL_ERRORS) or any(f"{word}Exception" in name for word in FINAL_ERRORS):
        return ConnectorError(
            f"Kafka refuses: {name}.", hint="look at the broker's log, then: cdc -p FILE topics"
        )
    return KafkaUnavailable(
        f"Kafka doesn't answer: {name}.", hint="no action needed; retried automatically", sink=sink
    )


def _of_spark(error: Exception, text: str, sink: str) -> CdcError:
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
