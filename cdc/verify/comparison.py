"""The comparison of a view with its source, as plain data: counts and keys, never values."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from cdc.errors import DivergenceError, UndecidedError

SAMPLE = 5
"""Differing keys that a report names per view."""
MAX_DIFFERENCES = 1001
"""Differing keys that a comparison keeps: one more than are repaired at once."""
PROOFS = 3
"""Comparisons of a view that has to be proved equal, while the verdict is undecided."""
Verdict = Literal["equal", "differs", "undecided"]
View = tuple[str, str]
"""The names of a sink and a table."""


@dataclass(frozen=True)
class Options:
    """Options of a comparison.

    sample      percent of the buckets of ids, drawn for every call; the same buckets on both sides
    since_ms    compare only rows that have a record in the log since then, Unix milliseconds
    rate        limit of rows per second that are read from the source
    timeout_s   limit of each wait for the views
    """

    sample: float | None = None
    since_ms: int | None = None
    rate: float | None = None
    timeout_s: float = 300.0

    @property
    def scope(self) -> str:
        return "all rows" if self.sample is None else f"{self.sample:g} % of the rows"

    @property
    def proves(self) -> bool:
        """Whether a comparison proves a view that it finds equal. Only one of all rows does."""
        return self.sample is None and self.since_ms is None


@dataclass
class Difference:
    """A row that differs, without its values."""

    id: str
    kind: str
    """missing, extra, different, or duplicate: counted as extra"""
    column: str | None = None
    """The first column that differs."""


@dataclass
class Comparison:
    """The result for one table in one sink. `extra` also counts rows that the view holds twice."""

    sink: str
    table: str
    source_rows: int = 0
    view_rows: int = 0
    missing: int = 0
    extra: int = 0
    different: int = 0
    undecided: int = 0
    """Rows proved neither equal nor different: they or their view changed at every comparison."""
    closed: int = 0
    """Rows of windows that are closed, which weren't compared: the source may have changed since."""
    purged: int = 0
    """Events that the source has no longer; or rows that differ, and are made of such events. They
    weren't compared."""
    expired: int = 0
    """Rows that the view lacks because they have expired: `ttl`."""
    rechecked: int = 0
    """Rows that were compared again, because they had changed meanwhile."""
    repaired: int = 0
    """Rows that differed before they were sent or deleted through the log, and are equal now."""
    source_s: float = 0.0
    view_s: float = 0.0
    """Seconds that it took to read and hash either side; the source is read once for all sinks."""
    scope: str = "all rows"
    proves: bool = True
    """Whether all rows were compared. Otherwise nothing is proved of the view."""
    problem: str | None = None
    """Why the view couldn't be compared, in a sentence: it waits for something."""
    hint: str | None = None
    """The command that ends the wait."""
    sample: list[Difference] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list, repr=False)
    """Up to MAX_DIFFERENCES differing rows; `sample` is their beginning. Not in a report."""

    @property
    def equal(self) -> bool:
        """Whether every row was proved to be what the source holds."""
        return self.verdict == "equal"

    @property
    def verdict(self) -> Verdict:
        """Differing rows count before undecided ones."""
        if self.wrong:
            return "differs"
        return "undecided" if self.undecided or self.problem else "equal"

    @property
    def wrong(self) -> int:
        """Rows that differ in any way."""
        return self.missing + self.extra + self.different

    def with_recheck(self, recheck: "Comparison") -> "Comparison":
        """Return this comparison with the results of a recheck of its rows after a repair."""
        updated = replace(
            self, missing=recheck.missing, extra=recheck.extra, different=recheck.different
        )
        updated.undecided += recheck.undecided
        updated.repaired = max(0, self.wrong - updated.wrong - recheck.undecided)
        updated.sample = recheck.sample
        updated.differences = recheck.differences
        return updated

    def to_dict(self) -> dict[str, Any]:
        """Return the fields of a report: all but `differences`, with `equal` and `verdict`."""
        fields = {name: value for name, value in asdict(self).items() if name != "differences"}
        return {**fields, "equal": self.equal, "verdict": self.verdict}

    def leave_out_wrong(self) -> None:
        """Count rows of the view that differ as made of purged events: nothing says what they must be.
        One that is missing stays so, since the source has events for it.
        """
        if self.extra or self.different:
            self.proves = False
        self.purged += self.extra + self.different
        self.extra = self.different = 0
        self.differences = [row for row in self.differences if row.kind == "missing"]
        self.sample = self.differences[:SAMPLE]

    def add(self, counts: Mapping[str, int], differences: Iterable[Difference]) -> None:
        """Add wrong rows: how many of each kind, and some of them."""
        for kind, count in counts.items():
            setattr(self, kind, getattr(self, kind) + count)
        by_id = sorted([*self.differences, *differences], key=lambda difference: difference.id)
        self.differences = by_id[:MAX_DIFFERENCES]
        self.sample = self.differences[:SAMPLE]


def prove(compare: Callable[[], Sequence[Comparison]], sink: str, command: str) -> None:
    """Prove that the views of a new generation equal their source.

    Undecided views are compared again, all rows.

    `command` is what an operator runs to go on from here.

    Raises:
        DivergenceError: a view differs from its source.
        UndecidedError: a view couldn't be decided in PROOFS comparisons.
    """
    for _ in range(PROOFS):
        comparisons = compare()
        if wrong := [comparison for comparison in comparisons if comparison.verdict == "differs"]:
            first = wrong[0]
            raise DivergenceError(
                f"The new generation of {first.table} in {sink} differs from the source:"
                f" {first.missing} rows missing, {first.extra} extra, {first.different} different."
                " Readers see what they saw.",
                hint="the log can't make this view any more: cdc -p FILE topics audit shows which rows",
                more=len(wrong) - 1,
            )
        undecided = [comparison for comparison in comparisons if comparison.verdict == "undecided"]
        if not undecided:
            return
    raise UndecidedError(
        f"{undecided[0].undecided:,} rows of {undecided[0].table} in {sink} changed at every look,"
        " so that the new generation can't be proved equal. Readers see what they saw.",
        hint=f"when less is written, to go on with this proof: {command}",
        more=len(undecided) - 1,
    )
