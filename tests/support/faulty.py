"""A proxy before a server, on this machine: it loses requests, keeps them, or answers in the server's place."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import httpx

PASSED = ("content-type", "x-elastic-product")


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    body: bytes
    kind: str = "application/json"
    login: str = ""


@dataclass(frozen=True)
class Answer:
    """An answer that a client gets instead of the server's own; no bytes when `status` is 0."""

    status: int
    body: bytes = b""
    kind: str = "application/json"
    product: bool = False
    """Whether it looks as if the server itself had said so."""


RESET = Answer(0)
Rule = Callable[[Request], Answer | None]
"""Looks at a request before the server does; None lets it pass."""


def nothing(_: Request) -> None:
    return None


class Proxy:
    """A context; `rule` may be exchanged at any time."""

    def __init__(self, server: str, **client: Any) -> None:
        """client: options of httpx for the way to the server."""
        self.rule: Rule = nothing
        self._server = httpx.Client(
            base_url=server, timeout=60, headers={"accept-encoding": "identity"}, **client
        )
        self._listener = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._listener.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._listener.server_port}"

    def __enter__(self) -> "Proxy":
        Thread(target=self._listener.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown()
        self._listener.server_close()
        self._server.close()

    def deliver(self, request: Request) -> httpx.Response:
        """To the server, now."""
        headers = {"content-type": request.kind}
        return self._server.request(
            request.method, request.path, content=request.body, headers=headers
        )


def _handler(proxy: Proxy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one_request(self) -> None:
            try:
                super().handle_one_request()
            except ConnectionError:
                self.close_connection = True

        def pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            kind = self.headers.get("content-type", "application/json")
            login = self.headers.get("authorization", "")
            request = Request(self.command, self.path, body, kind, login)
            answer = proxy.rule(request)
            if answer is None:
                response = proxy.deliver(request)
                self.reply(
                    response.status_code,
                    response.content,
                    {n: response.headers[n] for n in PASSED if n in response.headers},
                )
            elif answer is RESET:
                self.close_connection = True
            else:
                product = {"x-elastic-product": "Elasticsearch"} if answer.product else {}
                self.reply(answer.status, answer.body, {"content-type": answer.kind, **product})

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = pass_on  # noqa: N815

        def reply(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in {**headers, "content-length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    return Handler


def json_answer(status: int, body: object) -> Answer:
    """Make an answer as the server itself would give it."""
    return Answer(status, json.dumps(body).encode(), product=True)
