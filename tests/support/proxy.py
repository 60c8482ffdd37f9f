"""A way to a server of this machine that can be led elsewhere, as a failover does, or breaks."""

import select
import socket
import ssl
import threading
from contextlib import suppress


class Road:
    """Passes connections on to `target`, a port; those that are open stay where they are. A connection
    ends on both sides when a client sends the word `until`. With `context` clients come by TLS.
    """

    def __init__(
        self, target: int, until: bytes | None = None, context: ssl.SSLContext | None = None
    ) -> None:
        self.target = target
        self._until = until
        self._context = context
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                if self._context:
                    way = (self._context, near, self.target)
                    threading.Thread(target=_pass_by_tls, args=way, daemon=True).start()
                    continue
                far = socket.create_connection(("127.0.0.1", self.target))
                for one_way in ((near, far, self._until), (far, near, None)):
                    threading.Thread(target=_pass_on, args=one_way, daemon=True).start()


def _pass_by_tls(context: ssl.SSLContext, client: socket.socket, target: int) -> None:
    """Both ways in one thread, because two can't use a TLS connection at once."""
    with (
        suppress(OSError),
        client.dup() as plain,
        context.wrap_socket(client, server_side=True, do_handshake_on_connect=False) as near,
        socket.create_connection(("127.0.0.1", target)) as far,
    ):
        try:
            near.do_handshake()
        except ssl.SSLError:
            # The client is to read why, before it finds the connection closed.
            plain.shutdown(socket.SHUT_WR)
            while plain.recv(1 << 16):
                pass
        while True:
            ready = [near] if near.pending() else select.select([near, far], [], [])[0]
            for source in ready:
                data = source.recv(1 << 16)
                if not data:
                    return
                (far if source is near else near).sendall(data)


class Pooler(Road):
    """A way to a Postgres that leaves out the startup parameter `options`, as a pooler does whose
    settings ignore it.
    """

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self.target))
                far.sendall(_without_options(_startup(near)))
                for way in ((near, far, None), (far, near, None)):
                    threading.Thread(target=_pass_on, args=way, daemon=True).start()


def _startup(client: socket.socket) -> bytes:
    """Read a client's first message that isn't a question for encryption."""
    while True:
        length = int.from_bytes(client.recv(4, socket.MSG_WAITALL), "big")
        body = client.recv(length - 4, socket.MSG_WAITALL)
        if length > 8:
            return body
        client.sendall(b"N")


def _without_options(body: bytes) -> bytes:
    words = body[4:].rstrip(b"\0").split(b"\0")
    pairs = [pair for pair in zip(words[::2], words[1::2], strict=True) if pair[0] != b"options"]
    kept = body[:4] + b"".join(name + b"\0" + value + b"\0" for name, value in pairs) + b"\0"
    return (len(kept) + 4).to_bytes(4, "big") + kept


def _pass_on(source: socket.socket, target: socket.socket, until: bytes | None) -> None:
    with suppress(OSError):
        while (data := source.recv(1 << 16)) and not (until and until in data):
            target.sendall(data)
    for end in (source, target):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
