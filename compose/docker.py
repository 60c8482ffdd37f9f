"""The same servers as containers, through `docker compose`; gives the same endpoints as stack.py."""

import subprocess
from collections.abc import Callable
from pathlib import Path

from cdc.errors import StackError
from compose import artifacts
from compose.endpoints import Endpoints

FILE = Path(__file__).parent / "docker-compose.yml"
# The addresses that the file publishes.
AT = {
    "postgres": "127.0.0.1:15432",
    "kafka": "127.0.0.1:19092",
    "connect": "127.0.0.1:18083",
    "elasticsearch": "127.0.0.1:19200",
    "redis": "127.0.0.1:16379",
}


def up(state: Path, *, progress: Callable[[str], None]) -> Endpoints:
    """Start the containers and wait until their health checks pass. Only the warehouse lies in `state`."""
    require_engine()
    artifacts.make_shared(state / "warehouse")
    progress("starting containers")
    _compose("up", "-d", "--wait")
    return Endpoints(
        postgres=f"postgresql://postgres@{AT['postgres']}/postgres",
        kafka=AT["kafka"],
        connect=f"http://{AT['connect']}",
        elasticsearch=f"http://{AT['elasticsearch']}",
        redis=f"redis://{AT['redis']}/0",
        warehouse=str((state / "warehouse").absolute()),
        state=str(state.absolute()),
    )


def down(*, progress: Callable[[str], None]) -> list[str]:
    """Stop and remove the containers, keep their volumes; return the services that ran."""
    require_engine()
    ran = _compose("ps", "--services", "--status", "running").split()
    progress("stopping containers")
    _compose("down")
    return ran


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
    run = subprocess.run(["docker", "compose", "-f", FILE, *arguments], capture_output=True, text=True, check=False)
    if run.returncode != 0:
        lines = "\n".join(f"    {line}" for line in run.stderr.splitlines()[-15:])
        raise StackError(
            f"docker compose {arguments[0]} ended with status {run.returncode}\n{lines}",
            hint=f"look at the logs: docker compose -f {FILE} logs",
        )
    return run.stdout
