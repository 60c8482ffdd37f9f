"""Write records in a transaction, as the only writer of a name.

In:  the broker's address, the name, the records. Out: all of them for readers, or none ever.
Invariant: a key's partition is the one that Kafka's clients choose, murmur2 of the key. The client's
own hash, in Python, takes 17 µs for a key of 90 bytes, more than all else that a record costs to
write; for 2,000 keys together it is 2 µs each.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np

from cdc.errors import Fenced
from cdc.kafka.clients import (
    TIMEOUT_MS,
    await_written,
    check_reachable,
    connection_settings,
    kafka,
    open_producer,
    translated_errors,
)

TRANSACTION_MS = 60_000
"""How long a transaction may stay open; the broker aborts it then."""
BATCH_BYTES = 512 * 1024
"""Of records that travel together. With the client's 16 kB, 2,000 documents of 1.3 kB took 1.1 s to
write; with this 0.15 s. A broker takes batches of 1 MB by default.
"""
ONGOING = "Ongoing"
FENCING = (
    kafka.errors.ProducerFencedError,
    kafka.errors.InvalidProducerEpochError,
    kafka.errors.OutOfOrderSequenceNumberError,
)

SEED = 0x9747B28C
FACTOR = np.uint32(0x5BD1E995)
WORD_BYTES = 4
BYTE_BITS = 8
POSITIVE = 0x7FFFFFFF


class Outgoing(NamedTuple):
    """A record to write. Its key determines its partition."""

    topic: str
    key: bytes
    value: bytes | None


class TransactionalWriter:
    """The writer of a name (`transactional.id`). Making another one of the same name fences this
    one.

    One thread uses it. Costs about 60 ms to make, and 30 ms a transaction.

    Raises:
        KafkaUnavailable: the broker can't be reached, or refuses.
    """

    def __init__(self, bootstrap: str, name: str) -> None:
        self._bootstrap = bootstrap
        self._name = name
        with self._errors():
            check_reachable(bootstrap)
            self._producer: Any = open_producer(
                bootstrap,
                transactional_id=name,
                transaction_timeout_ms=TRANSACTION_MS,
                batch_size=BATCH_BYTES,
                compression_type="lz4",
                linger_ms=5,
            )
            try:
                self._producer.init_transactions()
            except BaseException:
                self.close()
                raise

    def write(self, records: Iterable[Outgoing]) -> None:
        """Write the records; all of them are there for readers on return, or none ever.

        Raises:
            Fenced: another writer of the name has been made.
            KafkaUnavailable: it isn't known whether they are there. Close this writer then.
        """
        with self._errors():
            self._producer.begin_transaction()
            futures = [
                (
                    record.topic,
                    self._producer.send(
                        record.topic, key=record.key, value=record.value, partition=partition
                    ),
                )
                for record, partition in self._placed(records)
            ]
            self._producer.flush(TIMEOUT_MS / 1000)
            for topic, future in futures:
                await_written(topic, future, TIMEOUT_MS / 1000)
            self._producer.commit_transaction()

    def _placed(self, records: Iterable[Outgoing]) -> Iterator[tuple[Outgoing, int]]:
        """Return records with their partitions, in the order of each topic."""
        by_topic: dict[str, list[Outgoing]] = {}
        for record in records:
            by_topic.setdefault(record.topic, []).append(record)
        for topic, group in by_topic.items():
            count = len(self._producer.partitions_for(topic))
            yield from zip(
                group, choose_partitions([record.key for record in group], count), strict=True
            )

    def close(self) -> None:
        """Close the connection. An open transaction is aborted by the next writer of the name."""
        # What was fenced has records that it can't send any more, and says so again.
        with suppress(kafka.errors.KafkaError):
            self._producer.close(timeout=0)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        with translated_errors(self._bootstrap, "Write", self._name):
            try:
                yield
            except kafka.errors.KafkaError as error:
                # What is sent after a refusal fails with a general error that carries the refusal.
                if not any(isinstance(cause, FENCING) for cause in (error, *error.args)):
                    raise
                raise Fenced(
                    f"Another run writes as {self._name} now.",
                    hint="run one `cdc run` per pipeline; start this one again when the other has ended",
                ) from error


@contextmanager
def writing_records(
    bootstrap: str,
    name: str,
    topic: str,
    records: Iterable[tuple[bytes, bytes | None]],
    timeout_s: float,
) -> Iterator[None]:
    """Write records that are committed when the block ends. If the block or the process fails,
    they never are.

    They take their offsets at once: records written within the block come after them. Readers
    wait at these offsets, for `timeout_s` at most if the process is killed. The next call with
    the same name aborts an open transaction and fences its writer.

    Raises:
        KafkaUnavailable: the broker can't be reached, or refuses.
    """
    with translated_errors(bootstrap, "Write", name):
        producer = open_producer(
            bootstrap,
            transactional_id=name,
            transaction_timeout_ms=int(timeout_s * 1000) + TIMEOUT_MS,
        )
    try:
        with translated_errors(bootstrap, "Write", name):
            producer.init_transactions()
            producer.begin_transaction()
            for future in [producer.send(topic, key=key, value=value) for key, value in records]:
                await_written(topic, future, TIMEOUT_MS / 1000)
        try:
            yield
        except BaseException:
            with suppress(kafka.errors.KafkaError):
                producer.abort_transaction()
            raise
        with translated_errors(bootstrap, "Write", name):
            producer.commit_transaction()
    finally:
        producer.close()


class OpenTransaction(NamedTuple):
    """An ongoing transaction: the transactional id of its writer, and when it began."""

    name: str
    began_ms: int


def find_open(bootstrap: str, ending: str, topics: str) -> list[OpenTransaction]:
    """Find the ongoing transactions whose transactional id ends with `ending`, and that have written
    to a topic whose name begins with `topics`.

    Raises:
        KafkaUnavailable: the broker can't be reached, or refuses.
    """
    with (
        translated_errors(bootstrap),
        kafka.KafkaAdminClient(**connection_settings(bootstrap)) as admin,
    ):
        listed = [entry for entries in admin.list_transactions().values() for entry in entries]
        names = [
            entry.transactional_id
            for entry in listed
            if entry.state.value == ONGOING and entry.transactional_id.endswith(ending)
        ]
        described = admin.describe_transactions(names) if names else {}
    return [
        OpenTransaction(name, transaction.transaction_start_time_ms)
        for name, transaction in described.items()
        if transaction.state.value == ONGOING
        and any(place.topic.startswith(topics) for place in transaction.topic_partitions)
    ]


def end_transaction(bootstrap: str, name: str) -> None:
    """Abort the open transaction of a writer, by its transactional id. Fences the writer.

    Raises:
        KafkaUnavailable: the broker can't be reached, or refuses.
    """
    # Whoever fences this one has ended the transaction: the connector's task, which has started again.
    with suppress(Fenced):
        TransactionalWriter(bootstrap, name).close()


def choose_partitions(keys: Sequence[bytes], count: int) -> list[int]:
    """Return the partition of each key in a topic of so many partitions."""
    if count == 1:
        return [0] * len(keys)
    partitions = [0] * len(keys)
    places_by_length: dict[int, list[int]] = {}
    for place, key in enumerate(keys):
        places_by_length.setdefault(len(key), []).append(place)
    for length, places in places_by_length.items():
        hashes = _hash([keys[place] for place in places], length) & POSITIVE
        for place, partition in zip(places, (hashes % count).tolist(), strict=True):
            partitions[place] = partition
    return partitions


def _hash(keys: Sequence[bytes], length: int) -> Any:
    """Hash keys of one length: `Utils.murmur2` of Kafka's own client, all keys a step."""
    octets = np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), length)
    whole = length // WORD_BYTES * WORD_BYTES
    words = np.ascontiguousarray(octets[:, :whole]).view("<u4")
    hashes = np.full(len(keys), SEED ^ length, np.uint32)
    for word in words.T:
        mixed = word * FACTOR
        mixed ^= mixed >> np.uint32(24)
        hashes = (hashes * FACTOR) ^ (mixed * FACTOR)
    if whole < length:
        for place in range(length - whole):
            octet = octets[:, whole + place].astype(np.uint32)
            hashes ^= octet << np.uint32(place * BYTE_BITS)
        hashes *= FACTOR
    hashes ^= hashes >> np.uint32(13)
    hashes *= FACTOR
    return hashes ^ (hashes >> np.uint32(15))
