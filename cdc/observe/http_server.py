"""An HTTP server for figures and probes, in a thread of its own.

Nobody is asked for a token: what is served has names of tables and sinks, codes and numbers, no
values of rows. It changes nothing.
"""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from cdc.errors import SettingsError

LOOPBACK = "127.0.0.1"
REQUEST_S = 10.0
"""Seconds after which a client that sends no request, or takes no answer, is disconnected: each has
a thread.
"""
Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]
"""What WSGI calls for each request."""


@dataclass(frozen=True)
class Listener:
    """Where to serve: a port, 0 for a free one, and an address of this machine."""

    port: int
    address: str = LOOPBACK


def read_listener(port: int | None, address: str) -> Listener | None:
    """Read --metrics and --metrics-address; None when nothing is served.

    Raises:
        SettingsError: an address without a port.
    """
    if port is not None:
        return Listener(port, address)
    if address != LOOPBACK:
        raise SettingsError(
            "--metrics-address is for the port of --metrics.",
            hint=f"add --metrics PORT: --metrics 9104 --metrics-address {address}",
        )
    return None


class HttpServer:
    """Serves an application until `close`."""

    def __init__(self, application: Application, listener: Listener) -> None:
        """Begin to serve.

        Raises:
            SettingsError: the port is taken, or the address isn't this machine's.
        """
        address = listener.address
        kind = _Server6 if ":" in address else _Server
        try:
            self._server = make_server(
                address, listener.port, application, server_class=kind, handler_class=RequestHandler
            )
        except OSError as error:
            raise SettingsError(
                f"Can't listen on {address}, port {listener.port}: {error.strerror}.",
                hint="choose another port or address: --metrics PORT --metrics-address ADDRESS",
            ) from error
        shown = f"[{address}]" if kind is _Server6 else address
        self.url = f"http://{shown}:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port that is served, also where 0 was asked for."""
        return int(self._server.server_port)

    def close(self) -> None:
        """Stop serving, and wait for the thread."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def server_bind(self) -> None:
        """Listen, without asking a name server for this machine's name, as the base does."""
        TCPServer.server_bind(self)
        self.server_name = str(self.server_address[0])
        self.server_port = self.server_address[1]
        self.setup_environ()


class _Server6(_Server):
    address_family = socket.AF_INET6


class RequestHandler(WSGIRequestHandler):
    timeout = REQUEST_S

    def handle(self) -> None:
        """Answer a request; a client that is slow or goes away is no news."""
        with contextlib.suppress(TimeoutError, ConnectionError):
            super().handle()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the name of the base
        """Log nothing: probes come every few seconds."""
