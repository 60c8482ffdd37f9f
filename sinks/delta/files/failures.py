"""Failures of a warehouse: it can't be read, has no space or gives no permission; another writer's
commit.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from cdc.errors import SinkUnavailable

WRITE_HINT = "make room there, or see who may write to it; it is tried again"
READ_HINT = "see whether it is mounted, and who may read it; it is tried again"
STORE_HINT = (
    "see that the bucket exists, and the credentials, region and endpoint in the environment of the run and of"
    " Spark's executors; it is tried again"
)
NO_ROOM = "No space left on device|Disk quota exceeded|Read-only file system|File too large"
"""What the operating system says of a disk that takes no more; Java quotes it without a number."""
OS_ERROR = re.compile(
    rf"([A-Z][A-Za-z ]+) \(os error \d+\)|\[[Ee]rrno \d+\] ([A-Z][A-Za-z ]+)|({NO_ROOM})"
)
"""How Rust, Python, Arrow and Java quote an error of the operating system.

Arrow puts a word of its own before it.
"""


class StoreError(OSError):
    """What an object store answers, or a file system that can't be used, in words."""


def reason_of(error: Exception) -> str:
    """Say why a file system or a store has failed, in its own words."""
    if isinstance(error, StoreError):
        return str(error)
    matches = OS_ERROR.findall(str(error))
    return "".join(matches[-1]).strip() if matches else type(error).__name__


def write_hint(location: str) -> str:
    """Return what helps where a warehouse can't be written."""
    return STORE_HINT if "://" in location else WRITE_HINT


def write_failure(location: str, error: Exception) -> SinkUnavailable:
    """Make the error that says that a disk or a store takes no more."""
    message = f"The warehouse {_name(location)} can't be written: {reason_of(error)}."
    return SinkUnavailable(message, hint=write_hint(location))


def read_failure(location: str, error: Exception) -> SinkUnavailable:
    """Make the error that says that a table can't be read."""
    message = f"The warehouse {_name(location)} can't be read: {reason_of(error)}."
    return SinkUnavailable(message, hint=STORE_HINT if "://" in location else READ_HINT)


@contextmanager
def reading(location: str) -> Iterator[None]:
    """Raise SinkUnavailable where the block can't read a table."""
    try:
        yield
    except OSError as error:
        raise read_failure(location, error) from None


@contextmanager
def writing(location: str) -> Iterator[None]:
    """Raise SinkUnavailable where the block can't write to a table."""
    try:
        yield
    except OSError as error:
        raise write_failure(location, error) from None


def _name(location: str) -> str:
    return location if "://" in location else f"folder {location}"


class CommitConflict(SinkUnavailable):
    """Another commit came in between.

    The batch is tried again with the table as that commit has left it.
    """


def commit_conflict() -> CommitConflict:
    """Make the error that says so."""
    return CommitConflict(
        "Somebody else committed to the Delta table at the same time.",
        hint="no action needed; retried automatically",
    )
