"""The pages: what was last seen, as HTML. Each page has all its data, so it is read without the
script as well.
"""

import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from rich.filesize import decimal
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from cdc.model.finding import folded, verdict
from cdc.model.generation import generation_time
from cdc.model.wording import clock, duration, full_stopped
from cdc.observe.diagnosis import slow_hop
from cdc.observe.status import Status
from cdc.serve.dashboard import Dashboard
from cdc.serve.drawing.hops import SYMBOLS, UNREAD, describe_hops
from cdc.serve.drawing.picture import lay_out_tall, lay_out_wide
from cdc.serve.drawing.plot import HEIGHT, WIDTH, lay_out_plot
from cdc.serve.looks.lag_history import SPANS
from cdc.serve.runbooks import runbook
from cdc.serve.views_table import SORT_NAMES, SORTS, Selection, all_rows, select_rows

SHOWN = 20
"""Most findings, and most records in quarantine, of a page."""
TITLES = {
    "/": "Overview",
    "/tables": "Tables",
    "/generations": "Generations",
    "/quarantine": "Quarantine",
}
LONGEST_SEARCH = 100


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
    dashboard = _dashboard(request)
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
    status = _status(_dashboard(request))
    page_of_rows = select_rows(all_rows(status), selection) if status else None
    return show(request, "tables.html", "Tables", selection=selection, shown=page_of_rows)


async def generations(request: Request) -> Response:
    """The live generation of each view, and those kept for a rollback."""
    status = _status(_dashboard(request))
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
    dashboard = _dashboard(request)
    status, control = dashboard.status, dashboard.control
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


def _dashboard(request: Request) -> Dashboard:
    dashboard: Dashboard = request.app.state.dashboard
    return dashboard


def _status(dashboard: Dashboard) -> Status | None:
    return dashboard.status.sample.value if dashboard.status.sample else None
