"""Serves the pages on a port until a signal, or until `close`: what was last seen, as HTML, and which path
is answered by which function, behind the guard. Each page has all its data, so it is read without the
script as well.
"""

import asyncio
import contextlib
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import uvicorn
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markdown_it import MarkdownIt
from rich.filesize import decimal
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from cdc.errors import SettingsError
from cdc.model.finding import folded, verdict
from cdc.model.finding_codes import CODES
from cdc.model.generation import generation_time
from cdc.model.wording import clock, duration, full_stopped
from cdc.observe.diagnosis import LATE_S, proof_sentence, slow_hop
from cdc.observe.status import SinkStatus, Status, ViewStatus
from cdc.serve import api
from cdc.serve.access import Access, Guard
from cdc.serve.api import dashboard_of
from cdc.serve.dashboard import SPANS, Dashboard
from cdc.serve.drawing import (
    HEIGHT,
    LINE,
    SYMBOLS,
    UNREAD,
    WIDTH,
    describe_hops,
    lay_out_plot,
    lay_out_tall,
    lay_out_wide,
)

SHOWN = 20
"""Most findings, and most records in quarantine, of a page."""
TITLES = {
    "/": "Overview",
    "/tables": "Tables",
    "/generations": "Generations",
    "/quarantine": "Quarantine",
}
LONGEST_SEARCH = 100
LONGEST_LINE = 26
"""Most characters of a line in a picture; longer ones are cut, and the list beside has them whole."""
FOLDER = Path(__file__).parent / "runbooks"
LINK = re.compile(r'href="([a-z-]+)\.md"')
PAGE = 100
"""Rows of a page."""
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
        cut=lambda text: text if len(text) <= LONGEST_LINE else f"{text[: LONGEST_LINE - 1]}…",
        made=generation_time,
    )
    environment.globals.update(
        SORT_NAMES={sort: name for sort, (name, _) in SORTS.items()},
        SYMBOLS=SYMBOLS,
        UNREAD=UNREAD,
        TITLES=TITLES,
        WIDTH=WIDTH,
        HEIGHT=HEIGHT,
        LINE=LINE,
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
    groups = folded(status.findings) if status else []
    return show(
        request,
        "overview.html",
        "Overview",
        hops=hops,
        pictures=[lay_out_wide(hops), lay_out_tall(hops)] if hops else [],
        plots=plots,
        findings=groups[:SHOWN],
        further=len(groups) - SHOWN,
        sentence=dashboard.complete(slow_hop(status)) if status else "",
        proof=dashboard.complete(proof_sentence(status)) if status else "",
    )


async def tables(request: Request) -> Response:
    query = request.query_params
    search = query.get("search", "")[:LONGEST_SEARCH]
    order = query.get("sort", "worst")
    order = order if order in SORTS else "worst"
    text = query.get("page", "1")
    page = int(text) if text.isascii() and text.isdigit() and len(text) < 6 else 1
    status = _status(dashboard_of(request))
    shown = None
    if status:
        rows = [_row(sink, view) for sink in status.sinks for view in sink.views]
        shown = _select_rows(rows, search, order, page)
    return show(request, "tables.html", "Tables", search=search, order=order, shown=shown)


async def generations(request: Request) -> Response:
    """The live generation of each view, and those kept for a rollback."""
    status = _status(dashboard_of(request))
    return show(request, "generations.html", "Generations", sinks=status.sinks if status else ())


async def quarantine(request: Request) -> Response:
    """Records that can't be applied: places and reasons, never values."""
    return show(request, "quarantine.html", "Quarantine", most=SHOWN * 10)


async def runbook_page(request: Request) -> Response:
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
    """A view. `state` is `degraded`, `ok`, or `unknown` where its lag could not be measured."""

    sink: str
    view: ViewStatus
    state: str
    trouble: str

    @property
    def name(self) -> tuple[str, str]:
        """Table and sink."""
        return self.view.table, self.sink

    @property
    def waiting(self) -> int | None:
        """Records that wait. Offsets without a record, such as marks of transactions, don't."""
        return 0 if self.view.lag_seconds == 0 else self.view.lag_records

    @property
    def rank(self) -> tuple[bool, bool, float, int]:
        """Rank a state for sorting: the worse it is, the greater the number."""
        behind_s = self.view.lag_seconds
        return self.state == "degraded", behind_s is None, behind_s or 0.0, self.waiting or 0


SORTS: Mapping[str, tuple[str, Callable[[Row], Any]]] = {
    "worst": ("worst first", lambda row: row.rank),
    "table": ("table", lambda row: row.name),
    "sink": ("sink", lambda row: row.name[::-1]),
    "behind": ("behind", lambda row: _or_least(row.view.lag_seconds)),
    "waiting": ("waiting", lambda row: _or_least(row.waiting)),
    "changes": ("changes", lambda row: _or_least(row.view.changes)),
    "changed": ("last change", lambda row: row.view.at or 0.0),
    "quarantined": ("quarantine", lambda row: row.view.quarantined),
}
"""The name of each order for people, and its key."""


def _or_least(value: float | None) -> float:
    """Place what isn't known below 0."""
    return -1 if value is None else value


def _select_rows(rows: Sequence[Row], search: str, order: str, page: int) -> Mapping[str, Any]:
    """Choose and sort rows. Every word of the search has to occur in the name of table or sink."""
    words = search.lower().split()
    matching = [row for row in rows if all(word in " ".join(row.name).lower() for word in words)]
    matching.sort(key=lambda row: row.name)
    matching.sort(key=SORTS[order][1], reverse=order not in RISING)
    pages = max(1, -(-len(matching) // PAGE))
    page = min(max(1, page), pages)
    return {
        "rows": matching[(page - 1) * PAGE : page * PAGE],
        "matching": len(matching),
        "total": len(rows),
        "page": page,
        "pages": pages,
    }


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
    return Row(sink.name, view, state, trouble)


MOST = 200
"""Most requests at a time; further ones are refused."""
ENDING_S = 0.05
"""Seconds for connections that are being closed."""
STATIC = Path(__file__).parent / "static"
ROUTES = [
    Route("/", overview),
    Route("/tables", tables),
    Route("/generations", generations),
    Route("/quarantine", quarantine),
    Route("/runbooks/{code}", runbook_page),
    Route("/api/status", api.status),
    Route("/api/sample", api.sample),
    Route("/api/lag/{span}", api.lag),
    Route("/api/generations", api.generations),
    Route("/api/quarantine", api.quarantine),
    Route("/events", api.events),
    Route("/metrics", api.metrics),
    Route("/livez", api.live),
    Route("/readyz", api.ready),
    Mount("/static", StaticFiles(directory=STATIC)),
]


async def _show_refusal(request: Request, error: Exception) -> Response:
    """Answer with an error page, or for programs with a document."""
    assert isinstance(error, HTTPException)
    if request.url.path.startswith("/api/"):
        return JSONResponse({"error": error.detail}, error.status_code)
    return show_error(request, error.status_code, error.detail)


class _Server(uvicorn.Server):
    """Leaves signals to its owner, and ends streams of events before it waits for answers to end."""

    def __init__(self, config: uvicorn.Config, dashboard: Dashboard) -> None:
        super().__init__(config)
        self._dashboard = dashboard

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `PageServer.run`."""
        yield

    async def shutdown(self, sockets: Any = None) -> None:
        self._dashboard.closing.set()
        await super().shutdown(sockets)


class PageServer:
    """A server of one dashboard. It listens from the start, and answers while it runs."""

    def __init__(self, dashboard: Dashboard, access: Access, port: int) -> None:
        """Listen on the port; 0: a free one.

        Raises:
            SettingsError: the port is taken, or the address isn't this machine's.
        """
        self._dashboard = dashboard
        app = Starlette(routes=ROUTES, exception_handlers={HTTPException: _show_refusal})
        app.state.dashboard = dashboard
        config = uvicorn.Config(
            Guard(app, access),
            log_config=None,
            access_log=False,
            server_header=False,
            # Who asks is who connects: a header could claim anything.
            proxy_headers=False,
            lifespan="off",
            ws="none",
            http="h11",
            loop="asyncio",
            limit_concurrency=MOST,
            timeout_graceful_shutdown=5,
        )
        self._server = _Server(config, dashboard)
        address = access.address
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((address, port))
        except OSError as error:
            self._socket.close()
            raise SettingsError(
                f"Can't listen on {address}, port {port}: {error.strerror}.",
                hint="choose another port: cdc -p FILE serve --port PORT",
            ) from error
        self._socket.listen(128)
        shown = f"[{address}]" if family is socket.AF_INET6 else address
        self.url = f"http://{shown}:{self._socket.getsockname()[1]}/"

    def run(self) -> None:
        """Look and answer until SIGINT, SIGTERM or `close`. Called in the main thread."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: self.close())
        self.answer()

    def answer(self) -> None:
        """Look and answer until `close`, in whatever thread."""
        self._dashboard.start()
        try:
            asyncio.run(self._serve())
        finally:
            self._dashboard.close()
            self._socket.close()

    async def _serve(self) -> None:
        await self._server.serve(sockets=[self._socket])
        # Browsers ask again at once for a stream that has ended: such a late connection nobody has
        # closed yet.
        for connection in list(self._server.server_state.connections):
            if transport := getattr(connection, "transport", None):
                transport.close()
        await asyncio.sleep(ENDING_S)

    def close(self) -> None:
        """Have `answer` return. Any thread may call it."""
        self._server.should_exit = True
