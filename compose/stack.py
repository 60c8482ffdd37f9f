"""Start, repair and stop the servers of a pipeline as local processes.

One state folder, one stack: `stack.json` holds its ports and processes, a lock keeps two commands apart. The
servers outlive the command. What `up` starts and can't finish, it stops again.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cdc.errors import StackError
from compose import artifacts, machine, ports, process
from compose.book import Book, held
from compose.endpoints import Endpoints
from compose.health import last_lines
from compose.machine import STATE_HINT
from compose.servers import ALL, BY_NAME, Place, Server
from compose.written import require_readable

START_DEADLINE_S = 120.0
HEALTHY_DEADLINE_S = 15.0
POLL_S = 0.1

Progress = Callable[[str], None]


def state_dir(pipeline: str) -> Path:
    """Return a pipeline's state folder: `CDC_STATE` as it is, else one of root's or the user's own."""
    if path := os.environ.get("CDC_STATE"):
        return Path(path).absolute()
    if os.geteuid() == 0:
        return Path("/var/lib/cdc") / pipeline
    from platformdirs import user_state_path

    return user_state_path("cdc") / pipeline


def up(state: Path, *, progress: Progress) -> Endpoints:
    """Start what doesn't run, on its old ports and with its data; do nothing when all is well."""
    with held(state.absolute(), progress) as book:
        book.claim("embedded")
        sick = _sick(book)
        for server in reversed(sick):
            _end(book, [server.name])
        if sick:
            _start(book, sick, progress)
        return book.endpoints()


def down(state: Path, *, progress: Progress) -> list[str]:
    """Stop every server that runs, last started first; return their names. Data and ports stay."""
    if not (state / "stack.json").exists():
        return []
    with held(state.absolute(), progress) as book:
        running_names = [server.name for server in reversed(ALL) if book.alive(server.name)]
        if "connect" in running_names:
            # First and alone: without Kafka it would wait out its own deadline.
            progress("stopping connect")
            _end(book, ["connect"])
        progress("stopping the other servers")
        _end(book, [server.name for server in reversed(ALL) if server.name != "connect"])
        return running_names


def running(state: Path) -> Endpoints | None:
    """Return the endpoints when every server's process lives; asks no server, so it is quick."""
    book = Book.load(state.absolute())
    return book.endpoints() if all(book.alive(server.name) for server in ALL) else None


def status(state: Path) -> dict[str, dict[str, Any]]:
    """Return pid, port, alive and rss_bytes (child processes included) of each server of the stack."""
    book = Book.load(state.absolute())
    return {name: _status(book, name) for name in BY_NAME if name in book.ports}


def stop_one(state: Path, name: str) -> None:
    """Stop one server as `down` does."""
    with held(state.absolute(), _silent) as book:
        _end(book, [name])


def kill_one(state: Path, name: str) -> None:
    """Kill one server with everything it started, without warning."""
    with held(state.absolute(), _silent) as book:
        if found := book.processes.get(name):
            process.kill(found)
        book.strike(name)


def start_one(state: Path, name: str) -> None:
    """Start one server on its old ports and data; return when it is ready. Nothing happens when it runs."""
    with held(state.absolute(), _silent) as book:
        if not book.alive(name):
            _start(book, [BY_NAME[name]], _silent)


def _silent(_: str) -> None:
    pass


def _status(book: Book, name: str) -> dict[str, Any]:
    found = book.processes.get(name)
    alive = book.alive(name)
    return {
        "pid": found.pid if found and alive else None,
        "port": book.ports[name],
        "alive": alive,
        "rss_bytes": found.rss_bytes() if found and alive else 0,
    }


def _sick(book: Book) -> list[Server]:
    """Return the servers that don't run or don't answer, in the order of starting."""
    with ThreadPoolExecutor(len(ALL)) as pool:
        answers = list(pool.map(lambda server: _healthy(book, server), ALL))
    return [server for server, healthy in zip(ALL, answers, strict=True) if not healthy]


def _healthy(book: Book, server: Server) -> bool:
    deadline = time.monotonic() + HEALTHY_DEADLINE_S
    never = threading.Event()
    while book.alive(server.name):
        if server.ready(book.ports):
            return True
        # A server that was just killed and started by hand, or lost its neighbour, may need a moment.
        if time.monotonic() > deadline:
            return False
        never.wait(POLL_S)
    return False


def _end(book: Book, names: Iterable[str]) -> None:
    """Ask servers to end, all at once, and see to it that they do."""
    trees = []
    for name in names:
        if found := book.processes.get(name):
            trees.append((name, process.ask(found, BY_NAME[name].stop_signal)))
    for name, tree in trees:
        process.await_end(tree, BY_NAME[name].stop_deadline_s)
        book.strike(name)


def _start(book: Book, chosen: list[Server], progress: Progress) -> None:
    """Start servers side by side; when one fails, stop those of this call again and raise its error."""
    machine.require_disk(book.state, "the state folder")
    machine.require_searchable(book.state, STATE_HINT)
    java, parts = machine.java(), artifacts.servers()
    if missing := [name for server in ALL for name in server.port_names if name not in book.ports]:
        book.ports |= ports.choose(missing, book.ports.values())
        book.save()
    for server in chosen:
        for name in server.port_names:
            ports.require_free(name, book.ports[name])
    places = {server: Place(book.state / server.name, book.ports, parts, java) for server in chosen}
    _sign(book, places)
    launch = _Launch(book, progress)
    try:
        launch.run(places)
    except BaseException:
        _end(book, [server.name for server in reversed(chosen)])
        raise


def _sign(book: Book, places: Mapping[Server, Place]) -> None:
    """Note who is about to write, unless one of them can't read what is there; before it is ready it may have."""
    own = {server.name: writer for server, place in places.items() if (writer := server.writer(place))}
    before = {server.name: writer for server, place in places.items() if (writer := server.wrote(place))}
    require_readable(book.state, before | book.written, own)
    book.written |= own
    book.save()


class _Launch:
    """One parallel start: the first failure, or an interrupt, ends all the waiting."""

    def __init__(self, book: Book, progress: Progress) -> None:
        self.book = book
        self.progress = progress
        self.given_up = threading.Event()
        self.failure: BaseException | None = None
        self.began = time.monotonic()

    def run(self, places: dict[Server, Place]) -> None:
        """Start every server and wait until all are ready."""
        self.progress(f"starting {', '.join(server.name for server in places)}")
        futures: dict[str, Future[None]] = {}
        with ThreadPoolExecutor(len(places)) as pool:
            try:
                for server, place in places.items():
                    futures[server.name] = pool.submit(self._one, server, place, futures.get(server.after or ""))
                for future in futures.values():
                    future.result()
            except BaseException as error:
                self._give_up(error)
        if self.failure:
            raise self.failure

    def _give_up(self, error: BaseException) -> None:
        if not self.given_up.is_set():
            self.failure = error
            self.given_up.set()

    def _one(self, server: Server, place: Place, before: Future[None] | None) -> None:
        try:
            server.prepare(place)
            if before:
                before.result()
            if not self.given_up.is_set():
                self._launch(server, place)
        except BaseException as error:
            self._give_up(error)
            raise

    def _launch(self, server: Server, place: Place) -> None:
        environment = server.environment(place)
        started = process.spawn(
            server.command(place), home=place.home, log=place.log, env=environment, user=server.user()
        )
        self.book.enter(server.name, started)
        deadline = time.monotonic() + START_DEADLINE_S
        while not server.ready(place.ports):
            if started.find() is None:
                raise _start_failed(server, place, f"ended with status {started.exit_status()} while starting")
            if time.monotonic() > deadline:
                raise _start_failed(server, place, f"isn't ready after {START_DEADLINE_S:.0f} s")
            if self.given_up.wait(POLL_S):
                return
        self.progress(f"{server.name} is ready ({time.monotonic() - self.began:.1f} s)")


def _start_failed(server: Server, place: Place, what: str) -> StackError:
    return StackError(
        f"{server.name} {what}\n{last_lines(place.log)}",
        hint=f"the whole log: {place.log}",
        service=server.name,
        port=place.ports[server.name],
    )
