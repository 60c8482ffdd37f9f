"""The only writer of a name: another one of the same name fences it, however much it is sending."""

import os
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import TYPE_CHECKING

import pytest

from cdc.errors import Fenced, RecordRefused
from cdc.kafka.clients import LARGEST_BYTES, OVERHEAD_BYTES, is_sendable, kafka
from cdc.kafka.topics import Topics
from cdc.kafka.transactions import Outgoing, TransactionalWriter, writing_records
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from tests.conftest import Stack


@pytest.fixture
def topic(stack: "Stack", unique: str) -> Iterator[str]:
    admin = kafka.KafkaAdminClient(bootstrap_servers=stack.endpoints.kafka)
    settings = {"max.message.bytes": str(LARGEST_BYTES)}
    admin.create_topics(
        {unique: {"num_partitions": 1, "replication_factor": 1, "configs": settings}}
    )
    yield unique
    admin.delete_topics([unique])
    admin.close()


@pytest.mark.parametrize("records", [1, 5000], ids=["a record", "more than a request"])
def test_a_writer_that_was_replaced_is_fenced(stack: "Stack", topic: str, records: int) -> None:
    """It learns so also while it sends: the client then answers with a general error."""
    value = os.urandom(1000)
    outgoing = [Outgoing(topic, b"%d" % number, value) for number in range(records)]
    writer = TransactionalWriter(stack.endpoints.kafka, topic)
    writer.write(outgoing)
    successor = TransactionalWriter(stack.endpoints.kafka, topic)
    with pytest.raises(Fenced):
        writer.write(outgoing)
    successor.write(outgoing)
    writer.close()
    successor.close()


def test_the_largest_record_is_taken(stack: "Stack", topic: str) -> None:
    """Also one that can't be compressed: client and broker add no more than they are said to."""
    writer = TransactionalWriter(stack.endpoints.kafka, topic)
    record = Outgoing(topic, b"{}", os.urandom(LARGEST_BYTES - OVERHEAD_BYTES - 2))
    assert is_sendable(*record[1:])
    assert not is_sendable(b"{.}", record.value)
    writer.write([record])
    writer.close()


def test_a_topic_that_takes_smaller_records_is_named_with_its_setting(
    stack: "Stack", topic: str
) -> None:
    """Whoever writes; what is written again once the setting is as before is taken."""
    key, value = b"{}", os.urandom(2000)

    def reserve() -> None:
        with writing_records(stack.endpoints.kafka, topic, topic, [(key, value)], 10):
            pass

    def transact() -> None:
        with closing(TransactionalWriter(stack.endpoints.kafka, topic)) as writer:
            writer.write([Outgoing(topic, key, value)])

    def write() -> None:
        topics.write(topic, [(key, value)])

    def is_taken(attempt: Callable[[], None]) -> bool:
        with suppress(RecordRefused):
            attempt()
            return True
        return False

    writes: list[Callable[[], None]] = [write, reserve, transact]
    with Topics(stack.endpoints.kafka) as topics:
        topics.override({topic: {"max.message.bytes": "1000"}})
        # A broker goes by a setting a moment after it tells of it.
        wait_until(lambda: not is_taken(write), 10, "the broker to go by the setting")
        for attempt in writes:
            with pytest.raises(RecordRefused, match=f"{topic}.*max.message.bytes") as caught:
                attempt()
            assert caught.value.hint == "cdc -p FILE topics"
        topics.override({topic: {"max.message.bytes": str(LARGEST_BYTES)}})
        wait_until(lambda: is_taken(write), 10, "the broker to go by the setting")
        assert all(map(is_taken, writes))
