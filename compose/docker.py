"""Servers of the stack as containers, through `docker compose`, with the same endpoints as
stack.py.
"""

import subprocess
from collections.abc import Callable
from pathlib import Path

from cdc.compose.stack_state import Endpoints, locked_state
from cdc.compose.versions import SERVER_VERSIONS, require_readable
from cdc.errors import StackError

FILE = Path(__file__).parent / "docker-compose.yml"
# Ports that the compose file publishes on 127.0.0.1.
PORTS = {
    "postgres": 15432,
    "kafka": 19092,
    "connect": 18083,
    "elasticsearch": 19200,
    "redis": 16379,
}


def up(state: Path, *, progress: Callable[[str], None]) -> Endpoints:
    """Start the containers and wait until their health checks pass.

    In `state` lie the warehouse and the record by which the other verbs find the servers.
    """
    require_engine()
    with locked_state(state.absolute(), progress) as record:
        record.claim("compose")
        require_readable(record.state, record.versions, SERVER_VERSIONS)
        record.ports = dict(PORTS)
        record.versions = dict(SERVER_VERSIONS)
        record.save()
        progress("starting containers")
        _compose("up", "-d", "--wait")
        return record.endpoints()


def down(state: Path, *, progress: Callable[[str], None]) -> list[str]:  # noqa: ARG001
    """Stop and remove the containers, keep their volumes; return the services that ran.

    A machine has one set of them, whichever state folder they were started for.
    """
    require_engine()
    ran = _compose("ps", "--services", "--status", "running").split()
    progress("stopping containers")
    _compose("down")
    return ran


def purge(state: Path, *, progress: Callable[[str], None]) -> list[str]:
    """Stop and remove the containers with their volumes, and the warehouse; return what was
    removed.
    """
    require_engine()
    progress("removing containers and volumes")
    _compose("down", "--volumes")
    with locked_state(state.absolute(), progress) as record:
        return ["the containers and their volumes", *record.purge()]


def require_engine() -> None:
    """Refuse when there is no Docker engine, or no compose plugin, to talk to."""
    for command in (["docker", "info"], ["docker", "compose", "version"]):
        try:
            answer = subprocess.run(command, capture_output=True, timeout=60, check=False)
            works = answer.returncode == 0
        except (OSError, subprocess.TimeoutExpired):
            works = False
        if not works:
            raise StackError(
                f"`{' '.join(command)}` fails: no Docker engine to run containers with",
                hint="start Docker, or run the servers as processes: cdc up --stack embedded",
            )


def _compose(*arguments: str) -> str:
    run = subprocess.run(
        ["docker", "compose", "-f", FILE, *arguments], capture_output=True, text=True, check=False
    )
    if run.returncode != 0:
        lines = "\n".join(f"    {line}" for line in run.stderr.splitlines()[-15:])
        raise StackError(
            f"docker compose {arguments[0]} ended with status {run.returncode}\n{lines}",
            hint=f"look at the logs: docker compose -f {FILE} logs",
        )
    return run.stdout
