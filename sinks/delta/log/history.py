"""The history of a Delta table: which checkpoint of ours is true of its rows.

Above our last commit others may have committed. They may rearrange files and set properties.
RESTORE leads back to what the version that it names says. Whoever else changes rows makes our
checkpoint untrue: that is reported, and nothing is built on it.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cdc.model.position import Position, ViewCheckpoint

RESTORE = "RESTORE"
CLEARED = ViewCheckpoint(Position("", ()))
"""The checkpoint of a commit that has emptied a table: the view has no position."""
Commit = Mapping[str, Any]
"""A commit of a table: version, operation, operationParameters, userMetadata."""


@dataclass(frozen=True)
class Standing:
    """Our last checkpoint in a table, and why it isn't true of the table's rows.

    trouble: empty when it is true.
    """

    checkpoint: ViewCheckpoint | None
    trouble: str = ""


def standing(
    history: Iterable[Commit], changed: Callable[[int], bool], restored: Callable[[int], int | None]
) -> Standing | None:
    """Find the position of a view by the commits of its table, the newest first.

    Returns None when the answer is in older commits than these.

    changed: whether the commit of a version added or removed rows.
    restored: returns the version that a RESTORE has brought back, where it doesn't name it.
    """
    trouble = ""
    ceiling = float("inf")
    version = -1
    for commit in history:
        version = commit["version"]
        if version > ceiling:
            continue
        text = commit.get("userMetadata") or ""
        if text.startswith(ViewCheckpoint.JSON_START):
            checkpoint = ViewCheckpoint.from_json(text)
            return Standing(
                None if checkpoint.position == CLEARED.position else checkpoint, trouble
            )
        if commit.get("operation") == RESTORE:
            restored_version = _restored_version(commit, restored)
            if restored_version is None:
                return Standing(None, f"{RESTORE} (version {version}) doesn't say to which version")
            ceiling = restored_version
        elif not trouble and changed(version):
            trouble = f"{commit.get('operation')} (version {version}) of somebody else has changed its rows"
    return Standing(None, trouble) if version == 0 else None


def _restored_version(commit: Commit, restored: Callable[[int], int | None]) -> int | None:
    version = (commit.get("operationParameters") or {}).get("version")
    if version in (None, "", "null"):
        return restored(commit["version"])
    return int(version)
