"""The demo's servers behind links, and `cdc run` under a supervisor; each can be killed, frozen and
restarted.
"""

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import psutil

from cdc.chaos.faults import frozen
from cdc.compose import host, process, stack
from cdc.compose.servers import (
    Connect,
    Elasticsearch,
    Kafka,
    Postgres,
    Redis,
    Server,
    ServerDirs,
)
from cdc.compose.stack_state import StackState
from chaos.links import Link

LINKS = ("postgres", "kafka-run", "kafka-connect", "elasticsearch", "redis")
RESTART_S = 10.0
"""As in compose/service/cdc-run@.service, like the codes after which nothing is restarted."""
FINAL_CODES = (2, 3)
END_S = 90.0


class LinkedKafka(Kafka):
    """A Kafka that `cdc run` and Connect reach by links: a broker names its address to its clients."""

    extra_ports: tuple[str, ...] = ("kafka-controller", "kafka-run", "kafka-connect")

    def __init__(self, links: Mapping[str, Link]) -> None:
        self.links = links

    def secure(self, dirs: ServerDirs) -> None:
        ways = {"PLAINTEXT": "kafka", "RUN": "kafka-run", "CONNECT": "kafka-connect"}
        own = {way: dirs.ports[name] for way, name in ways.items()}
        linked = {way: self.links[name].port for way, name in ways.items() if name in self.links}
        listeners = _addresses({**own, "CONTROLLER": dirs.ports["kafka-controller"]})
        protocols = ",".join(f"{way}:PLAINTEXT" for way in ("CONTROLLER", *ways))
        with (dirs.conf / "server.properties").open("a") as properties:
            # If a name has two lines, the last one counts.
            print(f"listeners={listeners}", file=properties)
            print(f"advertised.listeners={_addresses({**own, **linked})}", file=properties)
            print(f"listener.security.protocol.map={protocols}", file=properties)


def _addresses(ports: Mapping[str, int]) -> str:
    return ",".join(f"{name}://127.0.0.1:{port}" for name, port in ports.items())


class LinkedConnect(Connect):
    def __init__(self, links: Mapping[str, Link]) -> None:
        self.links = links

    def settings(self, dirs: ServerDirs) -> dict[str, object]:
        return {**super().settings(dirs), "kafka": self.links["kafka-connect"].port}


class Stack:
    """Five servers in a folder, on free ports."""

    def __init__(self, folder: Path, links: Mapping[str, Link]) -> None:
        servers = (Postgres(), LinkedKafka(links), Elasticsearch(), Redis(), LinkedConnect(links))
        self._servers: dict[str, Server] = {server.name: server for server in servers}
        self.ports = host.choose_ports(name for server in servers for name in server.port_names)
        folder.mkdir()
        self._state = StackState(folder, self.ports)
        for name, link in links.items():
            link.target = self.ports[name]

    @property
    def dsn(self) -> str:
        """Where the writer and the checks log in: not through the link."""
        return f"postgresql://postgres@127.0.0.1:{self.ports['postgres']}/postgres"

    def start(self, *names: str) -> None:
        """Start servers, all if none is named; return once they are ready."""
        chosen = [self._servers[name] for name in names or self._servers]
        stack.start(self._state, chosen, lambda _: None)

    def stop(self, name: str) -> None:
        """Stop a server as `cdc down` does."""
        stack.stop(self._state, [name])

    def kill(self, name: str) -> None:
        """Kill a server and all its processes, without warning."""
        process.kill(self._state.processes[name])
        self._state.remove_process(name)

    def frozen(self, name: str) -> AbstractContextManager[None]:
        return frozen(self._state.processes[name].tree())

    def close(self) -> None:
        for name in list(self._state.processes):
            self.kill(name)


class Run:
    """`cdc run`, started again when it fails, as systemd would: `ended` is called with each exit code."""

    def __init__(self, command: list[str], log: Path, ended: Callable[[int], None]) -> None:
        self._command = command
        self._log = log
        self._ended = ended
        self._closing = threading.Event()
        self._stopping = threading.Event()
        self.final: int | None = None
        """An exit code after which it wasn't started again."""
        self._process = self._start()
        self._thread = threading.Thread(target=self._supervise, daemon=True)
        self._thread.start()

    def _start(self) -> "subprocess.Popen[bytes]":
        with self._log.open("ab") as log:
            return subprocess.Popen(self._command, stdout=log, stderr=log, start_new_session=True)

    def _supervise(self) -> None:
        while not self._closing.is_set():
            code = self._process.wait()
            # What is left of its session, as KillMode=mixed does.
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            if self._closing.is_set():
                return
            self._ended(code)
            if code in FINAL_CODES:
                self.final = code
                return
            if not self._stopping.is_set():
                self._closing.wait(RESTART_S)
            self._stopping.clear()
            if not self._closing.is_set():
                self._process = self._start()

    def parts(self, part: str) -> list[psutil.Process]:
        """Return the processes of a part that live: `all`, the `jvm`, one Python `worker`."""
        try:
            leader = psutil.Process(self._process.pid)
            tree = [leader, *leader.children(recursive=True)]
            jvm = [found for found in tree if found.name() == "java"]
            workers = [child for one in jvm for child in one.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []
        return {"all": tree, "jvm": jvm, "worker": workers[:1]}[part]

    def kill(self, part: str) -> bool:
        """Kill the processes of a part; return whether there is one."""
        parts = self.parts(part)
        for found in parts:
            # It may have ended with its parent.
            with suppress(psutil.NoSuchProcess):
                found.kill()
        return bool(parts)

    def restart(self) -> None:
        """SIGTERM, and a start at once."""
        self._stopping.set()
        self._end()

    def close(self) -> int:
        """SIGTERM; return the exit code."""
        self._closing.set()
        return self._end()

    def _end(self) -> int:
        ending = self._process
        ending.send_signal(signal.SIGTERM)
        try:
            return ending.wait(END_S)
        except subprocess.TimeoutExpired:
            ending.kill()
            return ending.wait()
