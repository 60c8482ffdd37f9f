"""State of a stack, `stack.json` in its state folder; and the addresses of its servers, which is all that the
rest of the project knows of them.

Its kind, its ports and the versions that wrote its data are kept for good, processes while they
run.
"""

import fcntl
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from urllib.parse import quote, urlsplit

from cdc.compose.artifacts import make_shared
from cdc.compose.host import STATE_HINT
from cdc.compose.process import Process
from cdc.compose.versions import ServerVersion
from cdc.errors import StackError

STATE_DATABASE = "/8"
"""Path of the database, on the cache's server, for the state of documents. A cache begins at 0 and
takes the next one for a rebuild, so that this one stays free.
"""


@dataclass(frozen=True)
class Endpoints:
    """Addresses and folders of a running stack. `postgres` logs in as an administrator.

    Only servers that ask who it is have `reader`, the login at Postgres of a role that only reads, and
    `secrets`, the folder of passwords and certificates.
    """

    postgres: str
    kafka: str
    connect: str
    elasticsearch: str
    redis: str
    warehouse: str
    state: str
    reader: str = ""
    secrets: str = ""

    def environment(self) -> dict[str, str]:
        """Return the variables that a pipeline file may refer to."""
        addresses = {
            f"CDC_{name.upper()}": value
            for name, value in asdict(self).items()
            if value and name != "state"
        }
        return {
            **addresses,
            "CDC_DOCUMENTS": urlsplit(self.redis)._replace(path=STATE_DATABASE).geturl(),
        }


@dataclass
class StackState:
    """The record of a stack. It is written to a new file and renamed, so that a reader never sees
    half of it.
    """

    state: Path
    ports: dict[str, int] = field(default_factory=dict)
    processes: dict[str, Process] = field(default_factory=dict)
    versions: dict[str, ServerVersion] = field(default_factory=dict)
    stack: str | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def load(cls, state: Path) -> "StackState":
        """Read the record; an empty one when the stack was never started."""
        try:
            document = json.loads((state / "stack.json").read_text())
            processes = {name: Process(**entry) for name, entry in document["processes"].items()}
            versions = {name: ServerVersion(**entry) for name, entry in document["written"].items()}
            return cls(state, document["ports"], processes, versions, document["stack"])
        except (FileNotFoundError, NotADirectoryError):
            return cls(state)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StackError(
                f"{state / 'stack.json'} isn't what cdc up writes: {error}",
                hint="stop the servers it names, if any, remove the state folder, then: cdc up",
            ) from error

    def save(self) -> None:
        """Write the record."""
        document = {
            "stack": self.stack,
            "ports": self.ports,
            "processes": {name: vars(process) for name, process in self.processes.items()},
            "written": {name: vars(writer) for name, writer in self.versions.items()},
        }
        fresh = self.state / "stack.json.new"
        fresh.write_text(json.dumps(document, indent=2) + "\n")
        os.replace(fresh, self.state / "stack.json")

    def claim(self, stack: str) -> None:
        """Claim the folder for one kind of stack. Raises StackError when it belongs to the other
        kind.
        """
        if self.stack not in (None, stack):
            raise StackError(
                f"{self.state} is the state of a stack of kind {self.stack}, so it can't become one of kind {stack}",
                hint=f"go on with --stack {self.stack}, or choose another folder: cdc -p FILE --state FOLDER up"
                f" --stack {stack}",
                path=str(self.state),
            )
        self.stack = stack

    def purge(self, servers: Iterable[str] = ()) -> list[str]:
        """Remove the folders of these servers, the warehouse and, last, the record; the state
        folder, too, where nothing else is in it. Returns what was removed.
        """
        removed = [folder for name in servers if (folder := self.state / name).exists()]
        removed += [folder for folder in [self.state / "warehouse"] if folder.exists()]
        for folder in removed:
            shutil.rmtree(folder)
        for name in ("stack.json", "stack.lock"):
            (self.state / name).unlink(missing_ok=True)
        with suppress(OSError):
            self.state.rmdir()
        return list(map(str, removed))

    @property
    def secrets(self) -> Path | None:
        """The folder of secrets; None for servers that ask for none."""
        return self.state / "secrets" if self.stack == "secured" else None

    def endpoints(self) -> Endpoints:
        """Return where the servers listen when they run."""
        warehouse = self.state / "warehouse"
        warehouse.mkdir(exist_ok=True)
        if self.secrets:
            ca = quote(str(self.secrets / "ca.pem"))
            database = (
                f"localhost:{self.ports['postgres']}/postgres?sslmode=verify-full&sslrootcert={ca}"
            )
            return Endpoints(
                postgres=f"postgresql://postgres:${{file:{self.secrets}/postgres}}@{database}",
                kafka=f"localhost:{self.ports['kafka']}",
                connect=f"https://localhost:{self.ports['connect']}",
                elasticsearch=f"https://localhost:{self.ports['elasticsearch']}",
                redis=f"redis://127.0.0.1:{self.ports['redis']}/0",
                warehouse=str(warehouse),
                state=str(self.state),
                reader=f"postgresql://reader:${{file:{self.secrets}/reader}}@{database}",
                secrets=str(self.secrets),
            )
        address = {name: f"127.0.0.1:{port}" for name, port in self.ports.items()}
        return Endpoints(
            postgres=f"postgresql://postgres@{address['postgres']}/postgres",
            kafka=address["kafka"],
            connect=f"http://{address['connect']}",
            elasticsearch=f"http://{address['elasticsearch']}",
            redis=f"redis://{address['redis']}/0",
            warehouse=str(warehouse),
            state=str(self.state),
        )

    def add_process(self, name: str, process: Process) -> None:
        """Record a server that was started."""
        with self._lock:
            self.processes[name] = process
            self.save()

    def remove_process(self, name: str) -> None:
        """Remove a server that has ended from the record."""
        with self._lock:
            self.processes.pop(name, None)
            self.save()

    def alive(self, name: str) -> bool:
        """Return whether a server's process is alive."""
        process = self.processes.get(name)
        return process is not None and process.find() is not None


@contextmanager
def locked_state(state: Path, progress: Callable[[str], None]) -> Iterator[StackState]:
    """Hold a state folder for one command and read its record."""
    try:
        make_shared(state)
        lock = (state / "stack.lock").open("w")
    except OSError as error:
        raise StackError(
            f"{state} can't be written: {error.strerror}", hint=STATE_HINT, path=str(state)
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"waiting for another command that holds {state}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield StackState.load(state)


def known_endpoints(state: Path) -> Endpoints | None:
    """Return the endpoints of a stack of either kind that was ever started, whether or not its
    servers live.
    """
    record = StackState.load(state.absolute())
    return record.endpoints() if record.ports else None


def stack_kind(state: Path) -> str | None:
    """Return which kind of stack a state folder is of: embedded, secured or compose; None before the
    first `cdc up`.
    """
    return StackState.load(state.absolute()).stack
