"""Run one sink's stream: resume at the sink's position, apply batch after batch, continue after a
failure.

    ends of the topics -> a batch's ends -> observe, decide -> a job -> positions -> again

Only the sink's own position counts. So a restart, which loads the plan again, is cheap, and is the
response to everything that changes during a run: see `machine`.

The thread that calls `run` owns the stream: it alone observes, applies, decides and publishes.
`stop` sets an event. `progress` is a snapshot that any thread may read.
"""

import threading
from collections import Counter
from uuid import uuid4

import structlog

from cdc.apply.batch import LEAST, BatchSize, BatchWriter
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
from cdc.apply.plan import Ends
from cdc.apply.progress import Progress, RunState
from cdc.apply.recovery import FIRST_PAUSE_S, Recovery
from cdc.apply.schema_follower import DescribeTables
from cdc.apply.stream_options import Environment, StreamOptions
from cdc.apply.views import Views
from cdc.apply.watch import Watch
from cdc.config.settings import Pipeline
from cdc.errors import CdcError, KafkaForbidden, KafkaUnavailable
from cdc.generations.pause import paused_error
from cdc.sink.contract import Sink

LOOK_S = 1.0
"""Seconds between checks of the control topics while idle. A busy stream checks before each
batch.
"""
POLL_S, IDLE_POLL_S = 0.05, 0.2
"""Seconds between requests for the topics' ends; the second one after `IDLE_S` without a batch."""
IDLE_S = 2.0
LOOK_SHARE = 0.05
"""The largest share of a core that these requests take. With hundreds of tables, one takes longer
than a millisecond.
"""
log = structlog.get_logger()


class Stream:
    """Applies all tables to one sink, in the thread that calls `run`."""

    def __init__(
        self,
        environment: Environment,
        sink: Sink,
        pipeline: Pipeline,
        describe: DescribeTables,
        placeholder: str,
        options: StreamOptions,
    ) -> None:
        """`describe` returns the tables as they are now, at every start; `placeholder` is the
        connector's.
        """
        self.sink = sink
        self.progress = Progress(sink.name)
        self._environment = environment
        self._clock = environment.clock
        kafka = environment.kafka
        self._trigger_s = options.trigger_s
        self._worker = options.worker
        self._is_working = False
        """Whether the worker has more to do."""
        names = options.names
        self._views = Views(sink, pipeline, kafka, describe, placeholder, names, self._clock.time)
        self._watch = Watch(self._views, environment.ends, self._clock)
        self._stopping = threading.Event()
        self._recovery = Recovery(
            self._views, self._watch, self._stopping, self._publish, self._clock
        )
        self._batches = BatchWriter(
            environment.executors,
            self._views,
            uuid4().hex,
            self._recovery.retry_batch,
        )
        self._lag = Lag(self._clock)
        self._restarts = Counter[str]()
        self._batch_size = BatchSize(kafka)

    def run(self, *, until_caught_up: bool = False) -> None:
        """Apply until stopped. With `until_caught_up`, until all records are applied that were in
        the topics at the start.

        Raises:
            CdcError: an immediate retry can't fix it. `run` may be called again later.
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
        """Count and publish that `run` is called again after an error. The error remains published
        until a batch or an observation succeeds.
        """
        self._report_restart(Restart(Reason.ERROR))
        self._publish(state=RunState.LOADING)

    def close(self) -> None:
        """Close the connection to the broker. `run` must not be called again."""
        self._environment.kafka.close()

    def stop(self) -> None:
        """Finish the current batch and begin no other. Returns at once."""
        self._stopping.set()

    def _attempt(self, until_caught_up: bool) -> Decision:
        """Load the plan and follow the log until a decision ends it."""
        try:
            return self._resume(until_caught_up)
        except Exception as error:
            return self._recovery.decide(error)

    def _report_restart(self, restart: Restart) -> None:
        """Count and log every restart, so that its cause can be found."""
        self._restarts[restart.reason] += 1
        log.info(
            "query_restarted", sink=self.sink.name, reason=str(restart.reason), table=restart.table
        )
        self._publish(restarts=dict(self._restarts), restarted=str(restart))

    def _end(self, stop: Stop) -> None:
        lag = {"lag_records": 0, "lag_seconds": 0.0} if stop.state is RunState.CAUGHT_UP else {}
        failure = {"error": stop.error.message, "hint": stop.error.hint} if stop.error else {}
        self._publish(state=stop.state, **failure, **lag)

    def _resume(self, until_caught_up: bool) -> Decision:
        pause = self._views.read_pause()
        if pause and until_caught_up:
            return Stop(RunState.FAILED, paused_error(pause, self.sink.name))
        if pause and not self._outwait_pause():
            return Stop(RunState.STOPPED)
        plan = self._views.load()
        self._watch.begin()
        if self._worker:
            self._worker.begin()
        self._environment.executors.begin(self.sink.name)
        self._batches.process_redrives()
        self._batch_size.begin(plan)
        ends = {topic: dict(enumerate(end.offsets)) for topic, end in plan.shapes.items()}
        self._lag.begin(ends)
        if self._stopping.is_set():
            return Stop(RunState.STOPPED)
        if self.progress.state is RunState.LOADING:
            self._publish(state=RunState.APPLYING)
        return self._follow(ends if until_caught_up else None)

    def _outwait_pause(self) -> bool:
        """Wait until the sink is resumed. False if the stream is stopped first."""
        self._publish(state=RunState.PAUSED, error=None, hint=None)
        while self._views.read_pause():
            if self._clock.wait(self._stopping, LOOK_S):
                return False
        self._publish(state=RunState.LOADING)
        return True

    def _follow(self, last_ends: Ends | None) -> Decision:
        """Apply batch after batch, and observe while there is none, until a decision ends it.

        last_ends: the offsets to end at; None to continue.
        """
        decision: Decision = Continue()
        due_at = 0.0
        applied_at = looked_at = self._clock.monotonic()
        while isinstance(decision, Continue | WaitForPromotion):
            if self._stopping.is_set():
                return Stop(RunState.STOPPED)
            is_turn = self._is_working
            began = self._clock.monotonic()
            ends = self._see_ends() if last_ends is None else last_ends
            if ends and (table := self._views.plan.find_cut(ends)):
                return Restart(Reason.TOPIC, table)
            batch_ends = self._batch_size.limited(self._views.plan, ends) if ends else None
            size = self._views.plan.behind(batch_ends) if batch_ends else 0
            look_s = self._clock.monotonic() - began
            if batch_ends and (size >= LEAST or last_ends or began >= due_at):
                decision = self._apply(batch_ends)
                # No pause after a large batch, because more has arrived meanwhile.
                due_at = 0.0 if size >= LEAST else began + self._trigger_s
                applied_at = looked_at = self._clock.monotonic()
                is_turn = True
            elif last_ends is not None:
                return self._finish_work()
            elif began - looked_at >= LOOK_S:
                decision = self._observe_idle(is_log_read=ends is not None)
                looked_at = self._clock.monotonic()
                is_turn = True
            if self._worker and is_turn and isinstance(decision, Continue):
                with self._batches.account.measured("documents"):
                    self._is_working = self._worker.work(self._views.plan.positions)
            is_busy = self._is_working or last_ends is not None or size >= LEAST
            if not is_busy:
                is_idle = self._clock.monotonic() - applied_at > IDLE_S
                pause_s = IDLE_POLL_S if is_idle else POLL_S
                self._clock.wait(self._stopping, min(LOOK_S, max(pause_s, look_s / LOOK_SHARE)))
        return decision

    def _see_ends(self) -> Ends | None:
        """Read the topics' ends. None while the broker can't be reached, which is published. Raises
        TopicMissing.
        """
        try:
            shapes = self._views.plan.shapes
            ends = self._environment.ends.read(
                {name: shape.partition_count for name, shape in shapes.items()}
            )
        except KafkaUnavailable as error:
            self._report_unread(error)
            return None
        self._lag.see(ends, self._clock.time())
        return ends

    def _report_unread(self, error: CdcError) -> None:
        if self.progress.error != error.message:
            log.warning("log_not_read", sink=self.sink.name, error=error.message)
        self._publish(state=RunState.RETRYING, error=error.message, hint=error.hint)

    def _finish_work(self) -> Decision:
        """Decide what follows the end of the log, once the worker has sent its documents."""
        plan = self._views.plan
        while self._worker and self._worker.work(plan.positions):
            if self._stopping.is_set():
                return Stop(RunState.STOPPED)
        unfinished = self._worker is not None and not self._worker.is_current(plan.positions)
        if unfinished:
            # The documents need later records; the connector may still be in its snapshot.
            self._clock.wait(self._stopping, FIRST_PAUSE_S)
        observed = Observed(
            self._views.control,
            log_ended=True,
            unfinished=unfinished,
            stopping=self._stopping.is_set(),
        )
        return decide(plan, observed)

    def _apply(self, ends: Ends) -> Decision:
        """Apply one batch, unless an observation calls for a restart first."""
        # After the batch's end is known, so that no control record is missed that the batch depends
        # on.
        with self._batches.account.measured("observe"):
            decision = self._observe_before_batch()
        if not isinstance(decision, Continue):
            return decision
        plan = self._views.plan
        began = self._clock.monotonic()
        self._publish(busy=True)
        try:
            self._batches.write(ends)
        finally:
            self._publish(busy=False)
        if self.progress.state is not RunState.RETRYING:
            self._batch_size.adapt(plan.behind(ends), self._clock.monotonic() - began)
        self._publish(state=RunState.APPLYING, error=None, hint=None)
        return Continue()

    def _observe_before_batch(self) -> Decision:
        """Observe and decide. While a promotion is under way, the batch waits for a time."""
        began = self._clock.monotonic()
        # Checked before each batch as well, because a busy stream is never idle.
        quarantine = self._batches.redrive_requested()
        decision = decide(
            self._views.plan, self._watch.observe(self._views.plan, quarantine=quarantine)
        )
        while isinstance(decision, WaitForPromotion) and not self._clock.wait(
            self._stopping, POLL_S
        ):
            waited_s = self._clock.monotonic() - began
            observed = self._watch.observe(
                self._views.plan, waited_s=waited_s, quarantine=quarantine
            )
            decision = decide(self._views.plan, observed)
        return Stop(RunState.STOPPED) if isinstance(decision, WaitForPromotion) else decision

    def _observe_idle(self, *, is_log_read: bool) -> Decision:
        """Observe between batches, and decide. If a server doesn't answer, the next observation
        asks again.

        is_log_read: whether the ends of the tables' topics could be read. If not, that stays
        published: the control topics may be answered all the same.
        """
        try:
            observed = self._watch.observe(
                self._views.plan, quarantine=self._batches.redrive_requested()
            )
        except KafkaForbidden:
            raise
        except CdcError as error:
            self._report_unread(error)
            return Continue()
        if is_log_read:
            self._publish(state=RunState.APPLYING, error=None, hint=None)
        return decide(self._views.plan, observed)

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
