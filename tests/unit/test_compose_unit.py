"""The stack of containers through the command line; a script stands in for Docker."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cdc.cli.verbs import app
from cdc.compose import docker
from cdc.compose.stack_state import StackState
from cdc.compose.versions import ServerVersion
from cdc.errors import CdcError, SourceError, StackError
from cdc.runtime.context import Context

PIPELINE = """
pipeline: shop
source: {dsn: "${CDC_POSTGRES}", tables: [public.orders]}
sinks:
  search: {type: elasticsearch, url: "${CDC_ELASTICSEARCH}"}
  cache: {type: redis, url: "${CDC_REDIS}", prefix: shop}
  warehouse: {type: delta, path: "${CDC_WAREHOUSE}"}
"""
# What Docker 28 answers, as far as cdc asks. Anything else is a mistake in the call.
DOCKER = """#!{python} -IS
import os, sys
running, words = "{running}", sys.argv[1:]
if words in (["info"], ["compose", "version"]):
    sys.exit(0)
if words[:3] != ["compose", "-f", "{file}"]:
    sys.exit(f"unknown docker command: {{words}}")
words = words[3:]
if words == ["up", "-d", "--wait"]:
    open(running, "w").write("connect\\nelasticsearch\\nkafka\\npostgres\\nredis\\n")
elif words == ["ps", "--services", "--status", "running"]:
    print(open(running).read() if os.path.exists(running) else "", end="")
elif words == ["down"]:
    os.path.exists(running) and os.remove(running)
else:
    sys.exit(f"unknown docker compose command: {{words}}")
"""

Run = Callable[..., str]


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    script = tmp_path / "bin" / "docker"
    script.parent.mkdir()
    script.write_text(
        DOCKER.format(python=sys.executable, running=tmp_path / "running", file=docker.FILE)
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(script.parent), prepend=os.pathsep)
    for name in list(os.environ):
        if name.startswith("CDC_"):
            monkeypatch.delenv(name)
    return tmp_path / "state"


@pytest.fixture
def run(tmp_path: Path, state: Path) -> Run:
    """Return the output of a verb; raise its error."""
    file = tmp_path / "shop.yaml"
    file.write_text(PIPELINE)

    def run(*words: str) -> str:
        result = CliRunner().invoke(app, ["-p", str(file), "--state", str(state), *words])
        if isinstance(result.exception, CdcError):
            raise result.exception
        assert result.exit_code == 0, result.output
        return result.stdout

    return run


def test_up_is_known_to_the_other_verbs(tmp_path: Path, state: Path, run: Run) -> None:
    endpoints = json.loads(run("up", "--stack", "compose", "--json"))
    assert endpoints["kafka"] == "127.0.0.1:19092"
    assert endpoints["state"] == str(state)
    pipeline = Context(tmp_path / "shop.yaml", state).load()
    assert (pipeline.source.dsn, pipeline.kafka, pipeline.connect) == (
        endpoints["postgres"],
        endpoints["kafka"],
        endpoints["connect"],
    )
    # Nobody listens there: the verb has got as far as asking the right place.
    with pytest.raises(SourceError, match=r"127\.0\.0\.1:15432 can't be reached"):
        run("migrate")
    # Addresses outlive the servers, as an embedded stack's do.
    run("down", "--stack", "compose")
    assert Context(tmp_path / "shop.yaml", state).load() == pipeline


@pytest.mark.parametrize("words", [("--stack", "compose"), ()])
def test_down_stops_the_containers(run: Run, words: tuple[str, ...]) -> None:
    run("up", "--stack", "compose", "--json")
    stopped = {"stopped": ["connect", "elasticsearch", "kafka", "postgres", "redis"]}
    assert json.loads(run("down", *words, "--json")) == stopped
    assert json.loads(run("down", *words, "--json")) == {"stopped": []}


def test_up_without_a_word_is_the_states_own(run: Run) -> None:
    endpoints = run("up", "--stack", "compose", "--json")
    assert run("up", "--json") == endpoints


def test_a_state_is_of_one_stack(state: Path, run: Run) -> None:
    run("up", "--stack", "compose", "--json")
    with pytest.raises(StackError, match="of a stack of kind compose") as caught:
        run("up", "--stack", "embedded")
    assert "--stack compose" in caught.value.hint


def test_data_of_a_newer_image_is_refused(state: Path, run: Run) -> None:
    run("up", "--stack", "compose", "--json")
    record = StackState.load(state)
    record.versions["postgres"] = ServerVersion("Postgres", "99.1")
    record.save()
    with pytest.raises(StackError, match=r"written by Postgres 99\.1"):
        run("up")
