"""The pages: what was last seen, as HTML. Each page has all its data, so it is read without the
script as well.
"""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markdown_it import MarkdownIt
from rich.filesize import decimal
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from cdc.model.finding import folded, verdict
from cdc.model.finding_codes import CODES
from cdc.model.generation import generation_time
from cdc.model.wording import clock, duration, full_stopped
from cdc.observe.diagnosis import LATE_S, slow_hop
from cdc.observe.status import SinkStatus, Status, ViewStatus
from cdc.serve.api import dashboard_of
from cdc.serve.dashboard import Dashboard
from cdc.serve.drawing import (
    HEIGHT,
    SYMBOLS,
    UNREAD,
    WIDTH,
    describe_hops,
    lay_out_plot,
    lay_out_tall,
    lay_out_wide,
)
from cdc.serve.lag_history import SPANS

SHOWN = 20
"""Most findings, and most records in quarantine, of a page."""
TITLES = {
    "/": "Overview",
    "/tables": "Tables",
    "/generations": "Generations",
    "/quarantine": "Quarantine",
}
LONGEST_SEARCH = 100
FOLDER = Path(__file__).parent / "runbooks"
LINK = re.compile(r'href="([a-z-]+)\.md"')
PAGE = 100
"""Rows of a page."""
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


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        duration=duration,
        clock=clock,
        size=decimal,
        ago=lambda moment: f"{duration(max(0.0, time.time() - moment))} ago",
        ahead=lambda moment: f"in {duration(max(0.0, moment - time.time()))}",
        full_stopped=full_stopped,
        made=generation_time,
    )
    environment.globals.update(
        SORT_NAMES=SORT_NAMES,
        SYMBOLS=SYMBOLS,
        UNREAD=UNREAD,
        TITLES=TITLES,
        WIDTH=WIDTH,
        HEIGHT=HEIGHT,
    )
    return environment


async def overview(request: Request) -> Response:
    """What is the matter, the picture, the lag of the last hour and day."""
    dashboard = dashboard_of(request)
    status = _status(dashboard)
    series = {name: dashboard.history.series(span, time.time()) for name, span in SPANS.items()}
    plots: dict[str, dict[str, Any]] = {}
    for name, measured in series.items():
        for lag in measured:
            plots.setdefault(lag.hop, {})[name] = lay_out_plot(lag)
    hops = describe_hops(status) if status else None
    return show(
        request,
        "overview.html",
        "Overview",
        hops=hops,
        pictures=[lay_out_wide(hops), lay_out_tall(hops)] if hops else [],
        plots=plots,
        **_findings(dashboard, status),
    )


def _findings(dashboard: Dashboard, status: Status | None) -> Mapping[str, Any]:
    """The findings that are shown, folded, and how many more there are."""
    groups = folded(status.findings) if status else []
    return {
        "findings": groups[:SHOWN],
        "further": len(groups) - SHOWN,
        "sentence": dashboard.complete(slow_hop(status)) if status else "",
    }


async def tables(request: Request) -> Response:
    """The views of all sinks."""
    query = request.query_params
    page = query.get("page", "1")
    selection = Selection(
        query.get("search", "")[:LONGEST_SEARCH],
        query.get("sort", "worst") if query.get("sort") in SORTS else "worst",
        int(page) if page.isascii() and page.isdigit() and len(page) < 6 else 1,
    )
    status = _status(dashboard_of(request))
    page_of_rows = select_rows(all_rows(status), selection) if status else None
    return show(request, "tables.html", "Tables", selection=selection, shown=page_of_rows)


async def generations(request: Request) -> Response:
    """The live generation of each view, and those kept for a rollback."""
    status = _status(dashboard_of(request))
    return show(request, "generations.html", "Generations", sinks=status.sinks if status else ())


async def quarantine(request: Request) -> Response:
    """Records that can't be applied: places and reasons, never values."""
    return show(request, "quarantine.html", "Quarantine", most=SHOWN * 10)


async def runbook_page(request: Request) -> Response:
    """The runbook of a finding's code."""
    code = request.path_params["code"]
    text = runbook(code)
    if text is None:
        raise HTTPException(404, "There is no such runbook.")
    return show(request, "runbook.html", f"Runbook: {code}", text=text)


def show(
    request: Request, template: str, title: str, status_code: int = 200, **values: Any
) -> Response:
    """Render a template with what every page has."""
    dashboard = dashboard_of(request)
    status = dashboard.status
    control = dashboard.control
    last_status = status.sample.value if status.sample else None
    common = {
        "title": title,
        "pipeline": dashboard.pipeline,
        "path": request.url.path,
        "status": last_status,
        "sample": status.sample,
        "verdict": verdict(last_status.findings) if last_status else "unknown",
        "control": control.sample.value if control.sample else None,
        "control_sample": control.sample,
        "troubles": [trouble for trouble in (status.trouble, control.trouble) if trouble],
        "complete": dashboard.complete,
    }
    html = _environment().get_template(template).render({**common, **values})
    return HTMLResponse(html, status_code)


def show_error(request: Request, status_code: int, reason: str) -> Response:
    """A page that says why there is none."""
    return show(request, "error.html", "Not possible", status_code, reason=reason)


def _status(dashboard: Dashboard) -> Status | None:
    return dashboard.status.sample.value if dashboard.status.sample else None


@cache
def runbook(code: str) -> str | None:
    """Return the runbook of a finding's code as HTML; None where there is none."""
    path = FOLDER / f"{code}.md"
    if code not in CODES or not path.is_file():
        return None
    text = path.read_text(encoding="utf-8")
    html = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    return LINK.sub(r'href="/runbooks/\1"', str(html)).replace("<pre>", '<pre tabindex="0">')


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
        state = "degraded"
        trouble = f"{view.quarantined:,} in quarantine"
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
