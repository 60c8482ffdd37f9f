"""The application: which path is answered by which function, behind the guard."""

from collections.abc import Collection
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from cdc.serve import api, pages
from cdc.serve.access import Guard
from cdc.serve.dashboard import Dashboard

STATIC = Path(__file__).parent / "static"


def make_app(dashboard: Dashboard, token: str | None, hosts: Collection[str]) -> ASGIApp:
    """Make the application. `token` None: none is needed. `hosts`: names by which browsers may
    reach it, without a port.
    """
    routes = [
        Route("/", pages.overview),
        Route("/tables", pages.tables),
        Route("/generations", pages.generations),
        Route("/quarantine", pages.quarantine),
        Route("/runbooks/{code}", pages.runbook_page),
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
    app = Starlette(routes=routes, exception_handlers={HTTPException: _show_refusal})
    app.state.dashboard = dashboard
    return Guard(app, token, hosts)


async def _show_refusal(request: Request, error: Exception) -> Response:
    """Answer with an error page, or for programs with a document."""
    assert isinstance(error, HTTPException)
    if request.url.path.startswith("/api/"):
        return JSONResponse({"error": error.detail}, error.status_code)
    return pages.show_error(request, error.status_code, error.detail)
