"""Stop, kill, start and freeze one server of a running stack, whichever kind of stack it is."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil
import pytest

from cdc.compose import process, stack
from cdc.compose.servers import BY_NAME, JavaServer, ServerDirs
from cdc.compose.stack_state import locked_state


class ServerControl(Protocol):
    """Faults that tests of failures inject into a server; its name is a service of the compose file."""

    def stop(self, server: str) -> None:
        """Stop a server as `cdc down` does."""

    def kill(self, server: str) -> None:
        """Kill a server without warning."""

    def start(self, server: str) -> None:
        """Start a stopped server on its old port and data; return when it is ready."""

    def frozen(self, server: str) -> AbstractContextManager[None]:
        """Suspend every process of a server: it takes connections and answers none."""


@dataclass(frozen=True)
class ProcessControl:
    """Servers that are local processes; `state` is the folder of their stack."""

    state: Path

    def stop(self, server: str) -> None:
        with locked_state(self.state, print) as record:
            stack.stop(record, [server])

    def kill(self, server: str) -> None:
        with locked_state(self.state, print) as record:
            if leader := record.processes.get(server):
                process.kill(leader)
            record.remove_process(server)

    def start(self, server: str) -> None:
        with locked_state(self.state, print) as record:
            if not record.alive(server):
                stack.start(record, [BY_NAME[server]], print)

    @contextmanager
    def frozen(self, server: str) -> Iterator[None]:
        with locked_state(self.state, print) as record:
            leader = psutil.Process(record.processes[server].pid)
        processes = [leader, *leader.children(recursive=True)]
        for suspended in processes:
            suspended.suspend()
        try:
            yield
        finally:
            for suspended in processes:
                suspended.resume()


@contextmanager
def connect_with(servers: ServerControl, options: str) -> Iterator[None]:
    """Kafka Connect with options of its JVM that somebody else has chosen, until the block ends."""
    environment = JavaServer.environment

    def chosen(server: JavaServer, dirs: ServerDirs) -> dict[str, str]:
        # The variable takes precedence over the command line.
        return {**environment(server, dirs), "_JAVA_OPTIONS": options}

    servers.stop("connect")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JavaServer, "environment", chosen)
        servers.start("connect")
    try:
        yield
    finally:
        servers.stop("connect")
        servers.start("connect")
