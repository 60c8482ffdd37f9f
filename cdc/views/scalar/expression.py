"""Scalar expressions over one row, written in SQL: evaluated here by Python, and by Postgres in the
query that a view is verified with.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from cdc.views.scalar.instants import microseconds
from cdc.views.scalar.operators import COMPARISONS, NOW, Evaluate, Row, evaluator
from cdc.views.scalar.terms import Term


@dataclass(frozen=True)
class Expression:
    """An expression over the columns of one table.

    text     its normal form: the name of the column if it is nothing else
    columns  names of the columns that it reads
    term     what it computes; None if it is a column
    """

    text: str
    columns: tuple[str, ...]
    term: Term | None = None

    def evaluate(self, row: Mapping[str, Any]) -> Any:
        """Evaluate over a row's values in the document form, as `msgspec.json` decodes them, with
        Decimal for numbers with a fraction. NULL is None, in and out.
        """
        return row[self.text] if self.term is None else self._evaluate(row)

    @property
    def reads_clock(self) -> bool:
        """Whether its value changes with time."""
        return self.term is not None and self.term.reads_clock

    @cached_property
    def _evaluate(self) -> Evaluate:
        assert self.term is not None
        return evaluator(self.term)

    def __getstate__(self) -> dict[str, Any]:
        # The function can't be pickled; each process makes its own.
        return {"text": self.text, "columns": self.columns, "term": self.term}


@cache
def next_change(term: Term) -> Callable[[Row], int | None]:
    """Return the function from a row, with the clock's time in it, to the first instant after that
    time at which the value of the term may be another one, in microseconds since 1970; None: never.
    """
    times = list(_compared_times(term))

    def first_after(row: Row) -> int | None:
        now = microseconds(row[NOW])
        assert now is not None
        texts = [time(row) for time in times]
        instants = [microseconds(text) for text in texts if text is not None]
        # A comparison may change when the clock reaches the time, and right after that.
        later = [
            moment
            for instant in instants
            if instant is not None
            for moment in (instant, instant + 1)
            if moment > now
        ]
        return min(later, default=None)

    return first_after


def _compared_times(term: Term) -> Iterator[Evaluate]:
    """Yield what now() is compared with."""
    if term.operator in COMPARISONS:
        for side, other in (term.arguments, term.arguments[::-1]):
            if side.operator == "now":
                yield evaluator(other)
    for part in term.arguments:
        yield from _compared_times(part)
