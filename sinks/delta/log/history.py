"""What the history of a Delta table says of where our view stands in it: our commits, and what others did above them.

Others may rearrange files and set properties. RESTORE leads back to what the version that it names says. Whoever else
changes rows makes the position below untrue: that is told, and nothing is built on it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cdc.model.position import Position, ViewCheckpoint

RESTORE = "RESTORE"
CLEARED = ViewCheckpoint(Position("", ()))
"""What a commit says that made a table without rows: the view stands nowhere."""
Commit = Mapping[str, Any]
"""One of a table's history: version, operation, operationParameters, userMetadata."""


@dataclass(frozen=True)
class Standing:
    """`stored`: our last word on the rows that there are; `trouble`: why it isn't true of them."""

    stored: ViewCheckpoint | None
    trouble: str = ""


def standing(
    history: Sequence[Commit], changed: Callable[[int], bool], restored: Callable[[int], int | None]
) -> Standing | None:
    """Where a view stands by the commits of its table, the newest first; None when older ones have to tell.

    changed: whether the commit of a version brought or removed rows; restored: the version that a RESTORE has brought
    back, where it doesn't name it.
    """
    trouble, upto = "", float("inf")
    for commit in history:
        version = commit["version"]
        if version > upto:
            continue
        text = commit.get("userMetadata") or ""
        if text.startswith(ViewCheckpoint.JSON_START):
            stored = ViewCheckpoint.from_json(text)
            return Standing(None if stored.position == CLEARED.position else stored, trouble)
        if commit["operation"] == RESTORE:
            back = _named(commit, restored)
            if back is None:
                return Standing(None, f"{RESTORE} (version {version}) doesn't tell to which version")
            upto = back
        elif not trouble and changed(version):
            trouble = f"{commit['operation']} (version {version}) of somebody else has changed its rows"
    first = bool(history) and history[-1]["version"] == 0
    return Standing(None, trouble) if first else None


def _named(commit: Commit, restored: Callable[[int], int | None]) -> int | None:
    version = (commit.get("operationParameters") or {}).get("version")
    return restored(commit["version"]) if version in (None, "", "null") else int(version)
