"""Have the broker compact a topic now, as it does by itself sooner or later."""

import time
from collections import Counter
from collections.abc import Iterator

from kafka import KafkaConsumer, KafkaProducer, TopicPartition

from cdc.kafka.topics import Topics
from tests.support.wait import wait_until

LOWERED = {
    "segment.ms": "1000",
    "segment.jitter.ms": "0",
    "min.cleanable.dirty.ratio": "0.0",
    "min.compaction.lag.ms": "0",
}


def compact(kafka: Topics, topic: str, *, tombstones: bool = False) -> None:
    """Lower a topic's settings until each key that it has now is there once, without tombstones if
    these are to go, too; then restore them.
    """
    original = kafka.overrides([topic])[topic]
    lowered = {**LOWERED, **({"delete.retention.ms": "1000"} if tombstones else {})}
    ends = kafka.ends([topic])[topic].offsets

    def is_compacted() -> bool:
        _begin_segments(kafka.bootstrap, topic, len(ends))
        keys = Counter[bytes]()
        for key, is_tombstone in _records(kafka.bootstrap, topic, ends):
            keys[key] += 2 if is_tombstone and tombstones else 1
        return max(keys.values(), default=1) == 1

    kafka.override({topic: lowered})
    try:
        wait_until(is_compacted, 90, f"{topic} to be compacted", 1.5)
    finally:
        kafka.override({topic: {name: original.get(name) for name in lowered}})


def _begin_segments(bootstrap: str, topic: str, partitions: int) -> None:
    """Append to each partition, since only that begins another segment, in a transaction that is
    aborted, so that no reader sees it.
    """
    producer = KafkaProducer(
        bootstrap_servers=bootstrap, transactional_id=f"compaction-{topic}-{time.time_ns()}"
    )
    try:
        producer.init_transactions()
        producer.begin_transaction()
        for partition in range(partitions):
            producer.send(topic, key=b"null", partition=partition).get(30)
        producer.abort_transaction()
    finally:
        producer.close()


def _records(bootstrap: str, topic: str, ends: tuple[int, ...]) -> Iterator[tuple[bytes, bool]]:
    """The committed records below these offsets: their keys, and whether they are tombstones."""
    consumer = KafkaConsumer(bootstrap_servers=bootstrap, isolation_level="read_committed")
    try:
        partitions = [TopicPartition(topic, number) for number in range(len(ends))]
        consumer.assign(partitions)
        consumer.seek_to_beginning(*partitions)
        # To the ends: a broker that takes its time is no topic without records.
        while any(consumer.position(place) < ends[place.partition] for place in partitions):
            for place, records in consumer.poll(timeout_ms=500).items():
                for record in records:
                    if record.offset < ends[place.partition]:
                        yield b"%d " % place.partition + record.key, record.value is None
    finally:
        consumer.close()
