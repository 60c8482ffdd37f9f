"""What is asked of a Docker engine, without one: recorded answers stand in for it, and note the
requests.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml
from testcontainers.core.config import testcontainers_config

from cdc.compose import docker, versions
from tests.support import containers
from tests.support.containers import IMAGES, ContainerControl, run_compose_stack, run_service
from tests.support.server_control import ServerControl

ROOT = Path(__file__).parents[2]
CONTAINER_ID = "8f3a" * 16
IMAGE_ID = "sha256:" + "1b" * 32
HOST_PORT = 49153
VERSION = re.compile(r"^/v[0-9.]+")


class RecordedEngine(ThreadingHTTPServer):
    """Answers in the shape of Docker's API documentation; `created` are the bodies of requests to
    create.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[str] = []
        self.created: list[dict[str, Any]] = []
        # What the health check says each time that the container is inspected; the last one stays.
        self.health = ["starting", "starting", "healthy"]

    def answer(self, request: str, body: dict[str, Any]) -> tuple[int, object]:
        self.requests.append(request)
        if request == "POST /containers/create":
            self.created.append(body)
        if request.startswith("GET /images/"):
            return 200, {"Id": IMAGE_ID}
        if request == f"GET /containers/{CONTAINER_ID}/json":
            return 200, self._inspection()
        answers = {
            "GET /version": (
                200,
                {"Version": "28.5.1", "ApiVersion": "1.51", "MinAPIVersion": "1.24", "Os": "linux"},
            ),
            "POST /containers/create": (201, {"Id": CONTAINER_ID, "Warnings": []}),
            f"POST /containers/{CONTAINER_ID}/start": (204, None),
            f"DELETE /containers/{CONTAINER_ID}": (204, None),
        }
        return answers.get(request, (404, {"message": f"not recorded: {request}"}))

    def _inspection(self) -> dict[str, Any]:
        body = self.created[-1]
        started = f"POST /containers/{CONTAINER_ID}/start" in self.requests
        status = self.health.pop(0) if started and len(self.health) > 1 else self.health[0]
        ports = {
            port: [{"HostIp": "127.0.0.1", "HostPort": str(HOST_PORT)}]
            for port in body["ExposedPorts"]
        }
        return {
            "Id": CONTAINER_ID,
            "Name": "/nostalgic_gould",
            "Image": IMAGE_ID,
            "Config": {"Image": body["Image"], "Tty": False},
            "State": {
                "Status": "running" if started else "created",
                "Health": {"Status": status, "Log": []},
            },
            "NetworkSettings": {"Ports": ports},
        }


class _Handler(BaseHTTPRequestHandler):
    server: RecordedEngine

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = VERSION.sub("", self.path.partition("?")[0])
        status, answer = self.server.answer(f"{self.command} {path}", json.loads(body or b"{}"))
        content = b"" if answer is None else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_DELETE = _serve  # noqa: N815

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[RecordedEngine]:
    with RecordedEngine() as server:
        monkeypatch.setenv("DOCKER_HOST", f"tcp://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
        # The container that removes what a killed test leaves.
        monkeypatch.setattr(testcontainers_config, "ryuk_disabled", True)
        monkeypatch.setattr(containers, "POLL_S", 0.01)
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("name", "image"), [(name, image) for name in IMAGES for image in IMAGES[name]]
)
def test_an_image_gets_what_the_compose_file_says(
    engine: RecordedEngine, name: str, image: str
) -> None:
    service = yaml.safe_load(docker.FILE.read_text())["services"][name]
    with run_service(name, image) as address:
        assert address == f"127.0.0.1:{HOST_PORT}"
        assert engine.health == ["healthy"]
        assert f"DELETE /containers/{CONTAINER_ID}" not in engine.requests
    assert engine.requests[-1] == f"DELETE /containers/{CONTAINER_ID}"
    (body,) = engine.created
    assert body["Image"] == image
    port = f"{service['ports'][0].rsplit(':', 1)[1]}/tcp"
    assert body["ExposedPorts"] == {port: {}}
    assert body["HostConfig"]["PortBindings"] == {port: [{"HostIp": "127.0.0.1", "HostPort": ""}]}
    assert body["Healthcheck"]["Interval"] == int(service["healthcheck"]["interval"][:-1]) * 10**9
    environment = dict(entry.split("=", 1) for entry in body.get("Env") or [])
    if name == "elasticsearch":
        assert environment == service["environment"]
        assert body["Healthcheck"]["Test"] == service["healthcheck"]["test"]
    if name == "postgres":
        builtin = "--encoding=UTF8 --locale=C --locale-provider=builtin --builtin-locale=C.UTF-8"
        has_builtin = image in ("postgres:17", "postgres:18")
        assert environment["POSTGRES_INITDB_ARGS"] == (
            builtin if has_builtin else "--encoding=UTF8 --locale=C"
        )
        assert body["Cmd"][:5] == ["postgres", "-p", "15432", "-c", "wal_level=logical"]
    if name == "redis":
        program = "redis" if image.startswith("redis:") else "valkey"
        assert body["Cmd"][0] == f"{program}-server"
        assert body["Cmd"][body["Cmd"].index("--save") + 1] == ""
        assert body["Healthcheck"]["Test"] == ["CMD", f"{program}-cli", "ping"]


def test_a_container_that_is_unhealthy_is_removed(engine: RecordedEngine) -> None:
    engine.health = ["starting", "unhealthy"]
    with pytest.raises(RuntimeError, match="unhealthy"), run_service("redis", "redis:7.4"):
        pass
    assert engine.requests[-1] == f"DELETE /containers/{CONTAINER_ID}"


def test_the_matrix_ends_with_what_is_shipped() -> None:
    assert IMAGES["postgres"][-1] == f"postgres:{versions.POSTGRES.split('.')[0]}"
    shipped = yaml.safe_load(docker.FILE.read_text())["services"]
    assert [IMAGES[name][-1] for name in ("redis", "elasticsearch")] == [
        shipped[name]["image"] for name in ("redis", "elasticsearch")
    ]


# Notes each call and the project that it is for.
DOCKER = """#!/bin/sh
echo "${{COMPOSE_PROJECT_NAME:-none}} $*" >> {calls}
"""


def test_the_stack_of_a_session_has_a_project_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, calls = tmp_path / "bin" / "docker", tmp_path / "calls"
    script.parent.mkdir()
    script.write_text(DOCKER.format(calls=calls))
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(script.parent), prepend=os.pathsep)
    control: ServerControl = ContainerControl()
    with run_compose_stack(tmp_path / "state") as endpoints:
        assert endpoints.elasticsearch == "http://127.0.0.1:19200"
        control.stop("elasticsearch")
        control.start("elasticsearch")
        control.kill("connect")
        with control.frozen("redis"):
            pass
    assert [
        line.removeprefix(f"cdc-test compose -f {docker.FILE} ")
        for line in calls.read_text().splitlines()
    ] == [
        "cdc-test info",
        "cdc-test compose version",
        "up -d --wait",
        "stop elasticsearch",
        "up -d --wait --no-deps elasticsearch",
        "kill connect",
        "pause redis",
        "unpause redis",
        "cdc-test info",
        "cdc-test compose version",
        "ps --services --status running",
        "down",
        "down --volumes",
    ]


@pytest.mark.parametrize("stack", ["embedded", "containers"])
def test_what_is_collected_follows_the_stack(stack: str) -> None:
    paths = ["tests/containers", "tests/integration/test_another_server.py"]
    options = ["-p", "pytest_timeout", "--collect-only", "-q", "--stack", stack]
    command = [sys.executable, "-m", "pytest", *options, *paths]
    # Loading all plugins that are installed takes longer than this test.
    variables = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    run = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env=variables
    )
    assert run.returncode == 0, run.stdout
    collected = {line.split("::")[0] for line in run.stdout.splitlines() if "::" in line}
    # A container can't reach the Postgres that the other file starts.
    if stack == "containers":
        assert collected == {"tests/containers/test_stack.py", "tests/containers/test_versions.py"}
    else:
        assert collected == {"tests/integration/test_another_server.py"}
