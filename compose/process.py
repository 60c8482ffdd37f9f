"""Processes that outlive the command that starts them. Pid and start time identify one, because
pids are reused.
"""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pwd import struct_passwd
from typing import Any

import psutil

# psutil derives the start time from the clock, which may be set a little meanwhile.
CLOCK_SLACK_S = 5.0
KILL_DEADLINE_S = 10.0

# Children of this very process have to be reaped by it, or they stay as zombies.
_children: dict[int, subprocess.Popen[bytes]] = {}


@dataclass(frozen=True)
class Process:
    """The leading process of a server, as it is stored on disk."""

    pid: int
    started: float

    def find(self) -> psutil.Process | None:
        """Return the living process, or None when it ended (even if its pid lives on as
        another's).
        """
        self.exit_status()
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.started) < CLOCK_SLACK_S
            return process if same and process.status() != psutil.STATUS_ZOMBIE else None
        except psutil.NoSuchProcess:
            return None

    def exit_status(self) -> int | None:
        """Return the exit status (negative: the signal), known only to the process that started
        it.
        """
        child = _children.get(self.pid)
        return child.poll() if child else None

    def tree(self) -> list[psutil.Process]:
        """Return the process and all that it started; when it died alone, what it left of its
        session.
        """
        process = self.find()
        try:
            return [process, *process.children(recursive=True)] if process else self._orphans()
        except psutil.NoSuchProcess:
            return self._orphans()

    def _orphans(self) -> list[psutil.Process]:
        # The kernel gives no new process a pid that is still the name of a session; older ones
        # can't be ours.
        orphans = []
        for process in psutil.process_iter():
            try:
                if (
                    os.getsid(process.pid) == self.pid != process.pid
                    and process.create_time() >= self.started
                ):
                    orphans.append(process)
            except (OSError, psutil.Error):
                continue
        return orphans


def options(home: Path, env: Mapping[str, str], user: struct_passwd | None) -> dict[str, Any]:
    """Return what every process of a server is started with: its folder, its environment, no input,
    and the account, None for the caller's own.
    """
    account = (
        {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []} if user is not None else {}
    )
    return {"cwd": home, "env": env, "stdin": subprocess.DEVNULL, **account}


def spawn(
    command: Sequence[str | Path],
    *,
    home: Path,
    log: Path,
    env: Mapping[str, str],
    user: struct_passwd | None,
) -> Process:
    """Start a server in a session of its own, writing to `log`."""
    with log.open("ab") as output:
        child = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            **options(home, env, user),
        )
    _children[child.pid] = child
    return Process(child.pid, psutil.Process(child.pid).create_time())


def request_end(process: Process, stop_signal: signal.Signals) -> list[psutil.Process]:
    """Ask a server to end. Returns its process tree, for `await_end`."""
    tree = process.tree()
    if process.find():
        _signal_group(process.pid, stop_signal)
    elif tree:
        _kill(tree)
    return tree


def await_end(tree: list[psutil.Process], deadline_s: float) -> None:
    """Wait until a process tree is gone; after the deadline, kill the processes that remain."""
    _, alive = psutil.wait_procs(tree, timeout=deadline_s)
    if alive:
        _kill(tree)
    for process in tree:
        if child := _children.pop(process.pid, None):
            child.wait(KILL_DEADLINE_S)


def kill(process: Process) -> None:
    """Kill a server and all that it started at once, as a power cut would."""
    tree = process.tree()
    _kill(tree)
    await_end(tree, KILL_DEADLINE_S)


def end_leftovers(folder: Path, program: Path) -> None:
    """End processes that a dead leader left behind: Postgres' backends, each a session of its
    own.
    """
    leftovers = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(folder) and process.exe() == str(program.resolve()):
                leftovers.append(process)
        except psutil.Error:
            continue
    if leftovers:
        await_end(leftovers, KILL_DEADLINE_S)


def _kill(tree: list[psutil.Process]) -> None:
    # One by one, because Postgres' backends are sessions of their own and no members of the group.
    for process in tree:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(tree, timeout=KILL_DEADLINE_S)


def _signal_group(pid: int, stop_signal: signal.Signals) -> None:
    try:
        os.killpg(pid, stop_signal)
    except (ProcessLookupError, PermissionError):
        # macOS answers "not permitted" for a group that holds only zombies.
        return
