"""What comparing a view with its source has found, as plain data: counts and keys, never values."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

SAMPLE = 5
"""Differing keys that a report names per view."""
KNOWN = 1001
"""Differing keys that a comparison knows: one more than are repaired at once."""


@dataclass
class Difference:
    id: str
    kind: str
    """missing, extra, different, or duplicate: counted as extra"""
    column: str | None = None
    """The first column that differs."""


@dataclass
class Comparison:
    """What was found for one table in one sink; extra counts rows that the view holds twice as well."""

    sink: str
    table: str
    source_rows: int = 0
    view_rows: int = 0
    missing: int = 0
    extra: int = 0
    different: int = 0
    undecided: int = 0
    """Rows that changed whenever they were looked at: proved neither equal nor different."""
    rechecked: int = 0
    """Rows that were looked at again, because they had changed meanwhile."""
    repaired: int = 0
    """Rows that differed before they were sent or deleted through the log, and are equal now."""
    source_s: float = 0.0
    view_s: float = 0.0
    """Seconds that it took to read and hash either side; the source is read once for all sinks."""
    scope: str = "all rows"
    sample: list[Difference] = field(default_factory=list)
    known: list[Difference] = field(default_factory=list, repr=False)
    """What `sample` begins; not part of a report."""

    @property
    def equal(self) -> bool:
        return not (self.missing or self.extra or self.different)

    @property
    def wrong(self) -> int:
        return self.missing + self.extra + self.different

    def after(self, repair: "Comparison") -> "Comparison":
        """This comparison as it is once the rows that differed have been looked at again."""
        mended = replace(self, missing=repair.missing, extra=repair.extra, different=repair.different)
        mended.undecided += repair.undecided
        mended.repaired = self.wrong - mended.wrong
        mended.sample, mended.known = repair.sample, repair.known
        return mended

    def to_dict(self) -> dict[str, Any]:
        told = {name: value for name, value in asdict(self).items() if name != "known"}
        return {**told, "equal": self.equal}

    def add(self, counts: Mapping[str, int], differences: Iterable[Difference]) -> None:
        """Book wrong rows: how many of each kind, and some of them."""
        for kind, count in counts.items():
            setattr(self, kind, getattr(self, kind) + count)
        self.known = sorted([*self.known, *differences], key=lambda one: one.id)[:KNOWN]
        self.sample = self.known[:SAMPLE]
