"""Read single records and their times; write the pipeline's own records.

In:  the broker's address; positions from `cdc.kafka.topics`. Out: `Record`s and times, as
read_committed sees them.
Invariant: no consumer group, nothing is committed. A read times out when no record arrives, however
many there are.
"""

import contextlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from cdc.errors import RecordRefused
from cdc.kafka.clients import (
    PAUSE_MS,
    TIMEOUT_MS,
    await_written,
    check_reachable,
    connection_settings,
    kafka,
    open_producer,
    quick_client,
    translated_errors,
)
from cdc.model.position import Position

TIMES_S = 2.0
NEXT_S = 30.0
RecordAddress = tuple[str, int, int]
"""Topic, partition, offset."""


Isolation = Literal["read_committed", "read_uncommitted"]
"""Whether records of open and of aborted transactions are read, in Kafka's words."""


@dataclass(frozen=True)
class Record:
    """One record; `timestamp_ms` is when the connector handed it to Kafka."""

    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None

    @property
    def change(self) -> dict[str, Any]:
        """The connector's envelope: `op`, `after`, `source` and others. Empty for a tombstone."""
        envelope: dict[str, Any] = json.loads(self.value or b"{}")
        return envelope


class Records:
    """Reads and writes single records. Connects at the first call; every method raises
    ConnectorError.

    `patience_s`: how long a read waits for the next record, and `write` for the broker.
    """

    def __init__(
        self,
        bootstrap: str,
        isolation: Isolation = "read_committed",
        patience_s: float = TIMEOUT_MS / 1000,
    ) -> None:
        self._bootstrap = bootstrap
        self._isolation = isolation
        self._patience_s = patience_s
        self._consumer: Any = None
        self._producer: Any = None

    def close(self) -> None:
        if self._consumer is not None:
            self._consumer.close(autocommit=False)
        if self._producer is not None:
            self._producer.close()

    def write(self, topic: str, records: Iterable[tuple[bytes, bytes | None]]) -> None:
        """Write keys and values to a topic; durable on return."""
        with translated_errors(self._bootstrap, "Write"):
            if self._producer is None:
                check_reachable(self._bootstrap)
                self._producer = open_producer(
                    self._bootstrap,
                    int(self._patience_s * 1000),
                    acks="all",
                    compression_type="lz4",
                )
            futures = [self._producer.send(topic, key=key, value=value) for key, value in records]
            try:
                for future in futures:
                    await_written(topic, future, self._patience_s)
            except (RecordRefused, kafka.errors.AuthorizationError):
                # The library's producer answers with this refusal from then on, whatever is sent.
                with contextlib.suppress(kafka.errors.KafkaError):
                    self._producer.close(timeout=0)
                self._producer = None
                raise

    def first_records(
        self, places: Iterable[RecordAddress], ends: Mapping[str, Position], *, patient: bool
    ) -> dict[RecordAddress, tuple[int, int] | None]:
        """The first record at or after each place: its offset, and when it was written in Unix
        milliseconds. None where no record is left.

        patient: every place is answered within 30 s, or an error is raised. Otherwise those that
        aren't answered within 2 s are None, too.
        """
        answers: dict[RecordAddress, tuple[int, int] | None] = dict.fromkeys(places)
        deadline = time.monotonic() + (NEXT_S if patient else TIMES_S)
        with translated_errors(self._bootstrap, "Read"):
            for batch in _rounds(answers, ends):
                found = self._first(batch, ends, deadline)
                if patient and len(found) < len(batch):
                    raise kafka.errors.KafkaTimeoutError
                answers |= found
        return answers

    def _reader(self, places: Mapping[Any, int]) -> Any:
        if self._consumer is None:
            check_reachable(self._bootstrap)
            self._consumer = kafka.KafkaConsumer(
                **connection_settings(self._bootstrap),
                kafka_client=quick_client,
                bootstrap_timeout_ms=TIMEOUT_MS,
                request_timeout_ms=TIMEOUT_MS,
                isolation_level=self._isolation,
                enable_auto_commit=False,
                group_id=None,
                fetch_max_wait_ms=50,
                retry_backoff_ms=PAUSE_MS,
                auto_offset_reset="earliest",
            )
        self._consumer.assign(list(places))
        for place, offset in places.items():
            self._consumer.seek(place, offset)
        return self._consumer

    def read(self, topic: str, start: int, end: int, partition: int = 0) -> Iterator[Record]:
        """The records of a partition in [start, end)."""
        place = kafka.TopicPartition(topic, partition)
        with translated_errors(self._bootstrap, "Read"):
            consumer = self._reader({place: start})
            reached = start
            deadline = time.monotonic() + self._patience_s
            while reached < end:
                if time.monotonic() > deadline:
                    raise kafka.errors.KafkaTimeoutError
                for record in consumer.poll(timeout_ms=100).get(place, []):
                    if record.offset < end:
                        yield Record(record.offset, record.timestamp, record.key, record.value)
                if (offset := consumer.position(place)) > reached:
                    reached = offset
                    deadline = time.monotonic() + self._patience_s

    def _first(
        self, batch: Mapping[Any, int], ends: Mapping[str, Position], deadline: float
    ) -> dict[RecordAddress, tuple[int, int] | None]:
        """Answers by address; None where no record is left. Addresses not answered before the
        deadline are left out.
        """
        answers: dict[RecordAddress, tuple[int, int] | None] = {}
        waiting = dict(batch)
        while waiting and time.monotonic() < deadline:
            # Assign the waiting partitions again: kafka-python doesn't fetch again for a partition
            # that was paused once.
            consumer = self._reader(waiting)
            first_records: dict[Any, Any] = {}
            while not first_records and time.monotonic() < deadline:
                polled = consumer.poll(timeout_ms=100)
                exhausted = [
                    tp
                    for tp in waiting
                    if consumer.position(tp) >= ends[tp.topic].offsets[tp.partition]
                ]
                first_records = dict.fromkeys(exhausted)
                first_records |= {tp: first for tp, (first, *_) in polled.items()}
            for tp, record in first_records.items():
                offset = waiting.pop(tp)
                answer = record and (int(record.offset), int(record.timestamp))
                answers[tp.topic, tp.partition, offset] = answer
        return answers


def _rounds(places: Iterable[RecordAddress], ends: Mapping[str, Position]) -> list[dict[Any, int]]:
    """Addresses in rounds that are asked for at once: one of each partition, all before its end."""
    rounds: list[dict[Any, int]] = []
    for topic, partition, offset in sorted(set(places)):
        # A seek beyond the end would start again at the first record.
        if offset >= ends[topic].offsets[partition]:
            continue
        topic_partition = kafka.TopicPartition(topic, partition)
        free = next((batch for batch in rounds if topic_partition not in batch), None)
        if free is None:
            free = {}
            rounds.append(free)
        free[topic_partition] = offset
    return rounds
