"""Local stack: start, repair and stop the servers of a pipeline as processes.

One state folder, one stack: `stack.json` holds its ports and processes, a lock keeps two commands
apart. The servers outlive the command. Servers that `up` has started are stopped again when it
fails.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from cdc.compose import artifacts, host, process, secured
from cdc.compose.host import STATE_HINT
from cdc.compose.servers import ALL, BY_NAME, Postgres, Server, ServerDirs, last_lines
from cdc.compose.stack_state import Endpoints, StackState, locked_state
from cdc.compose.versions import require_readable
from cdc.errors import StackError

START_DEADLINE_S = 120.0
HEALTHY_DEADLINE_S = 15.0
POLL_S = 0.1

Progress = Callable[[str], None]


def state_dir(pipeline: str) -> Path:
    """Return a pipeline's state folder: `CDC_STATE` as it is, else one of root's or the user's
    own.
    """
    if path := os.environ.get("CDC_STATE"):
        return Path(path).absolute()
    if os.geteuid() == 0:
        return Path("/var/lib/cdc") / pipeline
    from platformdirs import user_state_path

    return user_state_path("cdc") / pipeline


def servers_of(record: StackState, pipeline: str = "") -> tuple[Server, ...]:
    """Return the servers of a stack in the order of starting; `pipeline` as for `up`."""
    return secured.make(record.secrets, pipeline) if record.secrets else ALL


def up(state: Path, *, progress: Progress, secured_for: str | None = None) -> Endpoints:
    """Start what doesn't run, on its old ports and with its data; do nothing when all is well.

    secured_for: the name of a pipeline, for servers that ask who it is.
    """
    with locked_state(state.absolute(), progress) as record:
        record.claim("secured" if secured_for else "embedded")
        if record.secrets and record.ports:
            secured.require_secrets(record.secrets)
        servers = servers_of(record, secured_for or "")
        unhealthy = _find_unhealthy(record, servers)
        for server in reversed(unhealthy):
            stop(record, [server.name])
        if unhealthy:
            start(record, unhealthy, progress)
        for server in servers:
            if server not in unhealthy:
                _grant(server, record.state / server.name, record.ports)
        return record.endpoints()


def down(state: Path, *, progress: Progress) -> list[str]:
    """Stop every server that runs, last started first; return their names. Data and ports stay."""
    if not (state / "stack.json").exists():
        return []
    with locked_state(state.absolute(), progress) as record:
        running_names = [server.name for server in reversed(ALL) if record.alive(server.name)]
        if "connect" in running_names:
            # First and alone: without Kafka it would wait out its own deadline.
            progress("stopping connect")
            stop(record, ["connect"])
        progress("stopping the other servers")
        stop(record, [server.name for server in reversed(ALL) if server.name != "connect"])
        return running_names


def purge(state: Path, *, progress: Progress) -> list[str]:
    """Stop every server, and remove their data and the warehouse; return the removed folders."""
    if not (state / "stack.json").exists():
        return []
    down(state, progress=progress)
    with locked_state(state.absolute(), progress) as record:
        progress("removing the data")
        return record.purge([*(server.name for server in ALL), "secrets"])


def running(state: Path) -> Endpoints | None:
    """Return the endpoints when every server's process lives; asks no server, so it is quick."""
    record = StackState.load(state.absolute())
    return record.endpoints() if all(record.alive(server.name) for server in ALL) else None


def _find_unhealthy(record: StackState, servers: Sequence[Server]) -> list[Server]:
    """Return the servers that don't run or don't answer, in the order of starting."""
    with ThreadPoolExecutor(len(servers)) as pool:
        answers = list(pool.map(lambda server: _healthy(record, server), servers))
    return [server for server, healthy in zip(servers, answers, strict=True) if not healthy]


def _healthy(record: StackState, server: Server) -> bool:
    deadline = time.monotonic() + HEALTHY_DEADLINE_S
    while record.alive(server.name):
        if server.ready(record.ports):
            return True
        # A server that was just killed and started by hand, or lost its neighbour, may need a
        # moment.
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return False


def stop(record: StackState, names: Iterable[str]) -> None:
    """Ask servers to end, all at once; kill those that don't end in time."""
    trees = []
    for name in names:
        if leader := record.processes.get(name):
            trees.append((name, process.request_end(leader, BY_NAME[name].stop_signal)))
    for name, tree in trees:
        process.await_end(tree, BY_NAME[name].stop_deadline_s)
        record.remove_process(name)


def start(record: StackState, chosen: list[Server], progress: Progress) -> None:
    """Start servers in parallel. When one fails, stop the others of this call and raise its
    error.
    """
    host.require_disk(record.state, "the state folder")
    host.require_searchable(record.state, STATE_HINT)
    java = host.java()
    files = artifacts.servers()
    # Refuses before anything is started where there is no Postgres.
    for server in servers_of(record):
        if isinstance(server, Postgres):
            server.programs()
    if record.secrets:
        secured.make_secrets(record.secrets)
    versions = {server.name: version for server in chosen if (version := server.version())}
    require_readable(record.state, record.versions, versions)
    if missing := [
        name
        for server in servers_of(record)
        for name in server.port_names
        if name not in record.ports
    ]:
        record.ports |= host.choose_ports(missing, record.ports.values())
    for server in chosen:
        for name in server.port_names:
            host.require_free_port(name, record.ports[name])
    dirs_by_server = {
        server: ServerDirs(record.state / server.name, record.ports, files, java)
        for server in chosen
    }
    # Before the start, because a server may write before it is ready.
    record.versions |= versions
    record.save()
    launch = _Launch(record, progress)
    try:
        launch.run(dirs_by_server)
    except BaseException:
        stop(record, [server.name for server in reversed(chosen)])
        raise


class _Launch:
    """A parallel start of servers. The first failure, or an interrupt, ends all waiting."""

    def __init__(self, record: StackState, progress: Progress) -> None:
        self.record = record
        self.progress = progress
        self.cancelled = threading.Event()
        self.started_at = time.monotonic()

    def run(self, dirs_by_server: dict[Server, ServerDirs]) -> None:
        """Start every server and wait until all are ready."""
        self.progress(f"starting {', '.join(server.name for server in dirs_by_server)}")
        futures: dict[str, Future[None]] = {}
        with ThreadPoolExecutor(len(dirs_by_server)) as pool:
            try:
                for server, dirs in dirs_by_server.items():
                    futures[server.name] = pool.submit(
                        self._start_server, server, dirs, futures.get(server.starts_after or "")
                    )
                for future in futures.values():
                    future.result()
            except BaseException:
                self.cancelled.set()
                raise

    def _start_server(
        self, server: Server, dirs: ServerDirs, dependency: Future[None] | None
    ) -> None:
        try:
            server.prepare(dirs)
            if dependency:
                dependency.result()
            if not self.cancelled.is_set():
                self._launch(server, dirs)
        except BaseException:
            self.cancelled.set()
            raise

    def _launch(self, server: Server, dirs: ServerDirs) -> None:
        environment = server.environment(dirs)
        started = process.spawn(
            server.command(dirs), home=dirs.home, log=dirs.log, env=environment, user=server.user()
        )
        self.record.add_process(server.name, started)
        deadline = time.monotonic() + START_DEADLINE_S
        while not server.ready(dirs.ports):
            if started.find() is None:
                raise _start_failed(
                    server, dirs, f"ended with status {started.exit_status()} while starting"
                )
            if time.monotonic() > deadline:
                raise _start_failed(server, dirs, f"isn't ready after {START_DEADLINE_S:.0f} s")
            if self.cancelled.wait(POLL_S):
                return
        _grant(server, dirs.home, dirs.ports)
        self.progress(f"{server.name} is ready ({time.monotonic() - self.started_at:.1f} s)")


def _grant(server: Server, home: Path, ports: Mapping[str, int]) -> None:
    """Give users their rights. Raises StackError with what the server, or its client, says."""
    try:
        server.grant(ports)
    except StackError:
        raise
    except Exception as error:
        raise StackError(
            f"{server.name} is ready, but its users don't get their rights: {type(error).__name__}: {error}",
            hint=f"its log and settings are in {home}; to start over: cdc -p FILE down --purge, then"
            " cdc -p FILE up --secured",
            service=server.name,
        ) from error


def _start_failed(server: Server, dirs: ServerDirs, problem: str) -> StackError:
    return StackError(
        f"{server.name} {problem}\n{last_lines(dirs.log)}",
        hint=f"the whole log: {dirs.log}",
        service=server.name,
        port=dirs.ports[server.name],
    )
