"""What a state folder remembers of its stack (`stack.json`): ports for good, processes while they run."""

import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path

from cdc.errors import StackError
from compose.process import Process


class Book:
    """The record of one stack; written whole and renamed, so that a reader never meets half of it."""

    def __init__(self, state: Path, ports: Mapping[str, int], processes: Mapping[str, Process]) -> None:
        self.state = state
        self.ports = dict(ports)
        self.processes = dict(processes)
        self._lock = threading.Lock()

    @classmethod
    def load(cls, state: Path) -> "Book":
        """Read the record; an empty one when the stack was never started."""
        try:
            page = json.loads((state / "stack.json").read_text())
            processes = {name: Process(**entry) for name, entry in page["processes"].items()}
            return cls(state, page["ports"], processes)
        except (FileNotFoundError, NotADirectoryError):
            return cls(state, {}, {})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StackError(
                f"{state / 'stack.json'} isn't what cdc up writes: {error}",
                hint="stop the servers it names, if any, remove the state folder, then: cdc up",
            ) from error

    def save(self) -> None:
        """Write the record."""
        processes = {name: vars(process) for name, process in self.processes.items()}
        fresh = self.state / "stack.json.new"
        fresh.write_text(json.dumps({"ports": self.ports, "processes": processes}, indent=2) + "\n")
        os.replace(fresh, self.state / "stack.json")

    def enter(self, name: str, process: Process) -> None:
        """Remember a server that was started."""
        with self._lock:
            self.processes[name] = process
            self.save()

    def strike(self, name: str) -> None:
        """Forget a server that ended."""
        with self._lock:
            self.processes.pop(name, None)
            self.save()

    def alive(self, name: str) -> bool:
        """Tell whether a server's process lives."""
        process = self.processes.get(name)
        return process is not None and process.find() is not None
