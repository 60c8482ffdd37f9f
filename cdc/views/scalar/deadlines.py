"""When a condition that compares with now() may change its value, while its row stays as it is."""

from collections.abc import Callable, Iterator
from functools import cache

from cdc.views.scalar.instants import microseconds
from cdc.views.scalar.operators import COMPARISONS, NOW, Evaluate, Row, evaluator
from cdc.views.scalar.terms import Term


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
