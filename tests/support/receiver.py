"""A receiver of notifications."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Receiver:
    """An HTTP server that keeps what is posted to it; `answers` are the codes of the next answers,
    200 afterwards.
    """

    def __init__(self) -> None:
        self.answers: list[int] = []
        self.bodies: list[dict[str, Any]] = []
        self.signatures: list[str] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                code = receiver.answers.pop(0) if receiver.answers else 200
                if code == 200:
                    receiver.bodies.append({**json.loads(body), "body": body})
                    receiver.signatures.append(self.headers.get("X-Cdc-Signature", ""))
                self.send_response(code)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/hook"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def events(self) -> list[tuple[str, str]]:
        return [(body["event"], body["code"]) for body in self.bodies]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
