"""Serves the pages on a port until a signal, or until `close`: which path is answered by which function,
behind the guard.
"""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from cdc.errors import SettingsError
from cdc.serve import api, pages
from cdc.serve.access import Access, Guard
from cdc.serve.dashboard import Dashboard

MOST = 200
"""Most requests at a time; further ones are refused."""
ENDING_S = 0.05
"""Seconds for connections that are being closed."""
STATIC = Path(__file__).parent / "static"
ROUTES = [
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


async def _show_refusal(request: Request, error: Exception) -> Response:
    """Answer with an error page, or for programs with a document."""
    assert isinstance(error, HTTPException)
    if request.url.path.startswith("/api/"):
        return JSONResponse({"error": error.detail}, error.status_code)
    return pages.show_error(request, error.status_code, error.detail)


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
        """End streams, then answers."""
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
