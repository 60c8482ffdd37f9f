"""The operation log: who ran which changing command, when, and with what result. It is stored in
the topic `<pipeline>.operations`.

Each record has its own key, so compaction removes none. The log has messages of errors, which never
contain secrets or values of rows.
"""

import getpass
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any
from uuid import uuid4

import structlog

from cdc.config.settings import Pipeline
from cdc.errors import CdcError, Interrupted
from cdc.kafka.topic_setup import ensure_topic
from cdc.kafka.topics import Topics
from cdc.model.trace import kind

DONE = "done"
log = structlog.get_logger()


@dataclass(frozen=True)
class Operation:
    """A command that has ended. `at` is its start in Unix seconds, `by` is who ran it."""

    at: float
    by: str
    verb: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    result: str = DONE
    """`done`, or the message of the error that ended it."""
    exit_code: int = 0
    took_s: float = 0.0


@contextmanager
def recording(
    pipeline: Pipeline, verb: str, arguments: Mapping[str, Any], by: str
) -> Iterator[None]:
    """Write the outcome of the block to the log. Exceptions of the block pass through. If the log
    can't be written, a warning is logged.
    """
    began = time.time()
    result = DONE
    exit_code = 0
    try:
        yield
    except CdcError as error:
        result = error.message
        exit_code = error.exit_code
        raise
    except KeyboardInterrupt:
        result = "interrupted"
        exit_code = Interrupted.exit_code
        raise
    except Exception as error:
        result = kind(error)
        exit_code = 1
        raise
    finally:
        took_s = round(time.time() - began, 1)
        write(pipeline, Operation(began, by, verb, dict(arguments), result, exit_code, took_s))


def write(pipeline: Pipeline, operation: Operation) -> None:
    """Append an operation to the log. If that fails, a warning is logged instead."""
    try:
        with Topics(pipeline.kafka) as kafka:
            ensure_topic(kafka, pipeline, pipeline.operations_topic)
            key = f"{operation.at:.3f} {uuid4().hex}".encode()
            kafka.write(pipeline.operations_topic, [(key, json.dumps(asdict(operation)).encode())])
    except CdcError as error:
        log.warning("operation_not_recorded", verb=operation.verb, error=error.message)


def read(pipeline: Pipeline, kafka: Topics) -> list[Operation]:
    """Read the operations, the oldest first. Raises ConnectorError."""
    if pipeline.operations_topic not in kafka.existing([pipeline.operations_topic]):
        return []
    records = kafka.read_all(pipeline.operations_topic)
    operations = (Operation(**json.loads(record.value)) for record in records if record.value)
    return sorted(operations, key=lambda operation: operation.at)


def current_operator() -> str:
    """Return `user@host`."""
    return f"{_user()}@{socket.gethostname()}"


def _user() -> str:
    """Return the user's name, or the number if the system has no name for it."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        # A container may run as a user without an entry.
        return str(os.getuid())
