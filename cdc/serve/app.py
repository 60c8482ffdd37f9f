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

from cdc.serve import action_pages, api, login_pages, pages
from cdc.serve.access.guard import Guard
from cdc.serve.access.sessions import Sessions
from cdc.serve.dashboard import Dashboard

STATIC = Path(__file__).parent / "static"


def make_app(dashboard: Dashboard, sessions: Sessions, hosts: Collection[str]) -> ASGIApp:
    """Make the application. `hosts`: names by which browsers may reach it, without a port."""
    routes = [
        Route("/", pages.overview),
        Route("/tables", pages.tables),
        Route("/generations", pages.generations),
        Route("/quarantine", pages.quarantine),
        Route("/activity", pages.activity),
        Route("/runbooks/{code}", pages.runbook_page),
        Route("/login", login_pages.show_form, methods=["GET"]),
        Route("/login", login_pages.log_in, methods=["POST"]),
        Route("/logout", login_pages.log_out, methods=["POST"]),
        Route("/actions/new", action_pages.ask, methods=["GET"]),
        Route("/actions", action_pages.start, methods=["POST"]),
        Route("/actions/interrupt", action_pages.interrupt, methods=["POST"]),
        Route("/api/status", api.status),
        Route("/api/sample", api.sample),
        Route("/api/lag/{span}", api.lag),
        Route("/api/generations", api.generations),
        Route("/api/quarantine", api.quarantine),
        Route("/api/actions", api.list_actions, methods=["GET"]),
        Route("/api/actions", api.start_action, methods=["POST"]),
        Route("/events", api.events),
        Route("/metrics", api.metrics),
        Route("/livez", api.live),
        Route("/readyz", api.ready),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _show_refusal})
    app.state.dashboard, app.state.sessions = dashboard, sessions
    return Guard(app, sessions, hosts)


async def _show_refusal(request: Request, error: Exception) -> Response:
    """Answer with an error page, or for programs with a document."""
    assert isinstance(error, HTTPException)
    if request.url.path.startswith("/api/"):
        return JSONResponse({"error": error.detail}, error.status_code)
    return pages.show_error(request, error.status_code, error.detail)
