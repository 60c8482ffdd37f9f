"""A pipeline whose servers ask who it is: Kafka by SASL and TLS, with rights by the pipeline's name, and
Connect by TLS and a client's certificate. Passwords are in files.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import yaml

from tests.support.secured import (
    PASSWORD,
    SecuredBroker,
    SecuredConnect,
    secured_broker,
    secured_connect,
)
from tests.support.shop import read_records

if TYPE_CHECKING:
    from tests.scenarios.conftest import World

REPLICATION_PASSWORD = "the connector's password"


@pytest.fixture
def broker() -> Iterator[SecuredBroker]:
    with secured_broker() as running:
        yield running


@pytest.fixture
def connect(broker: SecuredBroker) -> Iterator[SecuredConnect]:
    with secured_connect(broker) as worker:
        yield worker


def test_a_secured_pipeline_from_snapshot_to_rebuild(
    world: "World", broker: SecuredBroker, connect: SecuredConnect
) -> None:
    broker.set_password("shop", PASSWORD)
    for user in ("shop", "connect"):
        broker.allow(user, "TOPIC", world.name)
        broker.allow(user, "TRANSACTIONAL_ID", world.name)
    broker.allow("connect", "TRANSACTIONAL_ID", f"cdc-connect-{world.name}")
    (world.folder / "kafka").write_text(f"{PASSWORD}\n")
    (world.folder / "replication").write_text(REPLICATION_PASSWORD)
    world.sql("CREATE TABLE items (id int PRIMARY KEY, v text)")
    world.sql("INSERT INTO items SELECT n, md5(n::text) FROM generate_series(1, 500) n")
    world.write_file("public.items")
    tree = yaml.safe_load(world.file.read_text())
    tree["source"]["replication_password"] = f"${{file:{world.folder}/replication}}"
    tree["kafka"] = {
        "brokers": [broker.login],
        "protocol": "SASL_SSL",
        "ca": str(broker.authority.ca),
        "mechanism": "SCRAM-SHA-512",
        "user": "shop",
        "password": f"${{file:{world.folder}/kafka}}",
    }
    tree["connect"] = {
        "url": connect.url,
        "ca": str(broker.authority.ca),
        "certificate": str(broker.certificate),
        "key": str(broker.key),
    }
    world.file.write_text(yaml.safe_dump(tree))
    world.cdc("migrate")
    world.cdc("register")
    with world.running():
        world.sql(
            "UPDATE items SET v = v || 'x' WHERE id % 2 = 0", "DELETE FROM items WHERE id < 20"
        )
        world.settle()
    world.verified()
    world.rebuild("search")
    world.rebuild("warehouse")
    world.verified()
    world.cdc("topics", "audit")
    for words in (("status",), ("plan",), ("doctor",)):
        answer = world.cdc(*words, code=None if words[0] == "status" else 0)
        for secret in (PASSWORD, REPLICATION_PASSWORD):
            assert secret not in answer.stdout + answer.stderr
    for secret in (PASSWORD, REPLICATION_PASSWORD):
        stored = [
            record.value or b"" for record in read_records(broker.plain, "cdc-connect-configs")
        ]
        assert any(world.name.encode() in value for value in stored)
        assert not any(secret.encode() in value for value in stored)
    world.cdc("destroy", "--yes")
