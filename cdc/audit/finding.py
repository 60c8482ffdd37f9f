"""What a topic's audit sees, as plain data: counts and keys, never values; and the findings that it
makes of that.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from cdc.model.finding import Finding, find

MAX_KEYS = 100
"""Most keys that a finding lists; its count is of all."""
RENEW_HINT = "cdc -p FILE topics renew --table TABLE; then rebuild its views"
# By kind: the defect of the rows or records, and the next command. --repair mends the first two.
ROW_DEFECTS: Mapping[str, tuple[str, str]] = {
    "unknown": (
        "rows have a value that no record carries any more",
        "cdc -p FILE topics audit --repair; REPLICA IDENTITY FULL keeps it from coming back",
    ),
    "outdated": (
        "rows have no record since the table's definition changed what they hold",
        "cdc -p FILE topics audit --repair; a run has all rows sent again by itself",
    ),
    "moved": ("keys have records in several partitions, so that these have no order", RENEW_HINT),
    "keyless": ("records have no key: compaction drops them, no view can apply them", RENEW_HINT),
    "foreign": ("records have another key than the table", RENEW_HINT),
    "unreadable": (
        "records are no changes that the views can hold",
        "a rebuild puts them into quarantine: cdc -p FILE quarantine list",
    ),
}
TOPIC_HINTS: Mapping[str, str] = {
    "missing": "cdc -p FILE register",
    "start": RENEW_HINT,
    "retention": "cdc -p FILE topics: it brings the topic up to the file",
    "compaction lag": "cdc -p FILE topics: it brings the topic up to the file",
    "holes": "a longer changes_retention_hours in the pipeline file, then cdc -p FILE topics, "
    "keeps it from coming again",
}
"""By kind: the next command for a topic."""
REPAIRABLE_KINDS = ("unknown", "outdated")
WARNING_KINDS = ("unreadable", "retention", "compaction lag", "holes")
VIEW_KINDS = ("behind", "deletes")
"""Kinds that are about live views. A view that is built from the log now would be right."""


KEYS: Mapping[str, str] = {
    "missing": "topic-missing",
    "partitions": "topic-unfit/partitions",
    "policy": "topic-unfit/policy",
    "start": "topic-unfit/truncated",
    "retention": "setting-differs/delete.retention.ms",
    "compaction lag": "setting-differs/min.compaction.lag.ms",
    "behind": "view-stopped",
    "deletes": "view-stopped",
    "holes": "changes-incomplete",
    "unknown": "records-incomplete/values",
    "outdated": "records-incomplete/outdated",
    "moved": "topic-unfit/moved",
    "keyless": "topic-unfit/keyless",
    "foreign": "topic-unfit/foreign",
    "unreadable": "records-unreadable",
}
"""The key of a finding by the kind of what was seen."""


@dataclass(frozen=True)
class Flaw:
    """What a topic or a view lacks: a defect, or no more than a warning.

    `count` counts rows, keys, records, partitions or views: `what` says which. `sink`: whose view
    it is about.
    """

    kind: str
    count: int
    what: str
    hint: str
    keys: tuple[str, ...] = ()
    sink: str | None = None

    def for_table(self, table: str) -> "Flaw":
        """Fill the table's name into the hint."""
        return replace(self, hint=self.hint.replace("--table TABLE", f"--table {table}"))

    def finding(self, table: str) -> Finding:
        """Make the finding on a table that every report shows."""
        message = f"{table}: {self.what.rstrip('.')}."
        made = find(KEYS[self.kind], table, message, self.hint, table=table, sink=self.sink)
        return replace(made, count=self.count, keys=self.keys)

    @property
    def defect(self) -> bool:
        """Whether a view is wrong, or one built from the log would be, or couldn't be built."""
        return self.kind not in WARNING_KINDS


@dataclass(frozen=True)
class Audit:
    """The audit of one table's topic. Records are those that a read_committed reader gets."""

    table: str
    topic: str
    flaws: tuple[Flaw, ...] = ()
    records: int = 0
    keys: int = 0
    tombstones: int = 0
    repaired: int = 0
    """Rows that were sent again before this audit."""

    @property
    def defects(self) -> list[Flaw]:
        """What is more than a warning."""
        return [flaw for flaw in self.flaws if flaw.defect]

    @property
    def findings(self) -> list[Finding]:
        """What was seen, as findings."""
        return [flaw.finding(self.table) for flaw in self.flaws]

    @property
    def replayable(self) -> bool:
        """Whether a view that is built from the log now would be right."""
        return all(defect.kind in VIEW_KINDS for defect in self.defects)

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
        fields = asdict(replace(self, flaws=()))
        del fields["flaws"]
        findings = zip(self.findings, self.flaws, strict=True)
        return {
            **fields,
            "findings": [{**asdict(finding), "defect": flaw.defect} for finding, flaw in findings],
            "saved": self.saved,
            "dirty_ratio": self.dirty_ratio,
            "replayable": self.replayable,
        }


def row_flaw(kind: str, count: int, keys: tuple[str, ...] = ()) -> Flaw:
    """Describe rows or records of a kind of ROW_DEFECTS."""
    what, hint = ROW_DEFECTS[kind]
    return Flaw(kind, count, f"{count:,} {what}", hint, keys)
