"""A receiver of what `cdc run` posts."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Receiver:
    """An HTTP server that keeps what is posted to it. `answer` is the code that it answers with, and
    0 where it hangs up; it keeps what it answers with 200, and counts the others in `refused`. It
    answers once `goes_on` is set, which it is.
    """

    def __init__(self) -> None:
        self.answer = 200
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.refused = 0
        self.bodies: list[dict[str, Any]] = []
        self.logins: list[str | None] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                code = receiver.answer
                receiver.logins.append(self.headers["Authorization"])
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if code == 200:
                    receiver.bodies.append(json.loads(body))
                else:
                    receiver.refused += 1
                receiver.goes_on.wait()
                if code:
                    self.send_response(code)
                    self.send_header("Location", "/elsewhere")
                    self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/a-secret"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def events(self) -> list[tuple[str, str]]:
        return [(body["event"], body["code"]) for body in self.bodies]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
