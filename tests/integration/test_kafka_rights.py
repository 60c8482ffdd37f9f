"""What a broker's ACLs don't allow is named, with the command that allows it, and isn't waited for."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cdc.errors import KafkaForbidden
from cdc.kafka import log_reader
from cdc.kafka.log_ends import LogEnds
from cdc.kafka.log_reader import OffsetRange, read_records
from cdc.kafka.topics import Topics
from cdc.kafka.transactions import writing_records
from cdc.sink.remedy import Remedy, remedy
from tests.support.broker import AclBroker, acl_broker

PATIENCE_S = 1.0


@pytest.fixture(scope="module")
def broker() -> Iterator[AclBroker]:
    with acl_broker() as running:
        yield running


def read_range(topics: Topics, topic: str) -> list[Any]:
    return list(read_records(topics.bootstrap, [OffsetRange(topic, 0, 0, 1)]))


def write_transaction(topics: Topics, topic: str) -> None:
    with writing_records(topics.bootstrap, f"{topic}-writer", topic, [(b"k", b"v")], 10):
        pass


REFUSED: dict[str, tuple[str, Callable[[Topics, str], object]]] = {
    "ends": ("Describe", lambda topics, topic: topics.ends([topic])),
    "ends in the loop": ("Describe", lambda topics, topic: LogEnds(topics.bootstrap).read({topic: 1})),
    "a hidden topic": ("Describe", read_range),
    "a range": ("Read", read_range),
    "records": ("Read", lambda topics, topic: topics.read_all(topic)),
    "the next record": ("Read", lambda topics, topic: topics.next_records([(topic, 0, 0)])),
    "a record to write": ("Write", lambda topics, topic: topics.write(topic, [(b"k", b"v")])),
    "a transaction": ("Write", write_transaction),
    "settings": ("DescribeConfigs", lambda topics, topic: topics.settings([topic])),
    "a setting to change": (
        "AlterConfigs",
        lambda topics, topic: topics.override({topic: {"cleanup.policy": "compact"}}),
    ),
    "creation": ("Create", lambda topics, topic: topics.request_topics({topic: {}})),
    "removal": ("Delete", lambda topics, topic: topics.remove([topic])),
}  # fmt: skip


@pytest.mark.parametrize("request_name", REFUSED)
def test_what_acls_forbid_on_a_topic_is_named(
    broker: AclBroker, request_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if request_name == "a hidden topic":
        # The broker never answers for it.
        monkeypatch.setattr(log_reader, "PATIENCE_S", PATIENCE_S)
    operation, send = REFUSED[request_name]
    topic = request_name.replace(" ", "-")
    with Topics(broker.address) as topics:
        topics.create_topics({topic: {}})
        topics.write(topic, [(b"k", b"v")])
        broker.forbid("TOPIC", topic, operation)
        with pytest.raises(KafkaForbidden) as caught:
            send(topics, topic)
    error = caught.value
    named = "Read" if request_name == "a hidden topic" else operation
    assert error.message == f"Kafka's ACLs don't allow {named} on the topic {topic}."
    assert error.hint.startswith(
        f"kafka-acls.sh --bootstrap-server {broker.address} --add --allow-principal User:ANONYMOUS"
        f" --operation {named} --topic {topic};"
    )
    assert remedy(error) is Remedy.STOP


def test_a_writer_that_acls_forbid_is_named(broker: AclBroker) -> None:
    broker.forbid("TRANSACTIONAL_ID", "forbidden-writer", "Write")
    with Topics(broker.address) as topics, pytest.raises(KafkaForbidden) as caught:
        write_transaction(topics, "forbidden")
    assert "Write on the transactional id forbidden-writer" in caught.value.message
    assert "--operation Write --transactional-id forbidden-writer;" in caught.value.hint


def test_a_topic_that_was_forbidden_is_written_to_once_it_is_allowed(broker: AclBroker) -> None:
    with Topics(broker.address) as topics:
        topics.create_topics({"for-a-time": {}})
        rule = broker.forbid("TOPIC", "for-a-time", "Write")
        with pytest.raises(KafkaForbidden):
            topics.write("for-a-time", [(b"k", b"v")])
        broker.remove(rule)
        topics.write("for-a-time", [(b"k", b"v")])
        assert [record.key for record in topics.read_all("for-a-time")] == [b"k"]
