"""Put sentences and times the same way on every screen."""

import time
from collections.abc import Callable
from dataclasses import asdict, is_dataclass
from typing import Any

ENDS = (".", "?", "!", ":", ";")
UNKNOWN = "unknown"
COMMAND_FIELDS = ("message", "hint", "fix", "aside", "slow_hop")
"""Fields of JSON documents whose texts name commands of this program."""


def full_stopped(text: str) -> str:
    """The text with a full stop, unless it ends in a mark already."""
    text = text.rstrip()
    return text if text.endswith(ENDS) else f"{text}."


def quoted_name(table: str) -> str:
    """The name of a table, as schema.table, as a statement takes it."""
    return ".".join('"' + part.replace('"', '""') + '"' for part in table.split(".", 1))


def advice(message: str, hint: str) -> str:
    """A problem and what to do next, as two sentences."""
    return f"{full_stopped(message)} Next: {full_stopped(hint)}"


def duration(seconds: float) -> str:
    """A duration as people say it: 12 s, 3 min, 2 h."""
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def since_text(moment: float | None) -> str:
    """When a state began and how long ago that is; empty if the moment is unknown. Unix seconds."""
    return (
        ""
        if moment is None
        else f"since {clock(moment)}, {duration(max(0.0, time.time() - moment))}"
    )


def clock(moment: float) -> str:
    """The local time of day of a moment in Unix seconds, with its date unless that is today."""
    local = time.localtime(moment)
    today = local[:3] == time.localtime()[:3]
    return time.strftime("%H:%M:%S" if today else "%Y-%m-%d %H:%M:%S", local)


def completed_document(node: Any, complete: Callable[[str], str], within: bool = False) -> Any:
    """A document whose commands `complete` has completed, in the fields of COMMAND_FIELDS alone.
    `within`: the node is in such a field.
    """
    if is_dataclass(node) and not isinstance(node, type):
        node = asdict(node)
    if isinstance(node, dict):
        return {
            key: completed_document(value, complete, within or key in COMMAND_FIELDS)
            for key, value in node.items()
        }
    if isinstance(node, list | tuple):
        return [completed_document(value, complete, within) for value in node]
    return complete(node) if within and isinstance(node, str) else node
