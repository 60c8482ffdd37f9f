"""The embedded servers for real: started, repaired, refused, stopped; on a stack that only these tests break."""

import os
import shutil
import signal
import socket
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import psycopg
import pytest
import redis

from cdc.compose import host, stack
from cdc.compose.stack_state import Endpoints, StackState
from cdc.compose.versions import ServerVersion
from cdc.errors import StackError
from tests.support.server_control import ProcessControl
from tests.support.wait import wait_until

NAMES = ["postgres", "kafka", "elasticsearch", "redis", "connect"]


@pytest.fixture(scope="module")
def state() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="cdc-stack-"))
    folder.chmod(0o755)
    # Somebody else's: servers start beside it, and it stays.
    (folder / "pipeline.yaml").write_text("pipeline: shop\n")
    yield folder
    stack.down(folder, progress=print)
    shutil.rmtree(folder)


@pytest.fixture
def endpoints(state: Path) -> Endpoints:
    return stack.up(state, progress=print)


def pids(state: Path) -> dict[str, int]:
    """The processes that live, by server."""
    record = StackState.load(state)
    return {name: record.processes[name].pid for name in NAMES if record.alive(name)}


def memory_bytes(processes: Iterable[psutil.Process]) -> int:
    """Sum the memory of processes, counting what they share once."""
    memory = [process.memory_info() for process in processes]
    shared = [info.shared for info in memory]
    return sum(info.rss for info in memory) - sum(shared) + max(shared)


def processes(folder: Path) -> list[psutil.Process]:
    """Return everything that works in a folder, whoever remembers it."""
    servers = []
    for process in psutil.process_iter():
        try:
            if Path(process.cwd()).is_relative_to(folder):
                servers.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return servers


def test_up_again_changes_nothing(state: Path, endpoints: Endpoints) -> None:
    old_pids = pids(state)
    messages: list[str] = []
    assert stack.up(state, progress=messages.append) == endpoints == stack.running(state)
    assert pids(state) == old_pids
    assert messages == []


def test_listens_on_loopback_only(state: Path, endpoints: Endpoints) -> None:
    ours = {
        child.pid
        for pid in pids(state).values()
        for child in psutil.Process(pid).children(recursive=True)
    }
    ours |= set(pids(state).values())
    connections = psutil.net_connections("inet")
    listening: list[Any] = [
        c.laddr for c in connections if c.pid in ours and c.status == psutil.CONN_LISTEN
    ]
    assert {address.ip for address in listening} == {"127.0.0.1"}
    kept = StackState.load(state).ports
    assert {kept[name] for name in NAMES} <= {address.port for address in listening}


def test_all_fit_beside_spark(state: Path, endpoints: Endpoints) -> None:
    trees = [process.tree() for process in StackState.load(state).processes.values()]
    assert sum(map(memory_bytes, trees)) < 3.5 * (1 << 30)


def test_postgres_is_ready_for_logical_decoding(endpoints: Endpoints) -> None:
    settings = {
        "wal_level": "logical",
        "track_commit_timestamp": "on",
        "TimeZone": "UTC",
        "fsync": "on",
        "server_encoding": "UTF8",
    }
    with psycopg.connect(endpoints.postgres) as connection:
        for setting, value in settings.items():
            assert connection.execute(f"SHOW {setting}").fetchone() == (value,)
        assert connection.execute("SELECT lower('ÄÖ')").fetchone() == ("äö",)


def test_connect_lets_only_listed_overrides_pass(endpoints: Endpoints) -> None:
    config = {
        "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
        "name": "overrides",
        "topic.prefix": "overrides",
        "database.hostname": "127.0.0.1",
        "producer.override.linger.ms": "5",
        "producer.override.compression.type": "lz4",
        "producer.override.batch.size": "262144",
        "producer.override.acks": "0",
    }
    answer = httpx.post(
        f"{endpoints.connect}/connectors", json={"name": "overrides", "config": config}, timeout=60
    )
    assert answer.status_code == 400
    refused = answer.json()["message"]
    assert "acks" in refused
    assert not any(name in refused for name in ("linger", "compression", "batch.size"))


def topics(bootstrap: str, create: str | None = None) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # raised by the client's own imports
        from kafka import KafkaAdminClient

        admin = KafkaAdminClient(bootstrap_servers=bootstrap)
    try:
        if create:
            admin.create_topics({create: {"num_partitions": 1, "replication_factor": 1}})
        return list(admin.list_topics())
    finally:
        admin.close()


def put(endpoints: Endpoints, name: str) -> None:
    """Leave a trace in one server."""
    if name == "postgres":
        with psycopg.connect(endpoints.postgres) as connection:
            connection.execute("CREATE TABLE kept AS SELECT 1 AS id")
    elif name == "kafka":
        topics(endpoints.kafka, create="kept")
    elif name == "elasticsearch":
        answer = httpx.put(
            f"{endpoints.elasticsearch}/kept/_doc/1?refresh=true", json={"id": 1}, timeout=60
        )
        assert answer.status_code == 201
    elif name == "redis":
        with redis.Redis.from_url(endpoints.redis) as client:
            client.set("kept", "1")
            # The file is synced once a second, so a power cut may take that; a killed process may
            # not.
            client.waitaof(1, 0, 5000)


def keeps_data(endpoints: Endpoints, name: str) -> bool:
    """Tell whether the trace is still there; Connect keeps nothing of its own."""
    if name == "postgres":
        with psycopg.connect(endpoints.postgres) as connection:
            return connection.execute("SELECT id FROM kept").fetchone() == (1,)
    if name == "kafka":
        return "kept" in topics(endpoints.kafka)
    if name == "elasticsearch":
        return httpx.get(f"{endpoints.elasticsearch}/kept/_doc/1", timeout=60).status_code == 200
    if name == "redis":
        with redis.Redis.from_url(endpoints.redis) as client:
            return bool(client.exists("kept"))
    return httpx.get(f"{endpoints.connect}/connectors", timeout=60).text == "[]"


@pytest.mark.parametrize("killed", [NAMES[::2], NAMES[1::2]])
def test_killed_servers_come_back_where_they_were_and_no_other_is_touched(
    state: Path, endpoints: Endpoints, killed: list[str]
) -> None:
    old_pids = pids(state)
    for name in killed:
        put(endpoints, name)
        os.kill(old_pids[name], signal.SIGKILL)
    wait_until(
        lambda: not any(StackState.load(state).alive(name) for name in killed), 10, "them to die"
    )
    assert stack.running(state) is None
    assert stack.up(state, progress=print) == endpoints
    assert all(keeps_data(endpoints, name) for name in killed)
    new_pids = pids(state)
    assert [server for server in NAMES if new_pids[server] != old_pids[server]] == killed


@pytest.mark.parametrize("end", [ProcessControl.stop, ProcessControl.kill])
def test_one_server_stops_and_starts(
    state: Path, endpoints: Endpoints, end: Callable[[ProcessControl, str], None]
) -> None:
    servers = ProcessControl(state)
    end(servers, "redis")
    assert "redis" not in pids(state)
    assert stack.running(state) is None
    servers.start("redis")
    assert stack.running(state) == endpoints
    new_pids = pids(state)
    servers.start("redis")
    assert pids(state) == new_pids


def test_server_that_dies_at_start_is_named_and_takes_down_what_was_started_with_it(
    state: Path, endpoints: Endpoints
) -> None:
    ProcessControl(state).stop("postgres")
    ProcessControl(state).stop("redis")
    old_pids = pids(state)
    setting = state / "postgres" / "data" / "postgresql.auto.conf"
    good = setting.read_text()
    messages: list[str] = []
    try:
        setting.write_text("no_such_setting = 1\n")
        with pytest.raises(
            StackError, match="postgres ended with status 1 while starting"
        ) as caught:
            stack.up(state, progress=messages.append)
    finally:
        setting.write_text(good)
    assert caught.value.details["service"] == "postgres"
    assert "no_such_setting" in caught.value.message
    assert "starting postgres, redis" in messages
    # The others were there before, and go on.
    assert pids(state) == old_pids
    assert processes(state / "postgres") + processes(state / "redis") == []
    assert stack.up(state, progress=print) == endpoints


def test_kept_port_that_someone_took_is_refused(state: Path, endpoints: Endpoints) -> None:
    port = StackState.load(state).ports["redis"]
    ProcessControl(state).kill("redis")
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen()
        with pytest.raises(
            StackError, match=f"port {port} of redis is taken by process {os.getpid()}"
        ):
            stack.up(state, progress=print)
    assert stack.up(state, progress=print) == endpoints


def test_data_that_something_newer_wrote_is_refused_before_it_starts(
    state: Path, endpoints: Endpoints
) -> None:
    ProcessControl(state).stop("redis")
    old_pids, record = pids(state), StackState.load(state)
    version = record.versions["redis"]
    assert version.server == "Valkey"
    record.versions["redis"] = ServerVersion("Valkey", "99.0.1")
    record.save()
    with pytest.raises(
        StackError, match=rf"written by Valkey 99\.0\.1, which {version} can't read"
    ):
        stack.up(state, progress=print)
    # What runs goes on running, and what refused has touched nothing.
    assert pids(state) == old_pids
    record.versions["redis"] = version
    record.save()
    assert stack.up(state, progress=print) == endpoints


def test_down_leaves_no_process_and_frees_the_ports(state: Path, endpoints: Endpoints) -> None:
    assert processes(state)
    assert stack.down(state, progress=print) == [
        "connect",
        "redis",
        "elasticsearch",
        "kafka",
        "postgres",
    ]
    assert processes(state) == []
    assert all(map(host.is_free_port, StackState.load(state).ports.values()))
    assert stack.running(state) is None
    assert stack.down(state, progress=print) == []


def test_purged_data_is_gone_and_files_of_others_stay(state: Path) -> None:
    """The last one: what it leaves is what the first one began with.

    Without the fixture of the endpoints, for after the test before one server is enough.
    """
    ProcessControl(state).start("redis")
    assert processes(state)
    removed = stack.purge(state, progress=print)
    assert {Path(folder).name for folder in removed} == {*NAMES, "warehouse"}
    assert processes(state) == []
    assert [path.name for path in state.iterdir()] == ["pipeline.yaml"]
    assert stack.purge(state, progress=print) == []
