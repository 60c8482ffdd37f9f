"""Run one sink's streaming query: resume at the sink's position, apply batch after batch, go on
after a failure.

Only the sink's own position counts. Spark's checkpoint is created for every start and thrown away.
So a restart is cheap, and answers everything that changes under a running query: see `machine`.

One thread owns a stream, the one in `run`: it alone observes, applies, decides and publishes.
Spark's thread hands each batch over and waits. `stop` sets an event. `progress` is a snapshot that
any thread may read.
"""

import threading
import time
from collections import Counter
from contextlib import suppress
from uuid import uuid4

import structlog
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from cdc.apply.batch.size import BatchSize
from cdc.apply.batch.writer import BatchWriter
from cdc.apply.handover import Handover
from cdc.apply.lag import Lag
from cdc.apply.machine import (
    Continue,
    Decision,
    Observed,
    Reason,
    Restart,
    Stop,
    WaitForPromotion,
    decide,
)
from cdc.apply.progress import Progress, RunState
from cdc.apply.query import Planned, checkpoint, latest, light, planned_ends, read, start
from cdc.apply.recovery import FIRST_PAUSE_S, Recovery
from cdc.apply.schema_follower import DescribeTables
from cdc.apply.stream_options import StreamOptions
from cdc.apply.views import Views
from cdc.apply.watch import Watch
from cdc.config.settings import Pipeline
from cdc.errors import CdcError
from cdc.generations.pause import paused_error
from cdc.kafka.topics import Topics
from cdc.sink.contract import Sink

LOOK_S = 1.0
"""Seconds between checks of the control topics while idle. A busy stream checks before each
batch.
"""
POLL_S = 0.05
"""Seconds between checks whether a promotion is still under way."""
log = structlog.get_logger()


class Stream:
    """Applies all tables to one sink, in the thread that calls `run`."""

    def __init__(
        self,
        spark: SparkSession,
        sink: Sink,
        pipeline: Pipeline,
        describe: DescribeTables,
        placeholder: str,
        options: StreamOptions,
    ) -> None:
        """`describe` returns the tables as they are now, at every start; `placeholder` is the
        connector's.
        """
        self.sink, self.progress = sink, Progress(sink.name)
        spark = light(spark) if sink.row_format == "documents" else spark
        self._spark, self._pipeline, self._writer = spark, pipeline, uuid4().hex
        self._kafka, names = Topics(pipeline.kafka), options.names
        self._trigger_s, self._worker = options.trigger_s, options.worker
        self._is_working = False
        """Whether the worker has more to do."""
        self._views = Views(sink, pipeline, self._kafka, describe, placeholder, names)
        self._watch = Watch(self._views)
        self._handover = Handover[Planned]()
        self._stopping = threading.Event()
        self._recovery = Recovery(self._views, self._watch, self._stopping, self._publish)
        self._batches = BatchWriter(
            spark, self._views, self._writer, self._recovery.retry_batch, shadow=names is not None
        )
        self._lag, self._restarts = Lag(), Counter[str]()
        self._batch_size = BatchSize(self._kafka)

    def run(self, *, until_caught_up: bool = False) -> None:
        """Apply until stopped, or until all records are applied that were in the topics at the
        start.

        Raises:
            CdcError: no retry at once can mend it. It may be called again later.
        """
        decision: Decision = Continue()
        while not isinstance(decision, Stop):
            decision = self._attempt(until_caught_up)
            if isinstance(decision, Restart):
                self._report_restart(decision)
        self._end(decision)
        if decision.error:
            raise decision.error

    def note_restart(self) -> None:
        """Count and publish that `run` is called again after an error. The error stays to be seen
        until a batch, or a look, has gone well.
        """
        self._report_restart(Restart(Reason.ERROR))
        self._publish(state=RunState.LOADING)

    def close(self) -> None:
        """Close the connection to the broker, once `run` isn't called any more."""
        self._kafka.close()

    def stop(self) -> None:
        """Finish the batch at hand, begin no other; returns at once."""
        self._stopping.set()
        self._handover.wake()

    def _attempt(self, until_caught_up: bool) -> Decision:
        """Run the query once, from loading its plan to the decision that ends it."""
        try:
            return self._run_query(until_caught_up)
        except Exception as error:
            return self._recovery.decide(error)

    def _report_restart(self, restart: Restart) -> None:
        """Count and log every restart: none is free, and a person may look for its cause."""
        self._restarts[restart.reason] += 1
        log.info(
            "query_restarted", sink=self.sink.name, reason=str(restart.reason), table=restart.table
        )
        self._publish(restarts=dict(self._restarts), restarted=str(restart))

    def _end(self, stop: Stop) -> None:
        lag = {"lag_records": 0, "lag_seconds": 0.0} if stop.state is RunState.CAUGHT_UP else {}
        failure = {"error": stop.error.message, "hint": stop.error.hint} if stop.error else {}
        self._publish(state=stop.state, **failure, **lag)

    def _run_query(self, until_caught_up: bool) -> Decision:
        if (pause := self._views.read_pause()) and until_caught_up:
            return Stop(RunState.FAILED, paused_error(pause, self.sink.name))
        if pause and not self._outwait_pause():
            return Stop(RunState.STOPPED)
        plan = self._views.load()
        self._watch.begin()
        if self._worker:
            self._worker.begin()
        self._batches.process_redrives()
        self._lag.begin({topic: dict(enumerate(end.offsets)) for topic, end in plan.shapes.items()})
        self._handover = Handover()
        if self._stopping.is_set():
            return Stop(RunState.STOPPED)
        with checkpoint(self.sink.name) as folder:
            query = self._start(folder, until_caught_up)
            try:
                if self.progress.state is RunState.LOADING:
                    self._publish(state=RunState.APPLYING)
                return self._follow(query, folder)
            finally:
                self._handover.close()
                # Spark's process may be gone, which is reported elsewhere; without an owner its
                # batches do nothing.
                with suppress(PySparkException, Py4JError, OSError):
                    query.stop()

    def _outwait_pause(self) -> bool:
        """Wait until the sink is resumed; False when the stream is stopped meanwhile."""
        self._publish(state=RunState.PAUSED, error=None, hint=None)
        while self._views.read_pause():
            if self._stopping.wait(LOOK_S):
                return False
        self._publish(state=RunState.LOADING)
        return True

    def _follow(self, query: StreamingQuery, folder: str) -> Decision:
        """Apply the query's batches, and observe while there are none, until a decision ends the
        query.
        """
        decision: Decision = Continue()
        while isinstance(decision, Continue | WaitForPromotion):
            with self._handover.receive(0.0 if self._is_working else LOOK_S) as batch:
                if self._stopping.is_set():
                    return Stop(RunState.STOPPED)
                if batch is not None:
                    decision = self._apply(batch.records, folder, batch.number)
                elif query.isActive:
                    decision = self._observe_idle(query)
                elif (error := query.exception()) is not None:
                    raise error
                else:
                    return self._finish_work()
            if self._worker and isinstance(decision, Continue):
                with self._batches.account.measured("documents"):
                    self._is_working = self._worker.work(self._views.plan.positions)
        return decision

    def _finish_work(self) -> Decision:
        """Decide what follows the query's end, once all is done that its batches gave rise to."""
        plan = self._views.plan
        while self._worker and self._worker.work(plan.positions):
            if self._stopping.is_set():
                return Stop(RunState.STOPPED)
        unfinished = self._worker is not None and not self._worker.is_current(plan.positions)
        if unfinished:
            # The log has to go on first; the connector may be in its snapshot.
            self._stopping.wait(FIRST_PAUSE_S)
        observed = Observed(
            self._views.control,
            query_ended=True,
            unfinished=unfinished,
            stopping=self._stopping.is_set(),
        )
        return decide(plan, observed)

    def _start(self, folder: str, until_caught_up: bool) -> StreamingQuery:
        plan = self._views.plan
        records = read(
            self._spark, self._pipeline.kafka, self._writer, plan, self._batch_size.limit(plan)
        )
        trigger_s = None if until_caught_up else self._trigger_s
        return start(records, folder, self.sink.name, trigger_s, self._handover.give)

    def _apply(self, records: DataFrame, folder: str, number: int) -> Decision:
        """Apply one batch, unless an observation calls for a restart first."""
        ends = planned_ends(folder, number)
        # Observed after the batch's end is known, so that nothing is missed that the batch could
        # depend on.
        with self._batches.account.measured("observe"):
            decision = self._observe_before_batch()
        if not isinstance(decision, Continue):
            return decision
        plan, began = self._views.plan, time.monotonic()
        self._lag.plan(ends)
        self._publish(busy=True)
        try:
            self._batches.write(records, ends)
        finally:
            self._publish(busy=False)
        took_s, waited = time.monotonic() - began, self.progress.state is RunState.RETRYING
        self._publish(state=RunState.APPLYING, error=None, hint=None)
        return Continue() if waited else self._adapt_limit(plan.behind(ends), took_s)

    def _observe_before_batch(self) -> Decision:
        """Observe, and decide; while a promotion is under way, the batch waits for a time."""
        # Asked for here, too: a stream whose changes keep coming is never idle.
        began, quarantine = time.monotonic(), self._batches.redrive_requested()
        decision = decide(
            self._views.plan, self._watch.observe(self._views.plan, quarantine=quarantine)
        )
        while isinstance(decision, WaitForPromotion) and not self._stopping.wait(POLL_S):
            waited_s = time.monotonic() - began
            observed = self._watch.observe(
                self._views.plan, waited_s=waited_s, quarantine=quarantine
            )
            decision = decide(self._views.plan, observed)
        return Stop(RunState.STOPPED) if isinstance(decision, WaitForPromotion) else decision

    def _observe_idle(self, query: StreamingQuery) -> Decision:
        """Observe between batches, and decide. A server that doesn't answer is asked again
        later.
        """
        self._lag.take(*latest(query))
        try:
            observed = self._watch.observe(
                self._views.plan, quarantine=self._batches.redrive_requested()
            )
        except CdcError as error:
            if self.progress.error != error.message:
                log.warning("control_topics_not_read", sink=self.sink.name, error=error.message)
            self._publish(state=RunState.RETRYING, error=error.message, hint=error.hint)
            return Continue()
        self._publish(state=RunState.APPLYING, error=None, hint=None)
        return decide(self._views.plan, observed)

    def _adapt_limit(self, offsets: int, took_s: float) -> Decision:
        """After a full batch, restart if another limit suits the remaining records."""
        fits = self._batch_size.fits(self._views.plan, offsets, took_s)
        return Continue() if fits else Restart(Reason.BATCH_SIZE)

    def _publish(self, **news: object) -> None:
        """Publish a new snapshot."""
        self.progress = self._lag.progress(
            self.progress,
            self._views.plan,
            self._batches.total,
            batches=self._batches.batches,
            tables=self._batches.account.by_table,
            phases_s=self._batches.account.seconds,
            retries=dict(self._recovery.retries),
            sent_per_s=self._worker.sent_per_s if self._worker else None,
            **news,
        )
