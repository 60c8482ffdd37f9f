"""Topic settings that a compaction lowers for a while, and the segments that it begins.

The original settings are written to the ledger before they are lowered, so that the next command
restores them after a crash: see `cdc.audit.compaction` for what is done with them.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import TracebackType

from cdc.config.settings import Pipeline
from cdc.errors import ConnectorError
from cdc.kafka.clients import TIMEOUT_MS, kafka, open_producer, translated_errors
from cdc.kafka.ledger import Compaction, Ledger
from cdc.kafka.topics import Topics
from cdc.model.position import Position

SEGMENT_MS = 1000
PAUSED = {"min.cleanable.dirty.ratio": "1.0", "segment.jitter.ms": "0"}
"""Cleaning is off: at a topic's original settings the broker would mark tombstones for the original
retention, and they would stay for that long."""
ROLLING = {**PAUSED, "segment.ms": str(SEGMENT_MS)}
"""Cleaning is off, and the next append begins another segment."""
OPEN_SEGMENT = {**PAUSED, "segment.ms": str(365 * 24 * 3_600_000)}
"""Cleaning is off, and no segment begins unless one is full."""
CLEANING = {**OPEN_SEGMENT, "min.cleanable.dirty.ratio": "0.0", "min.compaction.lag.ms": "0"}
"""The broker cleans everything below the open segment."""
RETENTION_MS = 1000
TOMBSTONES = {"delete.retention.ms": str(RETENTION_MS)}
TRANSACTION_MS = 10_000
"""Bounds the wait of readers for an open transaction after a crash: the broker aborts it then."""
HEARTBEAT_S = 1.0
"""Seconds between two heartbeats in the ledger: a compaction without them counts as dead."""


def restore(kafka: Topics, pipeline: Pipeline) -> list[str]:
    """Restore the settings of topics that an interrupted compaction has lowered.

    Returns the topics' names.
    """
    ledger = Ledger(pipeline, kafka).read()
    return _restore_settings(kafka, ledger) if ledger.is_interrupted() else []


def refuse_concurrent(kafka: Topics, pipeline: Pipeline) -> None:
    """Raise ConnectorError when another compaction of the pipeline is at work."""
    ledger = Ledger(pipeline, kafka).read()
    if ledger.lowered and not ledger.is_interrupted():
        raise ConnectorError(
            "Another `cdc topics compact` of this pipeline is at work.", hint="wait for it to end"
        )


def _restore_settings(kafka: Topics, ledger: Ledger) -> list[str]:
    existing, now = kafka.existing(ledger.lowered), time.time()
    kafka.override({topic: _owned_settings(ledger.lowered[topic]) for topic in existing})
    for compactions, tombstones in ((ledger.compacted, False), (ledger.tombstones_removed, True)):
        unfinished = {topic: compactions[topic] for topic in compactions if topic in ledger.lowered}
        finished = {
            topic: replace(entry, ended=now)
            for topic, entry in unfinished.items()
            if not entry.ended
        }
        ledger.add_compactions(finished, tombstones=tombstones)
    ledger.forget_lowered(ledger.lowered)
    return sorted(existing)


def _owned_settings(settings: Mapping[str, str]) -> dict[str, str | None]:
    return {name: settings.get(name) for name in (*CLEANING, *TOMBSTONES)}


class LoweredSettings:
    """Settings of topics, lowered step by step, restored at the end.

    Writes a heartbeat to the ledger every second.
    """

    def __init__(
        self, kafka: Topics, pipeline: Pipeline, topics: Sequence[str], *, tombstones: bool
    ) -> None:
        self._kafka, self._topics, self._tombstones = kafka, topics, tombstones
        self._ledger = Ledger(pipeline, kafka)
        self._original = kafka.overrides(topics)
        self._stopped = threading.Event()
        self._heartbeat_thread = threading.Thread(target=self._write_heartbeats, daemon=True)

    def __enter__(self) -> "LoweredSettings":
        self._ledger.add_lowered(self._original)
        self._ledger.write_heartbeat(at_work=True)
        self._heartbeat_thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            _restore_settings(self._kafka, self._ledger.read())
        finally:
            self._stopped.set()
            self._heartbeat_thread.join()
            self._ledger.write_heartbeat(at_work=False)

    def roll(self, roller: "SegmentRoller", places: Mapping[str, Position]) -> dict[str, Position]:
        """Begin a segment and hold it open, with cleaning off.

        Returns ends above everything that can be cleaned.
        """
        self._kafka.override(
            {topic: {**_owned_settings(self._original[topic]), **ROLLING} for topic in self._topics}
        )
        roller.roll(places)
        self._kafka.override(dict.fromkeys(self._topics, OPEN_SEGMENT))
        return self._kafka.log_ends(self._topics)

    def clean(self, ends: Mapping[str, Position]) -> None:
        """Let the broker clean what lies below the ends, and write that to the ledger first."""
        now = time.time()
        compactions = {topic: Compaction(end, now) for topic, end in ends.items()}
        self._ledger.add_compactions(compactions, tombstones=self._tombstones)
        settings = {**CLEANING, **(TOMBSTONES if self._tombstones else {})}
        self._kafka.override(dict.fromkeys(self._topics, settings))

    def _write_heartbeats(self) -> None:
        while not self._stopped.wait(HEARTBEAT_S):
            # A heartbeat may fail: another command that takes this one for dead only restores the
            # settings.
            with suppress(ConnectorError):
                self._ledger.write_heartbeat(at_work=True)


class SegmentRoller:
    """Appends to partitions with aborted transactions.

    A second roller of the pipeline fences the first one.
    """

    def __init__(self, topics: Topics, pipeline: Pipeline) -> None:
        self._bootstrap = topics.bootstrap
        self._name = f"{pipeline.pipeline}-compaction"
        with translated_errors(self._bootstrap, "Write", self._name):
            self._producer = open_producer(
                self._bootstrap,
                transactional_id=self._name,
                transaction_timeout_ms=TRANSACTION_MS,
            )
            self._producer.init_transactions()

    def __enter__(self) -> "SegmentRoller":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._producer.close()

    def roll(self, places: Mapping[str, Position]) -> None:
        """Append to every partition of these topics, and abort. Raises ConnectorError."""
        try:
            with translated_errors(self._bootstrap, "Write", self._name):
                self._producer.begin_transaction()
                futures = [
                    self._producer.send(topic, key=b"null", value=None, partition=partition)
                    for topic, end in places.items()
                    for partition in range(end.partition_count)
                ]
                for future in futures:
                    future.get(timeout=TIMEOUT_MS / 1000)
                self._producer.abort_transaction()
        except ConnectorError as error:
            if isinstance(
                error.__cause__,
                kafka.errors.ProducerFencedError | kafka.errors.InvalidProducerEpochError,
            ):
                raise ConnectorError(
                    "Another `cdc topics compact` of this pipeline has begun; this one stops.",
                    hint="wait for the other to end",
                ) from error
            raise
