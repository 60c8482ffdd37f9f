"""Failures of a write to a warehouse: no space or no permission, or another writer's commit in between."""

import re

from cdc.errors import SinkUnavailable

WRITABLE = "make room there, or see who may write to it; it is tried again"
REASON = re.compile(r"([A-Z][A-Za-z ]+) \(os error \d+\)|\[[Ee]rrno \d+\] ([A-Z][A-Za-z ]+)")
"""How Rust, Python and Arrow tell what the operating system said; Arrow says its own word for it before."""


def refused(error: Exception) -> str:
    """What the operating system said to a write, when it was that."""
    said = REASON.findall(str(error))
    return "".join(said[-1]).strip() if said else ""


def unwritable(folder: str, error: Exception) -> SinkUnavailable:
    """What to say of a disk, or a store, that takes no more."""
    return SinkUnavailable(
        f"The warehouse folder {folder} can't be written: {refused(error) or type(error).__name__}.", hint=WRITABLE
    )


class Contended(SinkUnavailable):
    """Another commit came in between; to be tried again with what the table is after it."""


def contended() -> Contended:
    return Contended(
        "Somebody else committed to the Delta table at the same time.", hint="nothing to do: it is tried again"
    )


def conflicting(error: Exception) -> bool:
    """Whether a commit failed because of another. In Python these errors have no class in common, but their module."""
    return type(error).__module__.startswith("delta.exceptions")
