"""The only writer of a name: another one of the same name fences it, however much it is sending."""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from cdc.errors import Fenced
from cdc.kafka.records import LARGEST_BYTES, OVERHEAD_BYTES, is_sendable, kafka
from cdc.kafka.transactions import Outgoing, TransactionalWriter

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
    """It is told so also while it sends: the client then answers with a general error."""
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
