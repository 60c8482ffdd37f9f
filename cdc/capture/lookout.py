"""Watch the connector during a run: set aside tables that fail its task, capture them again once that is
possible, and after a new snapshot delete the rows that it hasn't sent.

In:  the pipeline file. Out: what `cdc register` would do about such a table; tombstones.
Invariant: no other change of the file is registered. That takes `cdc register`. A failure is logged
and retried, and the streams don't wait for it.
"""

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import structlog

from cdc.capture.aside import (
    INCLUDED,
    StuckTransaction,
    choose_left_out,
    read_causes,
    set_aside,
)
from cdc.capture.configuration import configuration
from cdc.capture.connector import register
from cdc.capture.vanished import remove_vanished
from cdc.config.settings import Pipeline
from cdc.connectors.client import Connect
from cdc.control import registrations
from cdc.control.registrations import Registration
from cdc.control.repetition import repeating
from cdc.errors import CdcError, SourceError
from cdc.kafka.ledger import Ledger
from cdc.kafka.topics import Topics
from cdc.model import mask
from cdc.model.position import Position
from cdc.postgres import source, table_survey

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOOK_S = 2.0
LATE_S = 2.0
"""Seconds beyond its interval after which a heartbeat is late. Then a stuck transaction is looked
for.
"""
LISTS = (
    INCLUDED,
    "column.exclude.list",
    "message.key.columns",
    "snapshot.select.statement",
    *mask.SETTINGS,
)
"""Prefixes of the settings that list tables."""
LOST = re.compile("ProducerFenced|InvalidProducerEpoch|InvalidTxnState")
"""Failures of a task that has lost its transaction. After a restart it reads the same changes
again.
"""
POOL = "cdc-vanished"
"""The scheduler's pool of jobs that remove rows, and their tag. They may take long, and hold up no look."""
# Several runs may watch the same connector, but only one may act at a time.
LOCK = "SELECT pg_try_advisory_xact_lock(hashtextextended('cdc.lookout.' || %s, 0))"
log = structlog.get_logger()


@contextmanager
def looking_out(spark: "SparkSession", load: Callable[[], Pipeline]) -> Iterator[None]:
    """Look at the connector every few seconds, in a separate thread."""
    lookout = _Lookout(load)

    def remove() -> None:
        if lookout.has_vanished:
            spark.sparkContext.setLocalProperty("spark.scheduler.pool", POOL)
            spark.sparkContext.addJobTag(POOL)
            remove_vanished(spark, load())

    try:
        with (
            repeating(
                lookout.look,
                LOOK_S,
                subject="the connector",
                report=_log_failure,
                close=lookout.close,
            ),
            repeating(remove, LOOK_S, subject="the removal of rows", report=_log_unremoved),
        ):
            yield
    finally:
        spark.sparkContext.cancelJobsWithTag(POOL)


class _Lookout:
    def __init__(self, load: Callable[[], Pipeline]) -> None:
        self._load = load
        self._moved = time.monotonic()
        self._stuck = StuckTransaction(load())
        self._topics: Topics | None = None
        self._ends: Mapping[str, Position] = {}
        """Where the topics of heartbeats, registration and ledger ended at the last look."""
        self._registration: Registration | None = None
        self.has_vanished = False
        """Whether the ledger has a new snapshot, after which rows have to be deleted."""

    def look(self) -> None:
        pipeline = self._load()
        with Connect(pipeline.connect) as connect:
            state = connect.state(pipeline.pipeline)
            if state.failed and LOST.search(state.causes):
                log.info("connector_restarted", because="its transaction was ended")
                connect.restart_failed(pipeline.pipeline)
                return
        try:
            registration, late = self._read(pipeline)
        except CdcError:
            self.close()
            raise
        if registration is None:
            return
        can_return = any(obstacle.in_definition for obstacle in registration.aside.values())
        is_known = state.failed and read_causes(state.causes, pipeline.pipeline) is not None
        act: Callable[[], object]
        if is_known or (state.running and late):
            act = partial(set_aside, pipeline, stuck=self._stuck, progress=_log_progress)
        elif state.running and can_return:
            act = partial(_take_back, pipeline, registration)
        else:
            return
        with source.connect_to_read(pipeline.source) as conn, conn.transaction():
            row = conn.execute(LOCK, [pipeline.pipeline]).fetchone()
            if row == (True,):
                act()

    def close(self) -> None:
        """Close the connection to the broker; the next look opens another."""
        if self._topics:
            self._topics.close()
        self._topics = None

    def _read(self, pipeline: Pipeline) -> tuple[Registration | None, bool]:
        """Read the registration if there is another, and whether the next heartbeat is overdue.

        The connection is kept: to open one takes more CPU than all else in a look.
        """
        if self._topics is None or self._topics.bootstrap != pipeline.kafka:
            self.close()
            self._topics = Topics(pipeline.kafka)
        heartbeats = pipeline.heartbeat_topic
        registered = pipeline.registered_topic
        settings = pipeline.settings_topic
        ends = self._topics.ends([heartbeats, registered, settings])
        if ends[registered] != self._ends.get(registered):
            self._registration = registrations.read(self._topics, pipeline)
        if ends[settings] != self._ends.get(settings):
            self.has_vanished = bool(Ledger(pipeline, self._topics).read().snapshots)
        if ends[heartbeats] != self._ends.get(heartbeats):
            self._moved = time.monotonic()
        self._ends = ends
        overdue_s = time.monotonic() - self._moved - pipeline.source.heartbeat_s
        return self._registration, overdue_s > LATE_S


def _log_failure(failure: CdcError) -> None:
    log.warning("connector_not_looked_after", error=failure.message, hint=failure.hint)


def _log_unremoved(failure: CdcError) -> None:
    log.warning("vanished_rows_not_removed", error=failure.message, hint=failure.hint)


def _log_progress(text: str) -> None:
    log.warning("table_set_aside", what=text)


def _without_tables(config: Mapping[str, str]) -> dict[str, str]:
    """The settings without those that list tables: for these, the registration is compared."""
    return {name: value for name, value in config.items() if not name.startswith(LISTS)}


def _take_back(pipeline: Pipeline, registration: Registration) -> None:
    """Capture tables again whose obstacle was in their definition and is gone.

    Tables with another obstacle wait for `cdc register`, because only their rows would show whether
    it is gone.
    """
    others = [name for name, obstacle in registration.aside.items() if not obstacle.in_definition]
    left_out = choose_left_out(pipeline, others)
    if set(left_out) == set(registration.aside):
        return
    captured_again = sorted(registration.aside.keys() - left_out.keys())
    listed = pipeline.with_tables(registration.names)
    unknown = {entry.table for entry in listed.source.tables} - set(registration.names)
    narrowed = listed.without_tables({*left_out, *unknown})
    registrations.refuse_changed(registration, narrowed)
    with source.connect_to_read(pipeline.source) as conn, Topics(pipeline.kafka) as topics:
        tables = table_survey.describe(conn, narrowed)
        expected = configuration(
            narrowed,
            tables=tables,
            server_version=conn.info.server_version,
            cluster_id=topics.cluster_id(),
            unpublished=table_survey.unreplicated_columns(conn, narrowed),
        )
    with Connect(pipeline.connect) as connect:
        current = connect.config(pipeline.pipeline)
    if _without_tables(current or {}) != _without_tables(expected):
        raise SourceError(
            f"{', '.join(captured_again)} can be captured again, but the pipeline file has other"
            " changes that aren't registered yet.",
            hint="cdc -p FILE register",
        )
    register(narrowed, tables, by_run=True)
    log.info("tables_captured_again", tables=captured_again)
