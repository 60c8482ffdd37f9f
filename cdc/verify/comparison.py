"""What comparing a view with its source has found, as plain data: counts and keys, never values."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from cdc.errors import DivergenceError, UndecidedError

SAMPLE = 5
"""Differing keys that a report names per view."""
KNOWN = 1001
"""Differing keys that a comparison knows: one more than are repaired at once."""
PROOFS = 3
"""So often a view that has to be proved equal is compared, as long as it can't be decided."""
Verdict = Literal["equal", "differs", "undecided"]


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
    """Rows proved neither equal nor different: they, or their view, changed whenever they were looked at."""
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
        """Whether every row was proved to be what the source holds."""
        return self.verdict == "equal"

    @property
    def verdict(self) -> Verdict:
        """What is wrong counts before what is undecided."""
        if self.wrong:
            return "differs"
        return "undecided" if self.undecided else "equal"

    @property
    def wrong(self) -> int:
        return self.missing + self.extra + self.different

    def after(self, repair: "Comparison") -> "Comparison":
        """This comparison as it is once the rows that differed have been looked at again."""
        mended = replace(self, missing=repair.missing, extra=repair.extra, different=repair.different)
        mended.undecided += repair.undecided
        mended.repaired = max(0, self.wrong - mended.wrong - repair.undecided)
        mended.sample, mended.known = repair.sample, repair.known
        return mended

    def to_dict(self) -> dict[str, Any]:
        told = {name: value for name, value in asdict(self).items() if name != "known"}
        return {**told, "equal": self.equal, "verdict": self.verdict}

    def add(self, counts: Mapping[str, int], differences: Iterable[Difference]) -> None:
        """Book wrong rows: how many of each kind, and some of them."""
        for kind, count in counts.items():
            setattr(self, kind, getattr(self, kind) + count)
        self.known = sorted([*self.known, *differences], key=lambda one: one.id)[:KNOWN]
        self.sample = self.known[:SAMPLE]


def prove(compare: Callable[[], Sequence[Comparison]], sink: str, again: str) -> None:
    """Compare the views of a sink that nobody sees yet; what couldn't be decided is compared again, all of it.

    `again` is the command that goes on from here.

    Raises:
        DivergenceError: one differs from its source.
        UndecidedError: one can't be proved equal either, however often it is looked at.
    """
    for _ in range(PROOFS):
        comparisons = compare()
        if wrong := [one for one in comparisons if one.verdict == "differs"]:
            raise _divergence(wrong, sink)
        undecided = [one for one in comparisons if one.verdict == "undecided"]
        if not undecided:
            return
    raise UndecidedError(
        f"{undecided[0].undecided:,} rows of {undecided[0].table} in {sink} changed at every look, so that the new"
        " generation can't be proved equal. Readers see what they saw.",
        hint=f"when less is written, to go on with this proof: {again}",
        more=len(undecided) - 1,
    )


def _divergence(wrong: Sequence[Comparison], sink: str) -> DivergenceError:
    first = wrong[0]
    return DivergenceError(
        f"The new generation of {first.table} in {sink} differs from the source: {first.missing}"
        f" rows missing, {first.extra} extra, {first.different} different. Readers see what they saw.",
        hint="the log can't make this view any more: cdc -p FILE topics audit tells which rows",
        more=len(wrong) - 1,
    )
