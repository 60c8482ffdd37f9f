"""The stream of a rebuild, and the waits until it has replayed the log and has caught up.

In:  a sink of a generation that isn't live, and its tables. Out: a stream that is at work on it until
     the context of `keep_current` ends, and the wait until it keeps pace with the topics.
"""

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import structlog
from pyspark.sql import SparkSession

from cdc.apply.progress import Progress, RunState
from cdc.apply.schema_follower import DescribeTables
from cdc.apply.stream import Stream
from cdc.apply.stream_options import StreamOptions
from cdc.config.settings import Pipeline
from cdc.control.registrations import Registration
from cdc.errors import CdcError, SinkError
from cdc.kafka.topics import Topics
from cdc.model.position import Position, distance
from cdc.model.table import Table
from cdc.postgres.table_definition import Definition
from cdc.sink.contract import Sink, positions
from cdc.sink.promotion import GenerationReplaced

POLL_S = 0.1
RETRY_LIMIT_S = 120.0
"""Seconds that a rebuild waits for a sink, or for the broker, that is away."""
CAUGHT_UP_S = 1.0
"""Seconds within which a view that has caught up applies what is in the topics."""
log = structlog.get_logger()


def only_tables(describe: DescribeTables, names: Collection[str]) -> DescribeTables:
    """Restrict a description to these tables."""

    def describe_subset(
        history: Sequence[Definition], registration: Registration
    ) -> tuple[Sequence[Table], Mapping[str, list[str]]]:
        tables, blocked = describe(history, registration)
        subset = [table for table in tables if table.qualified in names]
        return subset, {name: reasons for name, reasons in blocked.items() if name in names}

    return describe_subset


@contextmanager
def keep_current(
    spark: SparkSession,
    sink: Sink,
    names: Mapping[str, str],
    pipeline: Pipeline,
    describe: DescribeTables,
    placeholder: str,
) -> Iterator[Stream]:
    """Apply changes to a generation that isn't live, in a thread, until the context ends.

    A failure ends the stream and is logged: its `progress.state` is "failed", and positions stand
    still.
    """
    options = StreamOptions(pipeline.sinks[sink.name].trigger_s, names)
    stream = Stream(spark, sink, pipeline, describe, placeholder, options)

    def run() -> None:
        try:
            stream.run()
        except GenerationReplaced:
            # Another command has promoted or replaced the generation, and continues it.
            log.info("standby_replaced", sink=sink.name)
        except CdcError as error:
            log.warning("standby_dropped", sink=sink.name, error=error.message)
        finally:
            stream.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield stream
    finally:
        stream.stop()
        thread.join()


def apply_all(
    kafka: Topics, sink: Sink, tables: Sequence[Table], progress: Callable[[], Progress]
) -> None:
    """Wait until a stream has applied to the sink what is in the topics now.

    Raises:
        SinkError: the stream has failed, goes on without one of its tables, or has waited for the
            sink for `RETRY_LIMIT_S`.
    """
    is_caught_up = _caught_up_check(kafka, sink, tables)
    worked_at = time.monotonic()
    while not is_caught_up():
        now = progress()
        if now.state is not RunState.RETRYING:
            worked_at = time.monotonic()
        _refuse_stopped(now, time.monotonic() - worked_at)
        time.sleep(POLL_S)


def catch_up(
    kafka: Topics, sink: Sink, tables: Sequence[Table], progress: Callable[[], Progress]
) -> None:
    """Wait until a stream takes less than a second to apply to the sink what is in the topics.

    The wait also ends once the stream stops getting faster. `progress`: the stream's, asked for
    every `POLL_S` seconds.

    Raises:
        SinkError: see `apply_all`.
    """
    duration_s = float("inf")
    while True:
        previous_s, start = duration_s, time.monotonic()
        apply_all(kafka, sink, tables, progress)
        duration_s = time.monotonic() - start
        if duration_s < CAUGHT_UP_S or duration_s > previous_s / 2:
            return


def _refuse_stopped(progress: Progress, waits_s: float) -> None:
    """Raise SinkError where a stream no longer applies to one of its tables, or to none."""
    reason, hint = progress.error, progress.hint
    if progress.aside:
        reason, hint = next(iter(progress.aside.values()))
    elif waits_s > RETRY_LIMIT_S:
        hint = "the same command goes on"
    elif progress.state is not RunState.FAILED:
        return
    raise SinkError(
        f"The new generation of {progress.sink} can't go on: {reason}",
        hint=hint or "readers see what they saw; the same command goes on",
        sink=progress.sink,
    )


def _caught_up_check(kafka: Topics, sink: Sink, tables: Sequence[Table]) -> Callable[[], bool]:
    """Build a check that a sink has applied everything that was in the topics at the first call."""
    ends: dict[str, Position] = {}

    def is_caught_up() -> bool:
        if not ends:
            ends.update(kafka.ends([table.topic for table in tables]))
        checkpoints = positions(sink, tables)
        return all(
            distance(checkpoints[table.qualified], ends[table.topic]).reached for table in tables
        )

    return is_caught_up
