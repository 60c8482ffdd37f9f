"""Read ranges of the log with librdkafka, where a task runs: no record passes the JVM or the driver.

In:  ranges of offsets whose ends were last stable offsets once. Out: committed records by partition,
in the order of offsets.
Invariant: all committed records of a range are handed over, or an error is raised.

Transaction markers and compaction leave offsets without a record, so a range has come to its end
with a record at `end - 1` or beyond, or once the client reports that the partition ends at `end` or
beyond. A partition that ends *before* `end` belongs to a topic that was made again since
(tests/integration/test_log_reader.py compares all this with kafka-python's read).
"""

import os
import time
from collections.abc import Generator, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from cdc.errors import ConnectorError, LogUnread, RecordsGone

if TYPE_CHECKING:
    from confluent_kafka import Consumer

PATIENCE_S = 30.0
"""Seconds without any answer after which a read fails. A partition that doesn't exist is never
answered for.
"""
BLOCK = 1000
"""The most messages that are taken from the client at once."""
RELEASE = 5000
"""Offsets of a read from which a partition is released as soon as it is at its end: the client would
fetch ahead of it otherwise. Releasing costs more than it saves where a read is small.
"""
SETTINGS = {
    # The client demands a group, and looks up its coordinator. The group isn't joined, and nothing
    # is committed to it.
    "group.id": "cdc",
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "isolation.level": "read_committed",
    "auto.offset.reset": "error",
    "enable.partition.eof": True,
    "check.crcs": True,
    # A fetch that waits for records has to come back before the next read's can be sent: 12.3 ms
    # with 10 instead of 3.4 ms for forty records.
    "fetch.wait.max.ms": 1,
    # Compressed bytes. Of a small range in a large log all else that was fetched is thrown away.
    "fetch.message.max.bytes": 1 << 20,
    "fetch.max.bytes": 4 << 20,
    "queued.max.messages.kbytes": 8192,
    "queued.min.messages": 10_000,
    "socket.nagle.disable": True,
    # The client's log would go to the executor's standard error.
    "log_level": 0,
}
Record = tuple[bytes | None, bytes | None, int]
"""Key, value, offset."""
_consumers: dict[tuple[str, int], "Consumer"] = {}


class OffsetRange(NamedTuple):
    """Offsets of a partition, from `start` up to but not including `end`."""

    topic: str
    partition: int
    start: int
    end: int

    @property
    def size(self) -> int:
        """How many offsets it has; there may be fewer records."""
        return self.end - self.start


def read_records(
    bootstrap: str, ranges: Sequence[OffsetRange]
) -> Generator[tuple[str, int, list[Record]]]:
    """Read ranges of different partitions: topic, partition, and a block of its records.

    Blocks of different partitions come in any order. One thread of a process reads at a time, and
    reads to the end or closes the iterator.

    Raises:
        RecordsGone: the log no longer has a range's start, or ends before its end. LogUnread: the
            broker doesn't answer. ConnectorError: it refuses.
    """
    ranges = [asked for asked in ranges if asked.size]
    if not ranges:
        return
    from confluent_kafka import TopicPartition

    consumer = _consumer(bootstrap)
    unread = {(asked.topic, asked.partition): asked.end for asked in ranges}
    releases = sum(asked.size for asked in ranges) > RELEASE
    consumer.assign([TopicPartition(asked.topic, asked.partition, asked.start) for asked in ranges])
    try:
        for place, messages in _blocks(consumer, unread):
            records, is_at_end = _records_before(unread[place], messages)
            if records:
                yield *place, records
            if is_at_end:
                del unread[place]
            if is_at_end and releases and unread:
                consumer.incremental_unassign([TopicPartition(*place)])
        # Not `pause`, which would outlast the next `assign`.
        consumer.unassign()
    except LogUnread:
        # What the client knows of the brokers may be the reason.
        del _consumers[bootstrap, os.getpid()]
        consumer.close()
        raise
    except BaseException:
        consumer.unassign()
        raise


def _consumer(bootstrap: str) -> "Consumer":
    """The consumer of this process, kept for its next reads: an idle one has nothing assigned and
    fetches nothing. By process, since the client's threads don't survive a fork.
    """
    place = bootstrap, os.getpid()
    if place not in _consumers:
        from confluent_kafka import Consumer

        _consumers[place] = Consumer({"bootstrap.servers": bootstrap, **SETTINGS})
    return _consumers[place]


def _blocks(
    consumer: "Consumer", unread: dict[tuple[str, int], int]
) -> Iterator[tuple[tuple[str, int], Iterator[Any]]]:
    """Messages of the partitions in `unread`, until the caller has removed all of them from it."""
    deadline = time.monotonic() + PATIENCE_S
    problem = "no answer"
    while unread:
        # Not `consume(BLOCK, timeout)`, which waits for so many messages or all of the time.
        first = consumer.poll(0.1)
        if first is None:
            if time.monotonic() > deadline:
                raise _unread_error(unread, problem)
            continue
        for place, messages in groupby([first, *consumer.consume(BLOCK, 0)], _place):
            if place in unread:
                yield place, messages
                deadline = time.monotonic() + PATIENCE_S
            elif place[0] is None:
                # Of a connection, of which the client makes another one by itself; or of the group,
                # which a reader doesn't need.
                name = next(messages).error().name()
                if "GROUP" not in name:
                    problem = name


def _place(message: Any) -> tuple[str, int]:
    return message.topic(), message.partition()


def _records_before(end: int, messages: Iterator[Any]) -> tuple[list[Record], bool]:
    """The records of a partition's messages before `end`, and whether it has come to that end."""
    records: list[Record] = []
    for message in messages:
        if error := message.error():
            return records, is_end(error, message, end)
        offset = message.offset()
        if offset >= end:
            return records, True
        records.append((message.key(), message.value(), offset))
    return records, records[-1][2] == end - 1


def is_end(error: Any, message: Any, end: int) -> bool:
    """Whether a message's error says that its partition has come to `end`. Raises all others."""
    from confluent_kafka import KafkaError

    topic = message.topic()
    place = f"{topic} partition {message.partition()}"
    if error.code() == KafkaError._PARTITION_EOF:
        if message.offset() >= end:
            return True
        raise gone_error(topic, f"{place} ends at {message.offset()}, before {end}")
    if error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
        raise gone_error(topic, f"{place} doesn't hold the record that comes next")
    if "AUTHORIZATION" in error.name() or error.code() == KafkaError._BAD_MSG:
        raise ConnectorError(
            f"Kafka refuses to read {place}: {error.name()}.",
            hint="look at the broker's log, then: cdc -p FILE topics",
            topic=topic,
        )
    raise _unread_error({(topic, message.partition()): end}, error.name())


def gone_error(topic: str, detail: str) -> RecordsGone:
    """The error of a log that no longer holds what is to be read of it; `detail` has no values."""
    return RecordsGone(
        f"Kafka no longer holds records that a view still needs: {detail}.",
        hint="cdc -p FILE status says which view, and how to rebuild it",
        topic=topic,
    )


def _unread_error(unread: dict[tuple[str, int], int], problem: str) -> LogUnread:
    topic, partition = next(iter(unread))
    return LogUnread(
        f"Kafka doesn't hand over {topic} partition {partition}: {problem}.",
        hint="no action needed; retried automatically; is Kafka up?",
        topic=topic,
    )
