"""Read ranges of the log with librdkafka, in the task itself. No record passes through the JVM or
the driver.

In:  ranges of offsets. Each end was once the last stable offset of its partition, or is before it.
Out: committed records by partition, in the order of offsets.
Invariant: all committed records of a range are returned, and none of another topic of the same
name, or an error is raised.

Transaction markers and compaction leave offsets without a record. So a range is complete once a
record at `end - 1` or later arrives, or once the client reports that the partition ends at `end` or
later. If the partition ends *before* `end`, the topic was recreated or cut.
tests/integration/test_log_reader.py compares this with what kafka-python reads.
"""

import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from cdc.errors import ConnectorError, LogUnread, RecordsGone
from cdc.kafka.log_refusals import forbidden, is_hidden
from cdc.kafka.login import for_librdkafka, make_client

if TYPE_CHECKING:
    from confluent_kafka import Consumer
    from confluent_kafka.admin import AdminClient

PATIENCE_S = 30.0
"""Seconds without any answer after which a read fails. The client never answers for a partition
that doesn't exist.
"""
BLOCK = 1000
"""The most messages to take from the client at once."""
HOLD_S = 0.02
"""Seconds of reading after which the topics' ids are asked for, and what was read is handed over. That
takes 0.6 ms of CPU for one topic, 1.5 ms for ten.
"""
BULK = 5000
"""A read of more offsets than this uses the client with `BULK_SETTINGS`. Each partition is released
once its range is complete, so that the client doesn't fetch beyond it. In a small read, releasing
costs more than it saves.
"""
SETTINGS = {
    # The client requires a group, and looks up its coordinator. It doesn't join the group, and
    # commits nothing.
    "group.id": "cdc",
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "isolation.level": "read_committed",
    "auto.offset.reset": "error",
    "enable.partition.eof": True,
    "check.crcs": True,
    # The next read can't begin to fetch before a waiting fetch has returned. Forty records take
    # 12.3 ms with 10, and 3.4 ms with 1.
    "fetch.wait.max.ms": 1,
    # Compressed bytes. What is fetched beyond a small range is discarded.
    "fetch.message.max.bytes": 1 << 20,
    "fetch.max.bytes": 4 << 20,
    "queued.max.messages.kbytes": 8192,
    "queued.min.messages": 10_000,
    # A client whose queue was full fetches nothing for so long. With the default, a second, tasks that
    # empty the queue in a fifth of it waited for a third of their time.
    "fetch.queue.backoff.ms": 5,
    "socket.nagle.disable": True,
    # The client would log to the executor's standard error.
    "log_level": 0,
}
# While a task works on what it has, the client asks for more of a partition that has no more. A
# request a millisecond cost the broker as much as all records.
BULK_SETTINGS = {**SETTINGS, "fetch.wait.max.ms": 20}
ADMIN_SETTINGS = {"socket.nagle.disable": True, "log_level": 0}
FOR_URLS = str.maketrans("+/", "-_")
Record = tuple[bytes | None, bytes | None, int]
"""Key, value, offset."""
Block = tuple[str, int, list[Record]]
"""Topic, partition, and some of its records in the order of offsets."""


class OffsetRange(NamedTuple):
    """Offsets of a partition, from `start` up to but not including `end`.

    topic_id: the topic that the offsets are of; empty: of whichever topic has that name.
    """

    topic: str
    partition: int
    start: int
    end: int
    topic_id: str = ""

    @property
    def size(self) -> int:
        """Number of offsets; there may be fewer records."""
        return self.end - self.start


ReadRanges = Callable[[str, Sequence[OffsetRange]], Generator[Block]]
"""Reads ranges as `read_records` does."""


def read_records(bootstrap: str, ranges: Sequence[OffsetRange]) -> Generator[Block]:
    """Read ranges of different partitions. Yields topic, partition and a block of its records.

    Blocks are held back until it is clear that they are of the right topic. Where it is the right
    one after they were read, it was so before.

    Blocks of different partitions are in any order. Only one thread of a process may read at a
    time. It has to read to the end, or close the iterator.

    Raises:
        RecordsGone: the log no longer has a range's start, or ends before the range does, or the
            topic was created again.
        KafkaForbidden: the ACLs don't allow it. LogUnread: the broker doesn't answer.
        ConnectorError: it refuses.
    """
    ranges = [asked for asked in ranges if asked.size]
    if not ranges:
        return
    from confluent_kafka import TopicPartition

    is_bulk = sum(asked.size for asked in ranges) > BULK
    topic_ids = {asked.topic: asked.topic_id for asked in ranges if asked.topic_id}
    clients = _clients_of(bootstrap, is_bulk, topic_ids)
    consumer = clients.consumer
    held: list[Block] = []
    held_at = time.monotonic()
    unread = {(asked.topic, asked.partition): asked.end for asked in ranges}
    consumer.assign([TopicPartition(asked.topic, asked.partition, asked.start) for asked in ranges])
    try:
        for place, messages in _blocks(consumer, unread):
            records, is_at_end = _records_before(bootstrap, unread[place], messages)
            if records:
                held.append((*place, records))
            if is_at_end:
                del unread[place]
            if is_at_end and is_bulk and unread:
                consumer.incremental_unassign([TopicPartition(*place)])
            if unread and time.monotonic() - held_at > HOLD_S:
                _require_topics(clients.admin, topic_ids)
                yield from held
                held.clear()
                held_at = time.monotonic()
        # Not `pause`, which would outlast the next `assign`.
        consumer.unassign()
        _require_topics(clients.admin, topic_ids)
        yield from held
    except LogUnread as error:
        # The clients' metadata of the brokers may be out of date: the next read gets new ones.
        topic = error.details["topic"]
        hides = is_hidden(consumer, topic)
        for kind in (False, True):
            if kept := _clients.pop((bootstrap, os.getpid(), kind), None):
                kept.consumer.close()
        if hides:
            raise forbidden(bootstrap, "Read", topic) from None
        raise
    except BaseException:
        consumer.unassign()
        raise


class _Clients(NamedTuple):
    """What reads of a process are made with. While idle the consumer has no partitions and fetches
    nothing.

    topic_ids: of the topics that were read, by name.
    """

    login: Mapping[str, Any]
    consumer: "Consumer"
    admin: "AdminClient"
    topic_ids: dict[str, str]


_clients: dict[tuple[str, int, bool], _Clients] = {}
"""Kept for later reads, by broker, process and whether reads are large. A fork has none of their threads,
so it must neither use nor close them.
"""


def _clients_of(bootstrap: str, is_bulk: bool, topic_ids: Mapping[str, str]) -> _Clients:
    from confluent_kafka import Consumer
    from confluent_kafka.admin import AdminClient

    key = bootstrap, os.getpid(), is_bulk
    login = for_librdkafka(bootstrap)
    kept = _clients.get(key)
    # What is in files may have changed: the clients go by what it was when they were made. A consumer
    # that has read the former topic of a name expects leader epochs at least as high. If those were higher,
    # as after a restart of the broker, it gets no records.
    if kept and (kept.login != login or _is_any_other(kept.topic_ids, topic_ids)):
        del _clients[key]
        kept.consumer.close()
        kept = None
    if kept is None:
        settings = BULK_SETTINGS if is_bulk else SETTINGS
        consumer = make_client(Consumer, bootstrap, settings)
        admin = make_client(AdminClient, bootstrap, ADMIN_SETTINGS)
        kept = _clients[key] = _Clients(login, consumer, admin, {})
    kept.topic_ids.update(topic_ids)
    return kept


def _is_any_other(known: Mapping[str, str], topic_ids: Mapping[str, str]) -> bool:
    return any(known.get(topic, current) != current for topic, current in topic_ids.items())


def _require_topics(admin: "AdminClient", topic_ids: Mapping[str, str]) -> None:
    """Require that these topics still have these ids.

    Raises:
        RecordsGone: a topic was deleted, or created again. LogUnread: the broker doesn't answer.
    """
    if not topic_ids:
        return
    from confluent_kafka import KafkaError, KafkaException, TopicCollection

    answers = admin.describe_topics(TopicCollection(list(topic_ids)), request_timeout=PATIENCE_S)
    for topic, answer in answers.items():
        try:
            # This client prints ids in the usual base64, Kafka's own tools in the one for URLs.
            current = str(answer.result().topic_id).translate(FOR_URLS)
        except KafkaException as refusal:
            error = refusal.args[0]
            if error.code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise _unread_error({(topic, 0): 0}, error.name()) from None
            current = ""
        if current != topic_ids[topic]:
            raise gone_error(topic, f"{topic} was {'created again' if current else 'deleted'}")


def _blocks(
    consumer: "Consumer", unread: dict[tuple[str, int], int]
) -> Iterator[tuple[tuple[str, int], Iterator[Any]]]:
    """Yield messages of the partitions in `unread` until the caller has removed all partitions from
    it.
    """
    deadline = time.monotonic() + PATIENCE_S
    problem = "no answer"
    while unread:
        # Not `consume(BLOCK, timeout)`, which waits until it has BLOCK messages or the time is
        # over.
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
                # An error of a connection, which the client reopens by itself, or of the group,
                # which isn't used.
                name = next(messages).error().name()
                if "GROUP" not in name:
                    problem = name


def _place(message: Any) -> tuple[str, int]:
    return message.topic(), message.partition()


def _records_before(bootstrap: str, end: int, messages: Iterator[Any]) -> tuple[list[Record], bool]:
    """Return a partition's records before `end`, and whether the range is complete."""
    records: list[Record] = []
    for message in messages:
        if error := message.error():
            return records, is_end(bootstrap, error, message, end)
        offset = message.offset()
        if offset >= end:
            return records, True
        records.append((message.key(), message.value(), offset))
    return records, records[-1][2] == end - 1


def is_end(bootstrap: str, error: Any, message: Any, end: int) -> bool:
    """Whether an error means that the partition was read to `end`. Raises any other error."""
    from confluent_kafka import KafkaError

    topic = message.topic()
    place = f"{topic} partition {message.partition()}"
    if error.code() == KafkaError._PARTITION_EOF:
        if message.offset() >= end:
            return True
        raise gone_error(topic, f"{place} ends at {message.offset()}, before {end}")
    if error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
        raise gone_error(topic, f"{place} doesn't hold the record that comes next")
    if error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
        raise forbidden(bootstrap, "Read", topic)
    if "AUTHORIZATION" in error.name() or error.code() == KafkaError._BAD_MSG:
        raise ConnectorError(
            f"Kafka refuses to read {place}: {error.name()}.",
            hint="look at the broker's log, then: cdc -p FILE topics",
            topic=topic,
        )
    raise _unread_error({(topic, message.partition()): end}, error.name())


def gone_error(topic: str, detail: str) -> RecordsGone:
    """The error if the log no longer has the records to read. `detail` must not contain values."""
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
