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


def _pass_on(source: socket.socket, target: socket.socket, until: bytes | None) -> None:
    with suppress(OSError):
        while (data := source.recv(1 << 16)) and not (until and until in data):
            target.sendall(data)
    for end in (source, target):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
