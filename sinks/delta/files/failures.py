"""Failures of a warehouse: it can't be read, has no space or gives no permission; another writer's
commit.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from cdc.errors import SinkUnavailable

WRITE_HINT = "make room there, or see who may write to it; it is tried again"
NO_ROOM = "No space left on device|Disk quota exceeded|Read-only file system|File too large"
"""What the operating system says of a disk that takes no more; Java quotes it without a number."""
OS_ERROR = re.compile(
    rf"([A-Z][A-Za-z ]+) \(os error \d+\)|\[[Ee]rrno \d+\] ([A-Z][A-Za-z ]+)|({NO_ROOM})"
)
"""How Rust, Python, Arrow and Java quote an error of the operating system.

Arrow puts a word of its own before it.
"""


def os_error_text(error: Exception) -> str:
    """Extract what the operating system reports from an error's text; empty when it isn't in it."""
    matches = OS_ERROR.findall(str(error))
    return "".join(matches[-1]).strip() if matches else ""


def write_failure(folder: str, error: Exception) -> SinkUnavailable:
    """Make the error that says that a disk or a store takes no more."""
    reason = os_error_text(error) or type(error).__name__
    return SinkUnavailable(
        f"The warehouse folder {folder} can't be written: {reason}.", hint=WRITE_HINT
    )


def read_failure(folder: str, error: Exception) -> SinkUnavailable:
    """Make the error that says that a table can't be read."""
    reason = os_error_text(error) or type(error).__name__
    return SinkUnavailable(
        f"The warehouse folder {folder} can't be read: {reason}.",
        hint="see whether it is mounted, and who may read it; it is tried again",
    )


@contextmanager
def reading(folder: str) -> Iterator[None]:
    """Raise SinkUnavailable where the block can't read a table for what the system says."""
    try:
        yield
    except OSError as error:
        raise read_failure(folder, error) from None


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
