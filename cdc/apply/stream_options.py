"""What a stream depends on: the log, executors and a clock; its options; its work between batches."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from threading import Event
from typing import TYPE_CHECKING, Protocol

from cdc.kafka.log_ends import LogEnds
from cdc.kafka.topics import Topics
from cdc.model.position import Position
from cdc.spark.lane_records import SparkExecutors

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Clock:
    """The computer's clock."""

    def time(self) -> float:
        """Unix seconds."""
        return time.time()

    def monotonic(self) -> float:
        """Seconds that never go back."""
        return time.monotonic()

    def wait(self, event: Event, seconds: float) -> bool:
        """Wait for an event, so many seconds at most. Returns whether it is set."""
        return event.wait(seconds)


@dataclass(frozen=True)
class Environment:
    """What a stream depends on. The stream closes `kafka`.

    kafka   the topics, and what the pipeline itself keeps in topics
    ends    the ends of topics, asked for many times a second
    """

    kafka: Topics
    ends: LogEnds
    executors: SparkExecutors
    clock: Clock

    @classmethod
    def on_spark(cls, spark: "SparkSession", bootstrap: str) -> "Environment":
        """Connect to a broker. Raises ConnectorError."""
        return cls(Topics(bootstrap), LogEnds(bootstrap), SparkExecutors(spark, bootstrap), Clock())


class BackgroundWorker(Protocol):
    """Work that a stream does between its batches, in the same thread. `positions` are the positions
    that the batches have reached, by topic; None means offset zero.

    Every method may raise CdcError. The stream treats it like the error of a batch.
    """

    @property
    def sent_per_s(self) -> float | None:
        """Documents sent per second; None while there are none to send."""

    def begin(self) -> None:
        """Begin. Called whenever a plan has been loaded, before its first batch."""

    def work(self, positions: Mapping[str, Position | None]) -> bool:
        """Work for about a second at most. Returns whether there is more to do at once.

        Called after each batch, and every second while there is none; again at once while it returns
        True.
        """

    def is_current(self, positions: Mapping[str, Position | None]) -> bool:
        """Whether all documents that follow from these positions are sent. Asks no server."""


@dataclass(frozen=True)
class StreamOptions:
    """Options of a stream.

    trigger_s   the least seconds between the starts of two batches, see `sink_kinds.TRIGGER`
    names       the generation to apply to, by table, if readers don't see it
    worker      the work between batches
    """

    trigger_s: float
    names: Mapping[str, str] | None = None
    worker: BackgroundWorker | None = None
