"""What an audit of a topic has found, as plain data: counts and keys, never values."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

KEYS = 100
"""Keys that a finding names; it counts all."""
ANEW = "cdc -p FILE topics renew --table TABLE, then cdc -p FILE rebuild of its views"
# What the rows of a topic are wrong about, and what is to be done: with --repair, the first two.
ROWS: Mapping[str, tuple[str, str]] = {
    "unknown": (
        "rows have a value that no record carries any more",
        "cdc -p FILE topics audit --repair; REPLICA IDENTITY FULL keeps it from coming back",
    ),
    "outdated": (
        "rows have no record since the table's definition changed what they hold",
        "cdc -p FILE topics audit --repair, or cdc run, which has all rows sent again by itself",
    ),
    "moved": ("keys have records in several partitions, so that these have no order", ANEW),
    "keyless": ("records have no key: compaction drops them, no view can apply them", ANEW),
    "foreign": ("records have another key than the table", ANEW),
    "unreadable": (
        "records are no changes that the views can hold",
        "a rebuild puts them into quarantine: cdc -p FILE quarantine list",
    ),
}
REPAIRABLE = ("unknown", "outdated")
WARNINGS = ("unreadable", "retention", "holes")
OF_VIEWS = ("behind", "deletes")
"""Of views as they are: what is made from the log now would be right."""


@dataclass(frozen=True)
class Finding:
    """`count` is of rows, keys, records, partitions or views, as `what` says."""

    kind: str
    count: int
    what: str
    hint: str
    keys: tuple[str, ...] = ()

    def of(self, table: str) -> "Finding":
        """With the table's name in what is to be done."""
        return replace(self, hint=self.hint.replace("--table TABLE", f"--table {table}"))

    @property
    def defect(self) -> bool:
        """Whether a view that is made from the log would be wrong, or couldn't be made; or one that is there is."""
        return self.kind not in WARNINGS


@dataclass(frozen=True)
class Audit:
    """One table's topic; records are those that a read_committed reader gets."""

    table: str
    topic: str
    findings: tuple[Finding, ...] = ()
    records: int = 0
    keys: int = 0
    tombstones: int = 0
    repaired: int = 0
    """Rows that were sent again before this was found."""

    @property
    def defects(self) -> list[Finding]:
        return [one for one in self.findings if one.defect]

    @property
    def replayable(self) -> bool:
        """Whether a view that is made from the log now would be right."""
        return all(one.kind in OF_VIEWS for one in self.defects)

    @property
    def saved(self) -> int:
        """Records that a compaction would remove; tombstones that it keeps for a while aren't among them."""
        return max(0, self.records - self.keys)

    @property
    def dirty_ratio(self) -> float:
        """The same as a part of all records."""
        return round(self.saved / self.records, 4) if self.records else 0.0

    def to_dict(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "findings": [{**asdict(one), "defect": one.defect} for one in self.findings],
            "saved": self.saved,
            "dirty_ratio": self.dirty_ratio,
            "replayable": self.replayable,
        }


def of_rows(kind: str, count: int, keys: tuple[str, ...] = ()) -> Finding:
    what, hint = ROWS[kind]
    return Finding(kind, count, f"{count:,} {what}", hint, keys)
