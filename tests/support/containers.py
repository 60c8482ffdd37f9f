"""Servers in containers: the shipped compose file as a whole, or one of its services with another
image.

Both need a Docker engine; a test that uses them is collected with `--stack containers` only.
"""

import shlex
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from testcontainers.core.container import DockerContainer
from testcontainers.core.wait_strategies import HealthcheckWaitStrategy

from cdc.compose import docker, versions
from cdc.compose.stack_state import Endpoints

PROJECT = "cdc-test"
STARTUP_TIMEOUT_S = 180
POLL_S = 1.0
IMAGES = {
    "postgres": [f"postgres:{major}" for major in (14, 15, 16, 17, 18)],
    "redis": ["redis:7.2", "redis:7.4", f"valkey/valkey:{versions.VALKEY}"],
    "elasticsearch": [
        f"docker.elastic.co/elasticsearch/elasticsearch:{version}"
        for version in ("8.11.4", "8.15.5", versions.ELASTICSEARCH)
    ],
}
"""The version matrix: images by service of the compose file, each list ends with the version that is shipped."""


@contextmanager
def run_compose_stack(state: Path) -> Iterator[Endpoints]:
    """Run the shipped compose file from start to end, with volumes of its own.

    `cdc.compose.docker` runs it, as `cdc up --stack compose` does:
    `testcontainers.compose.DockerCompose` would build another command line, and leave untested what
    users start.
    """
    with pytest.MonkeyPatch.context() as patch:
        # Outranks the `name` in the file, so no volume of a developer's own stack is read or
        # removed. The ports are the same: next to a stack that runs, this one fails to start.
        patch.setenv("COMPOSE_PROJECT_NAME", PROJECT)
        try:
            yield docker.up(state, progress=print)
        finally:
            docker.down(state, progress=print)
            _compose("down", "--volumes")


@dataclass(frozen=True)
class ContainerControl:
    """Stops, kills and freezes services of a running `run_compose_stack`, as tests of failures ask for."""

    def stop(self, server: str) -> None:
        _compose("stop", server)

    def kill(self, server: str) -> None:
        _compose("kill", server)

    def start(self, server: str) -> None:
        """Return when the health check passes."""
        _compose("up", "-d", "--wait", "--no-deps", server)

    @contextmanager
    def frozen(self, server: str) -> Iterator[None]:
        """Suspend every process of a server: it takes connections and answers none."""
        _compose("pause", server)
        try:
            yield
        finally:
            _compose("unpause", server)


def _compose(*arguments: str) -> None:
    subprocess.run(["docker", "compose", "-f", docker.FILE, *arguments], check=True)


@contextmanager
def run_service(name: str, image: str) -> Iterator[str]:
    """Run one service of the compose file with another image; give its address, host and port, once
    it is healthy.

    It is reachable from this machine alone, for no server of the compose file asks for a password.
    """
    port = inner_port(name)
    with build_container(name, image) as started:
        published = started.get_docker_client().port(started.get_container_id(), port)
        yield f"127.0.0.1:{published}"


def build_container(name: str, image: str) -> DockerContainer:
    """Describe a container by what the compose file says of the service; nothing is started."""
    service = _read_service(name)
    command = service.get("command", "")
    probe = service["healthcheck"]["test"]
    if image.startswith("redis:"):
        # The programs of Redis have the other name; their options are the same.
        command = command.replace("valkey-", "redis-")
        probe = [word.replace("valkey-", "redis-") for word in probe]
    healthy = (
        HealthcheckWaitStrategy().with_startup_timeout(STARTUP_TIMEOUT_S).with_poll_interval(POLL_S)
    )
    result = DockerContainer(image).waiting_for(healthy)
    if command:
        result.with_command(shlex.split(command))
    for key, value in service.get("environment", {}).items():
        result.with_env(key, value)
    if image.startswith("postgres:") and int(image.partition(":")[2].split(".")[0]) < 17:
        # Postgres has had this provider of locales since 17. C sorts by byte as well.
        result.with_env("POSTGRES_INITDB_ARGS", "--encoding=UTF8 --locale=C")
    # The engine chooses the port; `with_exposed_ports` would open it to the network.
    cast(dict[str, Any], result.ports)[str(inner_port(name))] = ("127.0.0.1",)
    interval_s = int(service["healthcheck"]["interval"].removesuffix("s"))
    return result.with_kwargs(
        healthcheck={
            "test": probe,
            "interval": interval_s * 1_000_000_000,
            "retries": service["healthcheck"]["retries"],
        }
    )


def inner_port(name: str) -> int:
    """Return the port that a service listens on inside its container."""
    return int(_read_service(name)["ports"][0].rsplit(":", 1)[1])


def _read_service(name: str) -> dict[str, Any]:
    page = yaml.safe_load(docker.FILE.read_text())
    return cast(dict[str, Any], page["services"][name])
