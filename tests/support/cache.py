"""A cache server of a test's own, which it may break."""

import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import redis

from cdc.compose import host
from cdc.compose.wheels import redis_server
from cdc.redis.server import CLUSTER_COMMANDS
from tests.support.wait import wait_until


class CacheServer:
    """A server that can be killed, and started again with what it had saved; `options` are words of its command
    line.
    """

    def __init__(self, folder: Path, *options: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.port = free_port()
        self._options = options
        self.url = f"redis://127.0.0.1:{self.port}/0"
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

    def stand_still(self, *, still: bool) -> None:
        """Stop the process where it is, or let it go on."""
        self._process.send_signal(signal.SIGSTOP if still else signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def start(self) -> None:
        """Start it with what is in its folder, if anything."""
        words: list[str | Path] = [redis_server(), "--port", str(self.port)]
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


class Guarded:
    """A primary, a replica and three Sentinels, of which two have to agree; `options` are words of both
    servers' command lines.
    """

    service = "shop"

    def __init__(self, folder: Path, *options: str, sentinel_password: str = "") -> None:
        self.primary = CacheServer(folder / "primary", *options)
        master = f"127.0.0.1 {self.primary.port}"
        self.replica = CacheServer(folder / "replica", "--replicaof", *master.split(), *options)
        lines = [
            f"sentinel monitor {self.service} {master} 2",
            f"sentinel down-after-milliseconds {self.service} 500",
            f"sentinel failover-timeout {self.service} 2000",
            *([f"requirepass {sentinel_password}"] if sentinel_password else []),
        ]
        self._watchers: list[Sentinel] = []
        for number in range(3):
            self._watchers.append(Sentinel(folder / f"sentinel-{number}", lines))
        self.sentinels = [f"127.0.0.1:{watcher.port}" for watcher in self._watchers]
        self._password = sentinel_password
        wait_until(self._is_whole, 30, "the Sentinels to know the replica and each other")

    def ask(self) -> dict[str, Any]:
        """What a Sentinel says of the primary."""
        port = self._watchers[0].port
        with redis.Redis("127.0.0.1", port, password=self._password or None) as sentinel:
            return dict(sentinel.sentinel_master(self.service))

    def switch(self) -> None:
        """Make the replica the primary, while both run."""
        port = self._watchers[0].port
        with redis.Redis("127.0.0.1", port, password=self._password or None) as sentinel:
            sentinel.execute_command("SENTINEL", "FAILOVER", self.service)

    def has_switched(self) -> bool:
        return int(self.ask()["port"]) == self.replica.port

    def kill(self) -> None:
        for watcher in self._watchers:
            watcher.kill()
        for server in (self.primary, self.replica):
            server.kill()

    def _is_whole(self) -> bool:
        answer = self.ask()
        with redis.Redis.from_url(self.replica.url) as server:
            is_linked = server.info("replication").get("master_link_status") == "up"
        return is_linked and (answer["num-slaves"], answer["num-other-sentinels"]) == (1, 2)


class Sentinel:
    """A Sentinel; `lines` are of its file, which it rewrites."""

    def __init__(self, folder: Path, lines: Sequence[str]) -> None:
        folder.mkdir(parents=True)
        self.port = free_port()
        own = [f"port {self.port}", "bind 127.0.0.1", f"dir {folder}"]
        (folder / "sentinel.conf").write_text("\n".join([*own, *lines, ""]))
        words: list[str | Path] = [redis_server(), folder / "sentinel.conf", "--sentinel"]
        self._process = subprocess.Popen(words, stdout=subprocess.DEVNULL)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def guarded(folder: Path, *options: str, sentinel_password: str = "") -> Iterator[Guarded]:
    servers = Guarded(folder, *options, sentinel_password=sentinel_password)
    try:
        yield servers
    finally:
        servers.kill()


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


class ClusterServers:
    """Three primaries, and a replica of each. `url` is of a user who may do no more than the sink needs."""

    def __init__(self, folder: Path, *, replicas: bool = False) -> None:
        words = ["--cluster-enabled", "yes", "--cluster-node-timeout", "1000"]
        words += ["--user", "cdc", "on", ">hush-hush", "~t_*"]
        words += [f"+{name}" for name in CLUSTER_COMMANDS.split()]
        self._started: list[CacheServer] = []
        self.primaries = [self._start(folder / f"primary-{n}", words) for n in range(3)]
        self.replicas = [self._start(folder / f"replica-{n}", words) for n in range(3 * replicas)]
        for number, server in enumerate(self.primaries):
            first = number * 5461
            last = 16383 if number == 2 else first + 5460
            command(server, "ADDSLOTSRANGE", first, last)
            command(server, "SET-CONFIG-EPOCH", number + 1)
        for server in self._started[1:]:
            command(
                server, "MEET", "127.0.0.1", self.primaries[0].port, self._bus(self.primaries[0])
            )
        wait_until(self._know_each_other, 30, "the nodes to know each other")
        for server, primary in zip(self.replicas, self.primaries, strict=False):
            command(server, "REPLICATE", command(primary, "MYID").decode())
        wait_until(self._is_whole, 30, "the cluster to be whole")
        hosts = ",".join(f"127.0.0.1:{server.port}" for server in self.primaries)
        self.url = f"redis://cdc:hush-hush@{hosts}/0?cluster=true"

    def go_back(self, number: int) -> None:
        """Kill a primary and start it with what it saved last; all nodes are up again then."""
        self.primaries[number].go_back()
        wait_until(self._is_whole, 30, "the cluster to be whole again")

    def promote(self, number: int) -> None:
        """Make a replica the primary; the primary is dead."""
        command(self.replicas[number], "FAILOVER", "TAKEOVER")
        rest = [at for n, at in enumerate(self.primaries) if n != number]
        node_id = command(self.replicas[number], "MYID").decode()

        def is_known() -> bool:
            known = (command(server, "NODES") for server in [*rest, *self.replicas])
            return all(_is_primary(nodes, node_id) for nodes in known)

        wait_until(is_known, 20, "all nodes to know the new primary")

    def move_slot(self, slot: int, source: int, target: int) -> Iterator[None]:
        """Move a slot, a few keys at a time; the caller may do something after each step."""
        sender = self.primaries[source]
        receiver = self.primaries[target]
        ids = [command(server, "MYID").decode() for server in (sender, receiver)]
        command(receiver, "SETSLOT", slot, "IMPORTING", ids[0])
        command(sender, "SETSLOT", slot, "MIGRATING", ids[1])
        yield
        with redis.Redis.from_url(sender.url) as server:
            while keys := cast("list[bytes]", command(sender, "GETKEYSINSLOT", slot, 8)):
                server.migrate("127.0.0.1", receiver.port, keys, 0, 5000)
                yield
        for server_ in (receiver, sender, *self.primaries):
            command(server_, "SETSLOT", slot, "NODE", ids[1])
        yield

    def kill(self) -> None:
        for server in self._started:
            server.kill()

    def _start(self, folder: Path, words: Sequence[str]) -> CacheServer:
        server = CacheServer(folder, "--cluster-port", str(free_port()), *words)
        self._started.append(server)
        return server

    def _bus(self, server: CacheServer) -> int:
        own = next(
            line for line in command(server, "NODES").decode().splitlines() if "myself" in line
        )
        return int(own.split()[1].partition("@")[2].partition(",")[0])

    def _know_each_other(self) -> bool:
        return all(
            command(server, "NODES").decode().count("connected") == len(self._started)
            and b"handshake" not in command(server, "NODES")
            for server in self._started
        )

    def _is_whole(self) -> bool:
        states = [command(server, "INFO") for server in self._started]
        linked = []
        for replica in self.replicas:
            with redis.Redis.from_url(replica.url) as server:
                linked.append(server.info("replication").get("master_link_status") == "up")
        return all(b"cluster_state:ok" in state for state in states) and all(linked)


def command(server: CacheServer, *words: str | int) -> Any:
    """Send CLUSTER ... to one node."""
    with redis.Redis.from_url(server.url) as node:
        node.response_callbacks.clear()
        return node.execute_command("CLUSTER", *words)


def _is_primary(nodes: bytes, node_id: str) -> bool:
    lines = nodes.decode().splitlines()
    return any(line.startswith(node_id) and "master" in line.split()[2] for line in lines)


@contextmanager
def nodes(folder: Path, *, replicas: bool = False) -> Iterator[ClusterServers]:
    servers = ClusterServers(folder, replicas=replicas)
    try:
        yield servers
    finally:
        servers.kill()


def _answers(server: redis.Redis) -> bool:
    with suppress(redis.RedisError):
        return bool(server.ping())
    return False


def free_port() -> int:
    """A port that no outgoing connection is given before the server takes it, nor while it is away."""
    (port,) = host.choose_ports(["server"]).values()
    return port
