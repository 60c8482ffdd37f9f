"""A cache server of a test's own, which it may break; and a way to it that can be led elsewhere, as
a failover does.
"""

import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import redis

from cdc.compose import host
from cdc.compose.wheels import redis_server
from tests.support.wait import wait_until


@contextmanager
def cache(folder: Path, *options: str) -> Iterator[str]:
    """Start a cache server and yield its URL; `options` are words of its command line."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    command: list[str | Path] = [
        redis_server(),
        "--port",
        str(port),
        "--bind",
        "127.0.0.1",
        "--save",
        "",
        "--dir",
        folder,
    ]
    process = subprocess.Popen(
        [*command, "--repl-diskless-sync-delay", "0", *options], stdout=subprocess.DEVNULL
    )
    url = f"redis://127.0.0.1:{port}/0"
    try:
        with redis.Redis.from_url(url) as server:
            wait_until(lambda: _answers(server), 20, "the cache server to start")
        yield url
    finally:
        process.kill()
        process.wait()


@contextmanager
def cluster(folder: Path) -> Iterator[str]:
    """Start a cluster of one node that has all slots, and yield its URL."""
    with (
        cache(folder, "--cluster-enabled", "yes", "--cluster-port", str(free_port())) as url,
        redis.Redis.from_url(url) as server,
    ):
        server.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        wait_until(
            lambda: "cluster_state:ok" in str(server.execute_command("CLUSTER", "INFO")),
            20,
            "the cluster to be whole",
        )
        yield url


def _answers(server: redis.Redis) -> bool:
    with suppress(redis.RedisError):
        return bool(server.ping())
    return False


def free_port() -> int:
    """A port that no outgoing connection is given before the server takes it, nor while it is
    away.
    """
    (port,) = host.choose_ports(["server"]).values()
    return port


class Road:
    """Passes connections on to `target`, a port; those that are open stay where they are."""

    def __init__(self, target: int) -> None:
        self.target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self.target))
                for source, target in ((near, far), (far, near)):
                    threading.Thread(target=_pass_on, args=(source, target), daemon=True).start()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    for end in (source, target):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
