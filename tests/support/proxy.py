"""A way to a real server that breaks at a chosen word."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

CHUNK = 65536


@contextmanager
def breaking(host: str, port: int, word: bytes) -> Iterator[int]:
    """A port that hands everything on to a server, until a client sends `word`: then both
    connections end.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            while True:
                try:
                    client, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(
                    target=_serve, args=(client, (host, port), word), daemon=True
                ).start()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            # Closing alone doesn't wake who waits for the next client.
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def _serve(client: socket.socket, server_at: tuple[str, int], word: bytes) -> None:
    with client, socket.create_connection(server_at) as server:
        answers = threading.Thread(target=_hand_on, args=(server, client, None), daemon=True)
        answers.start()
        _hand_on(client, server, word)
        for end in (client, server):
            _shut(end)
        answers.join()


def _hand_on(source: socket.socket, target: socket.socket, word: bytes | None) -> None:
    try:
        while chunk := source.recv(CHUNK):
            if word and word in chunk:
                return
            target.sendall(chunk)
    except OSError:
        return


def _shut(end: socket.socket) -> None:
    try:
        end.shutdown(socket.SHUT_RDWR)
    except OSError:
        return
