"""A pipeline whose servers all ask who it is. Postgres by TLS; Kafka by TLS and SCRAM, with rights by the
pipeline's name; Connect by TLS and a client's certificate; two nodes of an index by TLS and a user with
the documented rights; the cache by a user with the documented commands. Passwords are in files.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import redis
import yaml
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from cdc.cli.destroy import prepare
from cdc.redis.server import COMMANDS
from cdc.runtime.context import Context
from tests.support import secured, secured_index
from tests.support.cache import cache
from tests.support.postgres import tls_postgres
from tests.support.secured import SecuredBroker, SecuredConnect
from tests.support.secured_index import SecuredIndex
from tests.support.shop import read_records
from tests.support.verbs import run_with_spark
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from tests.scenarios.conftest import World

SECRETS = {
    "source": "owner-secret-of-the-source",
    "replication": "the connector's password",
    "kafka": secured.PASSWORD,
    "index": secured_index.PASSWORD,
    "cache": "cache-secret",
}
"""By the name of the file that holds it."""


@pytest.fixture
def broker() -> Iterator[SecuredBroker]:
    with secured.secured_broker() as running:
        yield running


@pytest.fixture
def connect(broker: SecuredBroker) -> Iterator[SecuredConnect]:
    with secured.secured_connect(broker) as running:
        yield running


@pytest.fixture
def index() -> Iterator[SecuredIndex]:
    with secured_index.secured_index() as running:
        yield running


@pytest.fixture
def secured_cache(tmp_path: Path) -> Iterator[str]:
    with cache(tmp_path / "cache-server") as url:
        yield url


@pytest.fixture
def source(tmp_path: Path) -> Iterator[str]:
    """The DSN of the tables' owner, who is no superuser."""
    (tmp_path / "authority").mkdir()
    with tls_postgres(tmp_path / "authority") as (dsn, _):
        with psycopg.connect(dsn, autocommit=True) as admin:
            admin.execute(f"ALTER ROLE owner PASSWORD '{SECRETS['source']}'")
        yield make_conninfo(dsn, password=SECRETS["source"])


def secured_file(
    world: "World",
    broker: SecuredBroker,
    connect: SecuredConnect,
    index: SecuredIndex,
    cache_url: str,
) -> None:
    """Write the pipeline's file with a login for each server, and give its users their rights."""

    def reference(name: str) -> str:
        (world.folder / name).write_text(SECRETS[name])
        return f"${{file:{world.folder / name}}}"

    broker.set_password("shop", secured.PASSWORD)
    for user in ("shop", "connect"):
        broker.allow(user, "TOPIC", world.name)
        broker.allow(user, "TRANSACTIONAL_ID", world.name)
    broker.allow("connect", "TRANSACTIONAL_ID", f"cdc-connect-{world.name}")
    with redis.Redis.from_url(cache_url) as server:
        rights = ["on", f">{SECRETS['cache']}", f"~{world.name}:*"]
        commands = [f"+{command}" for command in COMMANDS.split()]
        server.execute_command("ACL", "SETUSER", "shop", *rights, *commands)
    parameters = conninfo_to_dict(world.dsn)
    tree: dict[str, Any] = {
        "pipeline": world.name,
        "source": {
            "dsn": make_conninfo("", **{**parameters, "password": reference("source")}),
            "replication_password": reference("replication"),
            "heartbeat_s": 0.3,
            "tables": ["public.items"],
        },
        "kafka": {
            "brokers": [broker.login],
            "protocol": "SASL_SSL",
            "ca": str(broker.authority.ca),
            "mechanism": "SCRAM-SHA-512",
            "user": "shop",
            "password": reference("kafka"),
        },
        "connect": {
            "url": connect.url,
            "ca": str(broker.authority.ca),
            "certificate": str(broker.certificate),
            "key": str(broker.key),
        },
        "sinks": {
            "search": {
                "type": "elasticsearch",
                "nodes": list(index.urls),
                "ca": str(index.ca),
                "user": secured_index.USER,
                "password": reference("index"),
            },
            "cache": {
                "type": "redis",
                "url": f"{cache_url.rpartition('/')[0]}/2",
                "user": "shop",
                "password": reference("cache"),
                "prefix": world.name,
            },
            "warehouse": {"type": "delta", "path": str(world.warehouse), "trigger_s": 1},
        },
    }
    world.file.write_text(yaml.safe_dump(tree))


@pytest.mark.own_source
def test_a_secured_pipeline_from_snapshot_to_rebuild(
    world: "World",
    source: str,
    broker: SecuredBroker,
    connect: SecuredConnect,
    index: SecuredIndex,
    secured_cache: str,
) -> None:
    """The index' password is changed under the run: that is reported, holds up no other sink, and passes
    by itself.
    """
    world.dsn = source
    secured_file(world, broker, connect, index, secured_cache)
    world.sql("CREATE TABLE items (id int PRIMARY KEY, n int)")
    world.cdc("migrate")
    world.cdc("register")
    with world.process():
        world.sql("INSERT INTO items SELECT n, n FROM generate_series(1, 1000) n")
        world.settle()
        index.change_password(secured_index.USER, "another-4711")
        wait_until(
            lambda: "doesn't accept the login" in world.cdc("status").stdout,
            60,
            "status to report it",
        )
        world.sql("UPDATE items SET n = -n WHERE id % 3 = 0", "DELETE FROM items WHERE id < 9")
        world.settle(sinks=["cache", "warehouse"])
        (world.folder / "index").write_text("another-4711")
        world.settle()
        world.assert_equal()
        for sink in ("search", "cache", "warehouse"):
            world.rebuild(sink)
        world.assert_equal()
        world.sql("UPDATE items SET n = 0 WHERE id < 100")
        world.settle()
        world.rollback("search")
    verified = run_with_spark(world.words("verify"))
    assert verified.returncode == 0, verified.stdout
    audited = run_with_spark(world.words("topics", "audit"))
    assert audited.returncode == 0, audited.stdout
    printed = [world.cdc(*words).stdout for words in (("status",), ("plan",), ("views", "list"))]
    log = (world.folder / "run.log").read_text()
    stored = [record.value or b"" for record in read_records(broker.plain, "cdc-connect-configs")]
    assert any(world.name.encode() in value for value in stored)
    for secret in SECRETS.values():
        assert not [text for text in (*printed, log, verified.stdout) if secret in text]
        assert not [value for value in stored if secret.encode() in value]
    prepare(Context(world.file, world.folder)).run(lambda _: None, watch_s=0.0)
    with index.client() as client:
        # What is counted is what a search would see.
        client.post("/_refresh").raise_for_status()
        left = client.get("/_cat/indices?h=index,docs.count").raise_for_status().text.split()
    assert left in (["cdc-position", "0"], [])
