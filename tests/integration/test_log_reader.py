"""Ranges of the log, read by executors, on a real broker: exactly what another client reads, or an error."""

import multiprocessing
import random
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from cdc.errors import KafkaUnavailable, LogUnread, RecordsGone, TopicMissing
from cdc.kafka import log_reader
from cdc.kafka.clients import kafka
from cdc.kafka.log_ends import LogEnds
from cdc.kafka.log_reader import OffsetRange, Record, read_records
from cdc.kafka.topics import Topics
from cdc.quarantine.log import SinkQuarantine, request_redrive, settle_entries
from cdc.quarantine.rejection import ToQuarantine
from cdc.sink.rejection import REFUSED, Rejected, Source
from tests.support.pipelines import pipeline
from tests.support.wait import wait_until

COMPACTED = {
    "cleanup.policy": "compact",
    "segment.ms": "100",
    "segment.bytes": "1048576",
    "min.cleanable.dirty.ratio": "0.01",
    "max.compaction.lag.ms": "100",
    "delete.retention.ms": "100",
}
Log = dict[int, list[Record]]


class Broker:
    """The broker of the stack, and topics of the test."""

    def __init__(self, address: str, prefix: str) -> None:
        self.address = address
        self._prefix = prefix
        self._admin = AdminClient({"bootstrap.servers": address})
        self._topics: list[str] = []

    def topic(self, partitions: int, **settings: str) -> str:
        name = f"{self._prefix}-{len(self._topics)}"
        self._topics.append(name)
        self.create(name, partitions, **settings)
        return name

    def create(self, name: str, partitions: int, **settings: str) -> None:
        made = self._admin.create_topics([NewTopic(name, partitions, 1, config=settings)])
        made[name].result()
        wait_until(lambda: self._is_led(name, partitions), 30, "the topic's leaders")

    def _is_led(self, name: str, partitions: int) -> bool:
        with suppress(TopicMissing, KafkaUnavailable):
            return len(self.ends(name, partitions)) == partitions
        return False

    def remove(self, name: str) -> None:
        self._admin.delete_topics([name])[name].result()

    def remove_all(self) -> None:
        for topic in self._topics:
            with suppress(confluent_kafka.KafkaException):
                self.remove(topic)

    def delete_records(self, topic: str, below: int) -> None:
        place = TopicPartition(topic, 0, below)
        self._admin.delete_records([place])[place].result()

    def ends(self, topic: str, partitions: int) -> dict[int, int]:
        return dict(enumerate(LogEnds(self.address).read({topic: partitions})[topic]))

    def producer(self, **settings: Any) -> Producer:
        return Producer(
            {"bootstrap.servers": self.address, "linger.ms": 0, "log_level": 0, **settings}
        )

    def transactions(self, name: str, **settings: Any) -> Producer:
        producer = self.producer(**{"transactional.id": name, **settings})
        producer.init_transactions()
        return producer

    def written_by(self, topic: str, count: int) -> None:
        """Write records in one transaction: offsets from 0 on, and a marker."""
        producer = self.transactions(topic)
        producer.begin_transaction()
        for number in range(count):
            producer.produce(topic, key=b"k", value=b"%d" % number, partition=0)
        producer.commit_transaction()
        # The broker writes the marker after it has answered.
        wait_until(lambda: self.ends(topic, 1) == {0: count + 1}, 30, "the marker")


@pytest.fixture
def broker(stack: Any, unique: str) -> Iterator[Broker]:
    broker = Broker(stack.endpoints.kafka, unique)
    yield broker
    broker.remove_all()


@pytest.fixture(params=[log_reader.BULK, 0], ids=["small", "bulk"])
def each_client(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read by the client of small reads, and by the client of large ones."""
    monkeypatch.setattr(log_reader, "BULK", request.param)


def read(address: str, ranges: Sequence[OffsetRange]) -> dict[tuple[str, int], list[Record]]:
    records: dict[tuple[str, int], list[Record]] = defaultdict(list)
    for topic, partition, block in read_records(address, ranges):
        records[topic, partition] += block
    return records


def read_by_another_client(address: str, topic: str, ends: dict[int, int]) -> Log:
    consumer = kafka.KafkaConsumer(
        bootstrap_servers=address,
        isolation_level="read_committed",
        enable_auto_commit=False,
        group_id=None,
        auto_offset_reset="earliest",
        fetch_max_wait_ms=20,
    )
    places = {kafka.TopicPartition(topic, partition): end for partition, end in ends.items()}
    consumer.assign(list(places))
    records: Log = {partition: [] for partition in ends}

    def is_read() -> bool:
        for place, block in consumer.poll(100).items():
            records[place.partition] += [(r.key, r.value, r.offset) for r in block]
        return all(consumer.position(place) >= end for place, end in places.items())

    try:
        wait_until(is_read, 30, "the other client to have read all")
    finally:
        consumer.close()
    return {p: [r for r in records[p] if r[2] < end] for p, end in ends.items()}


def write_at_random(chance: random.Random, broker: Broker, topic: str, partitions: int) -> Any:
    """Write transactions: committed, aborted, empty, open amid others. Returns the ends of the
    topic that were seen meanwhile, and the transaction that is still open.
    """
    compression = chance.choice(["none", "lz4"])
    producer = broker.transactions(topic, **{"compression.type": compression})
    other = broker.transactions(f"{topic}-other")
    is_open = False
    ends = [broker.ends(topic, partitions)]
    for _ in range(chance.randint(8, 20)):
        if is_open and chance.random() < 0.4:
            end = other.commit_transaction if chance.random() < 0.5 else other.abort_transaction
            end()
            is_open = False
        elif not is_open and chance.random() < 0.2:
            other.begin_transaction()
            other.produce(topic, key=b"o", value=b"o", partition=chance.randrange(partitions))
            other.flush()
            is_open = True
        producer.begin_transaction()
        for _ in range(chance.choice([0, 1, 3, 40])):
            key = b"k%d" % chance.randrange(5)
            value = chance.choice([None, b"v" * chance.choice([1, 100, 20_000])])
            producer.produce(topic, key=key, value=value, partition=chance.randrange(partitions))
        producer.flush()
        end = producer.commit_transaction if chance.random() < 0.6 else producer.abort_transaction
        end()
        if chance.random() < 0.5:
            ends.append(broker.ends(topic, partitions))
    if is_open and chance.random() < 0.5:
        other.commit_transaction()
        is_open = False
    ends.append(broker.ends(topic, partitions))
    return ends, other if is_open else None


@pytest.mark.parametrize("seed", range(6))
def test_random_ranges_of_random_logs(
    broker: Broker, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if seed >= 3:
        monkeypatch.setattr(log_reader, "BULK", 0)
    chance = random.Random(seed)
    partitions = chance.choice([1, 2, 4])
    topic = broker.topic(partitions, **(COMPACTED if seed % 2 else {}))
    ends, is_open = write_at_random(chance, broker, topic, partitions)
    if seed % 2:
        written = len(read_all(broker, topic, ends[-1]))
        deadline = time.monotonic() + 5
        while len(read_all(broker, topic, ends[-1])) == written and time.monotonic() < deadline:
            time.sleep(0.2)
    expected: Log = {}
    # Once more where the broker has compacted the topic meanwhile.
    while (log := read_by_another_client(broker.address, topic, ends[-1])) != expected:
        expected = log
        wrong = differences(chance, broker, topic, ends, expected)
    assert wrong == []
    if is_open:
        is_open.abort_transaction()


def differences(
    chance: random.Random, broker: Broker, topic: str, ends: list[dict[int, int]], expected: Log
) -> list[OffsetRange]:
    """The random ranges of which other records are read than are expected."""
    wrong = []
    for _ in range(25):
        first, last = sorted(chance.choices(range(len(ends)), k=2))
        ranges = [
            OffsetRange(topic, partition, start + chance.randint(0, min(2, end - start)), end)
            for partition in expected
            for start, end in [(ends[first][partition], ends[last][partition])]
        ]
        records = read(broker.address, ranges)
        wrong += [
            asked
            for asked in ranges
            if records[topic, asked.partition]
            != [
                record
                for record in expected[asked.partition]
                if asked.start <= record[2] < asked.end
            ]
        ]
    return wrong


def read_all(broker: Broker, topic: str, ends: dict[int, int]) -> list[Record]:
    ranges = [OffsetRange(topic, partition, 0, end) for partition, end in ends.items()]
    return [record for block in read(broker.address, ranges).values() for record in block]


@pytest.mark.usefixtures("each_client")
def test_what_the_log_no_longer_has_is_an_error(broker: Broker) -> None:
    topic = broker.topic(1)
    broker.written_by(topic, 10)
    broker.delete_records(topic, 4)
    for start, end in [(0, 11), (5, 50), (40, 50)]:
        with pytest.raises(RecordsGone, match=f"{topic} partition 0"):
            read(broker.address, [OffsetRange(topic, 0, start, end)])
        # The consumer is kept, and reads on.
        assert len(read(broker.address, [OffsetRange(topic, 0, 4, 11)])[topic, 0]) == 6


@pytest.mark.usefixtures("each_client")
def test_no_record_of_a_topic_that_was_created_again_is_returned(broker: Broker) -> None:
    """The new topic has more records than the former one: no offset shows that it is another."""
    topic = broker.topic(1)
    broker.written_by(topic, 3)
    with Topics(broker.address) as topics:
        former = topics.ends([topic])[topic]
    asked = OffsetRange(topic, 0, 0, 3, former.topic_id)
    assert len(read(broker.address, [asked])[topic, 0]) == 3
    broker.remove(topic)
    wait_until(lambda: is_missing(broker, topic), 30, "the end of the topic")
    broker.create(topic, 1)
    broker.written_by(topic, 10)
    with pytest.raises(RecordsGone, match="created again"):
        read(broker.address, [asked])
    assert len(read(broker.address, [asked._replace(topic_id="")])[topic, 0]) == 3


def is_missing(broker: Broker, topic: str) -> bool:
    try:
        broker.ends(topic, 1)
    except TopicMissing:
        return True
    return False


@pytest.mark.usefixtures("each_client")
def test_what_is_not_there_is_not_taken_for_empty(
    broker: Broker, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = broker.topic(1)
    broker.written_by(topic, 3)
    for name, partition in [(f"{unique}-absent", 0), (topic, 7)]:
        ranges = [OffsetRange(name, partition, 0, 3), OffsetRange(topic, 0, 0, 4)]
        with monkeypatch.context() as impatient:
            impatient.setattr(log_reader, "PATIENCE_S", 1.0)
            with pytest.raises(LogUnread, match=f"{name} partition {partition}"):
                read(broker.address, ranges)
    assert len(read(broker.address, [OffsetRange(topic, 0, 0, 4)])[topic, 0]) == 3
    with pytest.raises(TopicMissing, match=f"{unique}-absent"):
        broker.ends(f"{unique}-absent", 1)


def test_a_broker_that_is_away_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_reader, "PATIENCE_S", 1.0)
    with pytest.raises(LogUnread, match="t partition 0"):
        read("127.0.0.1:1", [OffsetRange("t", 0, 0, 3)])


def test_threads_share_an_answer_that_is_new_enough(broker: Broker) -> None:
    """A stream resumes from positions that may be ahead of an older answer: it doesn't get that one."""
    topic = broker.topic(1)
    ends = LogEnds(broker.address)
    before = time.monotonic()
    assert ends.read({topic: 1}, since=before) == {topic: (0,)}
    broker.written_by(topic, 3)
    assert ends.read({topic: 1}, since=before) == {topic: (0,)}
    assert ends.read({topic: 1}) == {topic: (4,)}
    assert ends.read({topic: 1}, since=time.monotonic()) == {topic: (4,)}
    assert ends.read({topic: 1}, since=before, is_committed=False) == {topic: (4,)}


def test_a_broker_that_is_away_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four streams that ask at the same time: the last doesn't wait for four attempts."""
    monkeypatch.setattr("cdc.kafka.log_ends.TIMEOUT_S", 1.0)
    ends = LogEnds("127.0.0.1:1")
    since = time.monotonic()
    failures = []

    def ask(_: int) -> None:
        with pytest.raises(KafkaUnavailable) as raised:
            ends.read({"t": 1}, since=since)
        failures.append(raised.value)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, range(4)))
    assert len(failures) == 4
    assert len({id(failure) for failure in failures}) == 1, "each has asked for itself"


@pytest.mark.parametrize("records", [log_reader.BULK - 200, log_reader.BULK + 200])
def test_a_read_that_is_ended_early_leaves_nothing_for_the_next(
    broker: Broker, records: int
) -> None:
    first = broker.topic(1)
    second = broker.topic(1)
    for topic in (first, second):
        broker.written_by(topic, records)
    blocks = read_records(broker.address, [OffsetRange(first, 0, 0, records + 1)])
    next(blocks)
    blocks.close()
    blocks_read = read(broker.address, [OffsetRange(second, 0, 100, records + 1)])
    assert list(blocks_read) == [(second, 0)]
    assert [record[2] for record in blocks_read[second, 0]] == list(range(100, records))


def test_many_partitions_and_a_large_record(broker: Broker) -> None:
    many = broker.topic(300)
    producer = broker.producer()
    for partition in range(300):
        producer.produce(many, key=b"k", value=b"v", partition=partition)
    producer.flush()
    ranges = [OffsetRange(many, partition, 0, 1) for partition in range(300)]
    for _ in range(2):
        assert sum(map(len, read(broker.address, ranges).values())) == 300
    large = broker.topic(1, **{"max.message.bytes": "20000000"})
    producer = broker.producer(**{"message.max.bytes": 20_000_000})
    value = random.Random(1).randbytes(10_000_000)
    producer.produce(large, key=b"k", value=value, partition=0)
    producer.flush()
    assert read(broker.address, [OffsetRange(large, 0, 0, 1)])[large, 0] == [(b"k", value, 0)]


def _count_in_child(address: str, asked: OffsetRange, answers: Any) -> None:
    answers.put(len(read(address, [asked])[asked.topic, asked.partition]))


def test_a_process_that_was_forked_reads_by_a_consumer_of_its_own(broker: Broker) -> None:
    topic = broker.topic(1)
    broker.written_by(topic, 10)
    asked = OffsetRange(topic, 0, 0, 11)
    assert len(read(broker.address, [asked])[topic, 0]) == 10
    forking = multiprocessing.get_context("fork")
    answers = forking.Queue()
    child = forking.Process(target=_count_in_child, args=(broker.address, asked, answers))
    child.start()
    assert answers.get(timeout=120) == 10
    child.join(120)
    assert child.exitcode == 0
    assert len(read(broker.address, [asked])[topic, 0]) == 10


def test_an_open_transaction_is_beyond_the_end(broker: Broker) -> None:
    topic = broker.topic(1)
    broker.written_by(topic, 3)
    producer = broker.transactions(f"{topic}-open")
    producer.begin_transaction()
    producer.produce(topic, key=b"k", value=b"open", partition=0)
    producer.flush()
    assert broker.ends(topic, 1) == {0: 4}
    producer.commit_transaction()
    wait_until(lambda: broker.ends(topic, 1) == {0: 6}, 10, "the commit to be seen")


def test_records_in_quarantine_are_read_at_their_places_in_the_log(
    broker: Broker, unique: str
) -> None:
    """Records that the log no longer has are read in its order with the others, each once: whatever else
    the quarantine has of them.
    """
    topic = broker.topic(2)
    producer = broker.transactions(topic)
    for is_kept in (True, False, True, False):
        producer.begin_transaction()
        producer.produce(topic, key=b"k", value=b"log", partition=0)
        if is_kept:
            producer.commit_transaction()
        else:
            # Its offset is without a record, as after a compaction.
            producer.flush()
            producer.abort_transaction()
    wait_until(lambda: broker.ends(topic, 2) == {0: 8, 1: 0}, 30, "the last marker")
    kept = [
        offset for _, _, offset in read(broker.address, [OffsetRange(topic, 0, 0, 8)])[topic, 0]
    ]
    assert kept == [0, 4]
    shop = pipeline(unique, "postgresql://127.0.0.1:1/none", "public.orders", kafka=broker.address)
    broker.create(shop.quarantine_topic, 1)
    places = [(0, 0), (0, 2), (0, 6), (1, 3), (0, 3), (0, 1)]
    to_quarantine = ToQuarantine(broker.address, shop.quarantine_topic, "cache")
    rejections = [
        (
            Rejected(topic, partition, offset, "k", REFUSED, "too long"),
            Source(offset, b"k", b"kept"),
        )
        for partition, offset in places
    ]
    to_quarantine.put(rejections)
    with Topics(broker.address) as topics:
        quarantine = SinkQuarantine("cache", shop, topics)
        quarantine.refresh()
        entries = {(entry.partition, entry.offset): entry for entry in quarantine.open}
        assert entries.keys() == set(places)
        request_redrive(topics, shop, [entries[0, 2]])
        # A redrive in vain. A request isn't the record, on whichever side of it.
        to_quarantine.put([rejections[1]])
        settle_entries(topics, shop, [entries[0, 3]])
        of_another = Source(2, b"k", b"of another sink")
        ToQuarantine(broker.address, shop.quarantine_topic, "index").put(
            [(Rejected(topic, 0, 2, "k", REFUSED, "too long"), of_another)]
        )
        read_all = quarantine.with_log([entry for place, entry in entries.items() if place[1] != 1])
        assert quarantine.read_key(entries[0, 2]) == b"k"
    ranges = [OffsetRange(topic, 0, 0, 8), OffsetRange(topic, 1, 0, 0)]
    blocks: dict[tuple[str, int], list[tuple[int, bytes | None]]] = defaultdict(list)
    for name, partition, records in read_all(broker.address, ranges):
        blocks[name, partition] += [(offset, value) for _, value, offset in records]
    assert dict(blocks) == {
        (topic, 0): [(0, b"log"), (2, b"kept"), (4, b"log"), (6, b"kept")],
        (topic, 1): [(3, b"kept")],
    }
    # A task gets the records of its partitions alone.
    (block,) = read_all(broker.address, ranges[1:])
    assert block == (topic, 1, [(b"k", b"kept", 3)])
    broker.remove(shop.quarantine_topic)


def test_planted_a_reader_that_takes_any_end_for_its_own(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = broker.topic(1)
    broker.written_by(topic, 3)
    monkeypatch.setattr(log_reader, "is_end", lambda *_: True)
    assert len(read(broker.address, [OffsetRange(topic, 0, 0, 50)])[topic, 0]) == 3


def test_planted_a_reader_of_what_is_not_committed(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = broker.topic(1)
    producer = broker.transactions(topic)
    producer.begin_transaction()
    producer.produce(topic, key=b"k", value=b"aborted", partition=0)
    producer.flush()
    producer.abort_transaction()
    wait_until(lambda: broker.ends(topic, 1) == {0: 2}, 10, "the marker")
    asked = [OffsetRange(topic, 0, 0, 2)]
    assert read(broker.address, asked) == {}
    settings = {**log_reader.SETTINGS, "isolation.level": "read_uncommitted"}
    monkeypatch.setattr(log_reader, "SETTINGS", settings)
    # Another name of the broker, of which no consumer is kept.
    address = f"{broker.address},{broker.address}"
    assert len(read(address, asked)[topic, 0]) == 1
