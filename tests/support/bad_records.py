"""Records that no connector writes, for what happens to them."""

from collections.abc import Iterable

import kafka


def produce(
    servers: str,
    topic: str,
    records: Iterable[tuple[bytes | None, bytes | None]],
    partition: int | None = 0,
) -> None:
    """Append records, as (key, value), to a partition of a topic, or each to its key's; they
    are stored on return.

    A compacted topic takes no record without a key, so an empty one stands for it.
    """
    producer = kafka.KafkaProducer(bootstrap_servers=servers, acks="all")
    try:
        for key, value in records:
            producer.send(topic, key=key, value=value, partition=partition).get(60)
    finally:
        producer.close()
