"""Real servers and one Spark session for all tests, started when the first test asks for them."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import psycopg
import pytest

from cdc.compose import artifacts, versions
from cdc.compose import stack as servers
from cdc.compose.stack_state import Endpoints
from tests.__main__ import CONTAINER_TESTS
from tests.support import buckets
from tests.support.server_control import ProcessControl, ServerControl
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


# For every JVM that the tests start: none lives long enough for what the second compiler is worth.
# It took a third of Spark's CPU in its first five minutes. Without it Java keeps 48 MB for compiled
# code; Spark fills them within minutes, and from then on nothing is compiled. What the first one
# does is cheap, so it needn't wait (`cdc.model.jvm_options`).
os.environ.setdefault(
    "JAVA_TOOL_OPTIONS",
    "-XX:TieredStopAtLevel=1 -XX:CompileThresholdScaling=1 -XX:ReservedCodeCacheSize=240m -XX:+UseSerialGC",
)


buckets.set_environment()


@dataclass(frozen=True)
class Stack:
    endpoints: Endpoints
    state: Path
    servers: ServerControl

    def dsn(self, database: str) -> str:
        return self.endpoints.postgres.rsplit("/", 1)[0] + f"/{database}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--stack",
        choices=["embedded", "containers"],
        default="embedded",
        help="servers to test against: local processes, or containers of the shipped compose file, for which a Docker"
        " engine is needed (then also tests/containers is collected)",
    )
    parser.addoption(
        "--index",
        default="",
        help="the URL of a running server to test against instead of the Elasticsearch of the local servers",
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the tests that need a Docker engine, unless it is asked for: none of them is
    skipped.
    """
    needs_engine = collection_path.is_relative_to(Path(__file__).parents[1] / CONTAINER_TESTS)
    return True if needs_engine and config.getoption("--stack") != "containers" else None


def pytest_report_header() -> list[str]:
    pinned = {
        name: value
        for name, value in vars(versions).items()
        if name.isupper() and isinstance(value, str)
    }
    return [f"{name.lower()}: {value}" for name, value in sorted(pinned.items())]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With containers, leave out the tests that need Connect to be a process."""
    if config.getoption("--stack") == "containers":
        excluded = [item for item in items if item.get_closest_marker("own_source")]
        config.hook.pytest_deselected(items=excluded)
        items[:] = [item for item in items if item not in excluded]


@pytest.fixture(scope="session")
def stack(pytestconfig: pytest.Config) -> Iterator[Stack]:
    """The servers of the session, of the kind that `--stack` names."""
    state = Path(tempfile.mkdtemp(prefix="cdc-test-"))
    # The servers that refuse to run as root need to reach it as another user.
    state.chmod(0o755)
    start = _run_containers if pytestconfig.getoption("--stack") == "containers" else _run_processes
    try:
        with start(state) as running:
            _set_up_postgres(running.endpoints.postgres)
            url = pytestconfig.getoption("--index") or running.endpoints.elasticsearch
            yield replace(running, endpoints=replace(running.endpoints, elasticsearch=url))
    finally:
        shutil.rmtree(state, ignore_errors=True)


def _set_up_postgres(postgres: str) -> None:
    """Spare the disk, and let Postgres analyze no table unasked.

    Without fsync a killed server loses nothing; only a machine that loses its power does. After an
    ANALYZE Postgres describes the table to the connector again, so tests of what the connector
    knows would depend on when autovacuum comes.
    """
    with psycopg.connect(postgres, autocommit=True) as admin:
        admin.execute("ALTER SYSTEM SET fsync = off")
        admin.execute("ALTER SYSTEM SET autovacuum = off")
        admin.execute("SELECT pg_reload_conf()")


@contextmanager
def _run_processes(state: Path) -> Iterator[Stack]:
    try:
        yield Stack(servers.up(state, progress=print), state, ProcessControl(state))
    finally:
        servers.down(state, progress=print)


@contextmanager
def _run_containers(state: Path) -> Iterator[Stack]:
    from tests.support.containers import ContainerControl, run_compose_stack

    with run_compose_stack(state) as endpoints:
        yield Stack(endpoints, state, ContainerControl())


@pytest.fixture
def unique() -> str:
    """A name that no other test uses: for pipelines, slots, topics, indices and key prefixes."""
    return f"t_{uuid4().hex[:8]}"


@pytest.fixture
def postgres_dsn(stack: Stack, unique: str) -> Iterator[str]:
    """A new, empty database; connections and slots that a test left on it end with it."""
    name = f"db_{unique}"
    with psycopg.connect(stack.endpoints.postgres, autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {name} TEMPLATE template0")
        yield stack.dsn(name)
        wait_until(lambda: _without_slots(admin, name), 30, f"the slots of {name} to end")
        admin.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")


def _without_slots(admin: "psycopg.Connection[tuple[Any, ...]]", database: str) -> bool:
    """Drop the slots that a test's connector left; one that is still read is dropped at the next
    try.
    """
    slots = admin.execute(
        "SELECT slot_name, active_pid FROM pg_replication_slots WHERE database = %s", [database]
    ).fetchall()
    for name, pid in slots:
        if pid is None:
            admin.execute("SELECT pg_drop_replication_slot(%s)", [name])
    return not slots


@pytest.fixture(scope="session")
def spark() -> "Iterator[SparkSession]":
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    from cdc.cli.run import LOCAL
    from cdc.config.sink_kinds import kinds
    from cdc.spark.session import session

    # What workers run for any verb: else each of them imports it, which takes a second.
    modules = [*{kind.executor: None for kind in kinds() if kind.executor}, "cdc.verify.census"]
    built = session(LOCAL, artifacts.spark_jars(), modules=modules)
    yield built
    built.stop()
