"""A cache server of a test's own, which it may break."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import redis

from cdc.compose import host
from cdc.compose.wheels import redis_server
from tests.support.wait import wait_until


class CacheServer:
    """A server that can be killed, and started again with what it had saved; `options` are words of its command
    line.
    """

    def __init__(self, folder: Path, *options: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._port = free_port()
        self._options = options
        self.url = f"redis://127.0.0.1:{self._port}/0"
        self.start()

    def save(self) -> None:
        """Save what the server has now."""
        with redis.Redis.from_url(self.url) as server:
            server.save()
        shutil.copy(self._folder / "dump.rdb", self._folder / "saved.rdb")

    def go_back(self) -> None:
        """Kill the server and start it with what was saved last."""
        self.kill()
        shutil.copy(self._folder / "saved.rdb", self._folder / "dump.rdb")
        self.start()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def start(self) -> None:
        """Start it with what is in its folder, if anything."""
        words: list[str | Path] = [redis_server(), "--port", str(self._port)]
        words += ["--bind", "127.0.0.1", "--save", "", "--dir", self._folder]
        words += ["--repl-diskless-sync-delay", "0", *self._options]
        self._process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
        with redis.Redis.from_url(self.url) as server:
            wait_until(lambda: _answers(server), 20, "the cache server to start")


@contextmanager
def cache(folder: Path, *options: str) -> Iterator[str]:
    """Start a cache server and yield its URL."""
    server = CacheServer(folder, *options)
    try:
        yield server.url
    finally:
        server.kill()


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
    """A port that no outgoing connection is given before the server takes it, nor while it is away."""
    (port,) = host.choose_ports(["server"]).values()
    return port
