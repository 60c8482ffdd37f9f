"""The views of all sinks as rows of a table: searched, sorted, a page at a time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cdc.observe.diagnosis import LATE_S
from cdc.observe.status import SinkStatus, Status, ViewStatus

PAGE = 100
"""Rows of a page."""


@dataclass(frozen=True)
class Row:
    """A view. `state` is a severity, `ok`, or `unknown` where its lag could not be measured."""

    table: str
    sink: str
    state: str
    trouble: str
    waiting: int | None
    behind_s: float | None
    changes: int | None
    changed_at: float | None
    quarantined: int
    generation: str | None

    @property
    def rank(self) -> tuple[bool, bool, float, int]:
        """Rank a state for sorting: the worse it is, the greater the number."""
        troubled = self.state in ("down", "degraded")
        return troubled, self.behind_s is None, self.behind_s or 0.0, self.waiting or 0


SORTS: Mapping[str, Callable[[Row], Any]] = {
    "worst": lambda row: row.rank,
    "table": lambda row: (row.table, row.sink),
    "sink": lambda row: (row.sink, row.table),
    "waiting": lambda row: -1 if row.waiting is None else row.waiting,
    "behind": lambda row: -1.0 if row.behind_s is None else row.behind_s,
    "changes": lambda row: -1 if row.changes is None else row.changes,
    "changed": lambda row: row.changed_at or 0.0,
    "quarantined": lambda row: row.quarantined,
}
"""Sort keys by the name of the order."""
SORT_NAMES = {
    "worst": "worst first",
    "table": "table",
    "sink": "sink",
    "behind": "behind",
    "waiting": "waiting",
    "changes": "changes",
    "changed": "last change",
    "quarantined": "quarantine",
}
RISING = ("table", "sink")
"""Orders that begin with the least; all others begin with the greatest."""


@dataclass(frozen=True)
class Selection:
    """What a reader of the table wants to see."""

    search: str = ""
    sort: str = "worst"
    page: int = 1


@dataclass(frozen=True)
class RowPage:
    """The rows of a page, of how many that match, of how many there are."""

    rows: Sequence[Row]
    matching: int
    total: int
    page: int
    pages: int


def all_rows(status: Status) -> list[Row]:
    """Make a row of each view."""
    return [_row(sink, view) for sink in status.sinks for view in sink.views]


def select_rows(rows: Sequence[Row], selection: Selection) -> RowPage:
    """Choose and sort rows. Every word of the search has to occur in the name of table or sink."""
    words = selection.search.lower().split()
    matching = [
        row for row in rows if all(word in f"{row.table} {row.sink}".lower() for word in words)
    ]
    order = selection.sort if selection.sort in SORTS else "worst"
    matching.sort(key=lambda row: (row.table, row.sink))
    matching.sort(key=SORTS[order], reverse=order not in RISING)
    pages = max(1, -(-len(matching) // PAGE))
    page = min(max(1, selection.page), pages)
    shown = matching[(page - 1) * PAGE : page * PAGE]
    return RowPage(shown, len(matching), len(rows), page, pages)


def _row(sink: SinkStatus, view: ViewStatus) -> Row:
    waits = sink.aside.get(view.table)
    trouble = view.problem or (waits[0] if waits else "")
    if trouble:
        state = "degraded"
    elif view.quarantined:
        state, trouble = "degraded", f"{view.quarantined:,} in quarantine"
    elif (view.lag_seconds or 0.0) >= LATE_S:
        state = "degraded"
    else:
        state = "unknown" if view.lag_records is None else "ok"
    return Row(
        view.table,
        sink.name,
        state,
        trouble,
        0 if view.lag_seconds == 0 else view.lag_records,
        view.lag_seconds,
        view.changes,
        view.at,
        view.quarantined,
        view.generation,
    )
