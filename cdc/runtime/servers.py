"""Servers and processes that a verb starts and stops: the local stack, of either kind, and Spark."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import psutil

from cdc.compose import process, stack, stack_state
from cdc.compose.servers import Server
from cdc.compose.stack_state import StackState, locked_state
from cdc.config import settings
from cdc.errors import CdcError, SettingsError, StackError
from cdc.sink.contract import Fault, Hold

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cdc.compose.stack_state import Endpoints


class Stack(Protocol):
    """A kind of local stack: servers as processes, or servers as containers."""

    def up(self, state: Path, *, progress: Callable[[str], None]) -> "Endpoints":
        """Start the servers that don't run; `progress` gets lines for people. Raises StackError."""

    def down(self, state: Path, *, progress: Callable[[str], None]) -> list[str]:
        """Stop the servers, and return the names of those that ran. Raises StackError."""

    def purge(self, state: Path, *, progress: Callable[[str], None]) -> list[str]:
        """Stop the servers and remove their data; returns what was removed. Raises StackError."""


@dataclass(frozen=True)
class SecuredStack:
    """Processes that ask who their clients are. file: the pipeline that gets rights by its name."""

    file: Path

    def up(self, state: Path, *, progress: Callable[[str], None]) -> "Endpoints":
        return stack.up(state, progress=progress, secured_for=settings.name_of(self.file))

    down = staticmethod(stack.down)
    purge = staticmethod(stack.purge)


def local_stack(kind: str | None, state: Path, file: Path) -> Stack:
    """Choose the kind of local stack: the one given, else the one the state folder belongs to, else
    embedded.
    """
    from cdc.compose import docker

    stacks: dict[str, Stack] = {
        "embedded": stack,
        "secured": SecuredStack(file),
        "compose": docker,
    }
    kind = kind or stack_state.stack_kind(state) or "embedded"
    if kind not in stacks:
        raise SettingsError(f"There is no stack {kind}.", hint=f"one of: {', '.join(stacks)}")
    return stacks[kind]


def server_faults(
    state: Path, pipeline: settings.Pipeline, progress: Callable[[str], None]
) -> dict[str, Fault]:
    """The faults of servers that `cdc up` has started as processes, for those that the file names."""
    record = StackState.load(state.absolute())
    if record.stack not in ("embedded", "secured"):
        return {}
    # The representation leaves out the DSN, because it may hold a password.
    addresses = f"{pipeline.source.dsn} {pipeline!r}"
    faults = dict[str, Fault]()
    for server in stack.servers_of(record, pipeline.pipeline):
        port = record.ports.get(server.name)
        if re.search(rf"(127\.0\.0\.1|localhost):{port}\b", addresses):
            faults[f"{server.name} kill"] = partial(_kill_server, record.state, server, progress)
            faults[f"{server.name} freeze"] = partial(_freeze_server, record.state, server)
    return faults


def _kill_server(state: Path, server: Server, progress: Callable[[str], None], hold: Hold) -> None:
    leader = _leader(state, server)
    try:
        try:
            process.kill(leader)
        except psutil.AccessDenied:
            raise StackError(
                f"{server.name} belongs to another user.", hint="run cdc chaos as that user"
            ) from None
        hold()
    finally:
        with locked_state(state, progress) as record:
            if not record.alive(server.name):
                stack.start(record, [server], lambda _: None)


def _freeze_server(state: Path, server: Server, hold: Hold) -> None:
    from cdc.chaos.faults import frozen

    with frozen(_leader(state, server).tree()):
        hold()


def _leader(state: Path, server: Server) -> process.Process:
    record = StackState.load(state)
    if not record.alive(server.name):
        raise StackError(f"{server.name} isn't running.", hint="cdc -p FILE up")
    return record.processes[server.name]


@contextmanager
def spark_on(master: str, modules: Sequence[str] = ()) -> "Iterator[SparkSession]":
    """Start a Spark session for one verb, and stop it afterwards. modules: see `session`.

    Raises:
        SparkError: the JVM of Spark has ended meanwhile, or its cluster has ended the application,
            whatever error that caused here.
    """
    # First, so that nothing is fetched where there is no Spark.
    from cdc.compose import artifacts
    from cdc.spark.session import ended_by_cluster, exit_error, session

    spark = session(master, artifacts.spark_jars(), modules=modules)
    try:
        try:
            yield spark
        finally:
            ended = ended_by_cluster(spark)
            spark.stop()
            if ended:
                raise ended
    except CdcError:
        raise
    except Exception as error:
        if failure := exit_error(spark.sparkContext._gateway):
            raise failure from error
        raise
