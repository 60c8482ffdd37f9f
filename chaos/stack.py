"""The demo's servers behind links, and `cdc run` under a supervisor; each can be killed, frozen and
restarted.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from cdc.compose import artifacts, host, process
from cdc.compose.process import Process
from cdc.compose.servers import (
    Connect,
    Elasticsearch,
    Kafka,
    Postgres,
    Redis,
    Server,
    ServerDirs,
    last_lines,
)
from cdc.errors import StackError
from chaos.links import Link

LINKS = ("postgres", "kafka-run", "kafka-connect", "elasticsearch", "redis")
READY_S = 180.0
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
        own = f"PLAINTEXT://127.0.0.1:{dirs.ports['kafka']}"
        controller = f"CONTROLLER://127.0.0.1:{dirs.ports['kafka-controller']}"
        ways = {"RUN": "kafka-run", "CONNECT": "kafka-connect"}
        listeners = [f"{way}://127.0.0.1:{dirs.ports[name]}" for way, name in ways.items()]
        advertised = [f"{way}://127.0.0.1:{self.links[name].port}" for way, name in ways.items()]
        protocols = [f"{way}:PLAINTEXT" for way in ("CONTROLLER", "PLAINTEXT", *ways)]
        with (dirs.conf / "server.properties").open("a") as properties:
            # Of two lines with one name the last counts.
            print("listeners=", ",".join([own, controller, *listeners]), sep="", file=properties)
            print(
                "advertised.listeners=",
                ",".join([own, controller, *advertised]),
                sep="",
                file=properties,
            )
            print("listener.security.protocol.map=", ",".join(protocols), sep="", file=properties)


class LinkedConnect(Connect):
    def __init__(self, links: Mapping[str, Link]) -> None:
        self.links = links

    def settings(self, dirs: ServerDirs) -> dict[str, object]:
        return {**super().settings(dirs), "kafka": self.links["kafka-connect"].port}


class Stack:
    """Five servers in a folder, on free ports."""

    def __init__(self, folder: Path, links: Mapping[str, Link]) -> None:
        self.folder = folder
        self.links = links
        kafka = LinkedKafka(links)
        servers = (Postgres(), kafka, Elasticsearch(), Redis(), LinkedConnect(links))
        self.servers: dict[str, Server] = {server.name: server for server in servers}
        names = [name for server in servers for name in server.port_names]
        self.ports = host.choose_ports(names)
        self.processes: dict[str, Process] = {}
        self._files = artifacts.servers()
        self._java = host.java()
        for name, link in links.items():
            link.target = self.ports[name]

    @property
    def dsn(self) -> str:
        """Where the writer and the checks log in: not through the link."""
        return f"postgresql://postgres@127.0.0.1:{self.ports['postgres']}/postgres"

    def start(self, name: str) -> None:
        """Start a server on its port and data; return once it is ready."""
        server = self.servers[name]
        dirs = ServerDirs(self.folder / name, self.ports, self._files, self._java)
        server.prepare(dirs)
        self.processes[name] = process.spawn(
            server.command(dirs),
            home=dirs.home,
            log=dirs.log,
            env=server.environment(dirs),
            user=server.user(),
        )
        deadline = time.monotonic() + READY_S
        while not server.ready(self.ports):
            if self.processes[name].find() is None or time.monotonic() > deadline:
                raise StackError(
                    f"{name} doesn't start\n{last_lines(dirs.log)}",
                    hint=f"the whole log: {dirs.log}",
                )
            time.sleep(0.2)

    def stop(self, name: str) -> None:
        """Stop a server as `cdc down` does."""
        server = self.servers[name]
        tree = process.request_end(self.processes[name], server.stop_signal)
        process.await_end(tree, server.stop_deadline_s)

    def kill(self, name: str) -> None:
        """Kill a server and all its processes, without warning."""
        process.kill(self.processes[name])

    def close(self) -> None:
        for name in ("connect", "kafka", "elasticsearch", "redis", "postgres"):
            if name in self.processes:
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
        """Return the processes of a part that live: `all`, the `jvm`, a Python `worker`."""
        try:
            leader = psutil.Process(self._process.pid)
            tree = [leader, *leader.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []
        if part == "all":
            return tree
        jvm = [found for found in tree if found.name() == "java"]
        if part == "jvm":
            return jvm
        return [child for one in jvm for child in one.children(recursive=True)]

    def restart(self) -> None:
        """SIGTERM, and a start at once."""
        self._stopping.set()
        process = self._process
        process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + END_S
        while process.returncode is None and time.monotonic() < deadline:
            time.sleep(0.1)
        if process.returncode is None:
            process.kill()

    def close(self) -> int:
        """SIGTERM; return the exit code."""
        self._closing.set()
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            return self._process.wait()


@contextmanager
def frozen(tree: list[psutil.Process]) -> Iterator[None]:
    """Suspend processes: they take connections and answer none."""
    for found in tree:
        with suppress(psutil.NoSuchProcess):
            found.suspend()
    try:
        yield
    finally:
        for found in tree:
            with suppress(psutil.NoSuchProcess):
                found.resume()


def cdc(file: Path, *words: str) -> list[str]:
    """Return the command line of a verb."""
    options = ["-p", str(file), "--state", str(file.parent)]
    return [sys.executable, "-m", "cdc.entry", *options, *words]
