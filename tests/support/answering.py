"""Servers that are there, and not what their client takes them for: real sockets on this machine."""

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ELSEWHERE = Path(__file__).parent / "elsewhere.pem"
"""A key and its certificate, of nobody but itself, for elsewhere.example."""
POSTGRES_TAKES_TLS = b"S"


@contextmanager
def answering(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """A port at which every client gets this answer, and then the end of its connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            while True:
                try:
                    client, _ = listener.accept()
                except OSError:
                    return
                with client, suppress(OSError):
                    answer(client)

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            # Closing alone doesn't wake who waits for the next client.
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(1)


def silent(client: socket.socket) -> None:
    """Takes what comes, for as long as it comes."""
    while client.recv(1024):
        pass


def tls(client: socket.socket) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(ELSEWHERE)
    with context.wrap_socket(client, server_side=True) as wrapped:
        wrapped.recv(1024)


def postgres_tls(client: socket.socket) -> None:
    client.recv(8)
    client.sendall(POSTGRES_TAKES_TLS)
    tls(client)


def web(client: socket.socket) -> None:
    client.recv(1024)
    client.sendall(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
