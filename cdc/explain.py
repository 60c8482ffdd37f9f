"""Failures inside Spark come as text: give them back their class, and never let a row's value through."""

import re

from cdc import decode, rows
from cdc.errors import CdcError, ConnectorError, DecodeError, SinkError, SinkRejected, SinkUnavailable, SparkError
from cdc.session import MEMORY_HINT


class Unholdable(SinkRejected):
    """A sink has no way to hold a value."""


def explain(error: Exception, sink: str) -> CdcError:
    """Name a failure inside Spark by what a person can do about it."""
    text = str(error)
    if told := _of_a_record(text, sink):
        return told
    if "KafkaIllegalStateException" in text or "OffsetOutOfRange" in text or "data loss" in text.lower():
        return ConnectorError(
            "Kafka no longer holds records that the view still needs.",
            hint=f"cdc -p FILE rebuild {sink}",
            sink=sink,
        )
    if "org.apache.kafka.common.errors" in text:
        return SinkUnavailable("Kafka doesn't answer.", hint="nothing to do: it is tried again", sink=sink)
    if "OutOfMemoryError" in text:
        return SparkError("Spark has run out of memory.", hint=MEMORY_HINT)
    # Spark's message may quote a value; its class never does.
    condition = re.search(r"\[([A-Z][A-Z0-9_.]+)\]", text)
    what = condition[1] if condition else type(error).__name__
    return SinkError(f"Spark failed: {what}.", hint="see the log for the whole trace", sink=sink)


def _of_a_record(text: str, sink: str) -> CdcError | None:
    if place := _after(text, decode.UNDECODABLE):
        return DecodeError(
            f"A record is not what the connector writes: {place}.",
            hint="look at the record; who else writes to this topic?",
            sink=sink,
        )
    if "MALFORMED_RECORD_IN_PARSING" in text:
        return DecodeError(
            "A row doesn't fit the columns that its table has now.",
            hint="has a column's type changed? start `cdc run` again, so that it reads the table's columns anew",
            sink=sink,
        )
    if column := _after(text, rows.UNHOLDABLE):
        return Unholdable(
            f"{sink} has no way to hold a value of {column}.",
            hint="change the row, or leave the column out with `exclude`",
            sink=sink,
        )
    return None


def _after(text: str, words: str) -> str | None:
    """What follows the words of a `raise_error` up to the end of its sentence."""
    found = re.search(rf"{words} ([^'\n]+?)(?:\.? SQLSTATE|'|\n|$)", text)
    return found[1] if found else None
