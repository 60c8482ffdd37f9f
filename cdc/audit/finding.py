"""Findings of a topic's audit, as plain data: counts and keys, never values."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

MAX_KEYS = 100
"""Most keys that a finding lists; its count is of all."""
RENEW_HINT = "cdc -p FILE topics renew --table TABLE, then cdc -p FILE rebuild of its views"
# By kind of finding: the defect of the rows or records, and the next command. --repair mends the
# first two.
ROW_FINDINGS: Mapping[str, tuple[str, str]] = {
    "unknown": (
        "rows have a value that no record carries any more",
        "cdc -p FILE topics audit --repair; REPLICA IDENTITY FULL keeps it from coming back",
    ),
    "outdated": (
        "rows have no record since the table's definition changed what they hold",
        "cdc -p FILE topics audit --repair, or cdc run, which has all rows sent again by itself",
    ),
    "moved": ("keys have records in several partitions, so that these have no order", RENEW_HINT),
    "keyless": ("records have no key: compaction drops them, no view can apply them", RENEW_HINT),
    "foreign": ("records have another key than the table", RENEW_HINT),
    "unreadable": (
        "records are no changes that the views can hold",
        "a rebuild puts them into quarantine: cdc -p FILE quarantine list",
    ),
}
REPAIRABLE_KINDS = ("unknown", "outdated")
WARNING_KINDS = ("unreadable", "retention", "holes")
VIEW_KINDS = ("behind", "deletes")
"""Kinds of findings about live views. A view that is built from the log now would be right."""


@dataclass(frozen=True)
class Finding:
    """A defect or a warning.

    `count` counts rows, keys, records, partitions or views: `what` says which.
    """

    kind: str
    count: int
    what: str
    hint: str
    keys: tuple[str, ...] = ()

    def for_table(self, table: str) -> "Finding":
        """Fill the table's name into the hint."""
        return replace(self, hint=self.hint.replace("--table TABLE", f"--table {table}"))

    @property
    def defect(self) -> bool:
        """Whether a view is wrong, or one built from the log would be, or couldn't be built."""
        return self.kind not in WARNING_KINDS


@dataclass(frozen=True)
class Audit:
    """The audit of one table's topic. Records are those that a read_committed reader gets."""

    table: str
    topic: str
    findings: tuple[Finding, ...] = ()
    records: int = 0
    keys: int = 0
    tombstones: int = 0
    repaired: int = 0
    """Rows that were sent again before this audit."""

    @property
    def defects(self) -> list[Finding]:
        """The findings that are no warnings."""
        return [finding for finding in self.findings if finding.defect]

    @property
    def replayable(self) -> bool:
        """Whether a view that is built from the log now would be right."""
        return all(finding.kind in VIEW_KINDS for finding in self.defects)

    @property
    def saved(self) -> int:
        """Records that a compaction would remove.

        Tombstones that it keeps for a while aren't among them.
        """
        return max(0, self.records - self.keys)

    @property
    def dirty_ratio(self) -> float:
        """The share of `saved` in all records, 0 to 1."""
        return round(self.saved / self.records, 4) if self.records else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the fields of a report, with those that are derived."""
        return {
            **asdict(self),
            "findings": [
                {**asdict(finding), "defect": finding.defect} for finding in self.findings
            ],
            "saved": self.saved,
            "dirty_ratio": self.dirty_ratio,
            "replayable": self.replayable,
        }


def row_finding(kind: str, count: int, keys: tuple[str, ...] = ()) -> Finding:
    """Make a finding about rows or records, of a kind of ROW_FINDINGS."""
    what, hint = ROW_FINDINGS[kind]
    return Finding(kind, count, f"{count:,} {what}", hint, keys)
