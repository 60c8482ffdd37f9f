"""Run one sink's stream: resume at the sink's position, apply batch after batch, continue after a
failure.

    ends of the topics -> a batch's ends -> observe, decide -> a job -> positions -> again

Only the sink's own position counts. So a restart, which loads the plan again, is cheap, and is the
response to everything that changes during a run: see `machine`. Which errors pass by trying again is in
`cdc.sink.remedy`.

The thread that calls `run` owns the stream: it alone observes, applies, decides and publishes.
`stop` sets an event. `progress` is a snapshot that any thread may read.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING, Any, Protocol
from uuid import uuid4

import structlog
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception,
    stop_when_event_set,
)
from tenacity.wait import wait_exponential

from cdc.apply.batch import LEAST, BatchSize, BatchWriter
from cdc.apply.machine import (
    Continue,
    Decision,
    Ends,
    Observed,
    Reason,
    Restart,
    ResumePlan,
    Stop,
    WaitForPromotion,
    decide,
)
from cdc.apply.progress import Progress, RunState
from cdc.apply.resume import SinkViews
from cdc.apply.schema_follower import DescribeTables
from cdc.config.settings import Pipeline
from cdc.errors import CdcError, Fenced, HeldUp, KafkaForbidden, KafkaUnavailable
from cdc.generations.pause import paused_error
from cdc.kafka.log_ends import LogEnds
from cdc.kafka.topics import Topics
from cdc.model.clock import Clock
from cdc.model.outcome import Applied
from cdc.model.position import Position
from cdc.sink.contract import Applier
from cdc.sink.remedy import Patience, Remedy, remedy
from cdc.spark.failures import explain
from cdc.spark.lane_records import LoggedRecords

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOOK_S = 1.0
"""Seconds between checks of the control topics while idle. A busy stream checks before each
batch.
"""
POLL_S = 0.05
"""Seconds between requests for the topics' ends, once the next batch is due."""
IDLE_POLL_S = 0.2
"""The same after `IDLE_S` without a batch. All streams ask at the same times then, so that one request
answers all.
"""
SHARED_S = 0.02
"""How old an answer to another stream may be."""
IDLE_S = 2.0
LOOK_SHARE = 0.05
"""The largest share of a core that these requests take. With hundreds of tables, one takes longer
than a millisecond.
"""
ALIGNED_S = 2.0
"""The longest interval whose batches start at multiples of it. Sharing a job pays where there are many."""
LEAST_PAUSE_S = 0.001
"""The rest of a pause may be too small to change the time."""
FIRST_PAUSE_S = 0.25
"""The first pause after a failure."""
LONGEST_PAUSE_S = 10.0
"""The longest pause after repeated failures."""
STALE_S = 30.0
"""How long a lag of 0 stays valid after the last look at the topics' ends."""
WINDOW_S = 5.0
"""The window of the rate; it covers the last batch at least."""
RESOLUTION = 0.05
"""How exactly it is known how long something has waited, as a share of the longest wait: a catch-up
of a day keeps 200 ends, each with an offset for every partition of every table.
"""
log = structlog.get_logger()


@dataclass(frozen=True)
class Environment:
    """What a stream depends on. The stream closes `kafka`.

    kafka     the topics, and what the pipeline itself keeps in topics
    ends      the ends of topics, asked for many times a second
    records   the records of any batch
    """

    kafka: Topics
    ends: LogEnds
    records: LoggedRecords
    clock: Clock

    @classmethod
    def on_spark(
        cls, spark: "SparkSession", bootstrap: str, ends: LogEnds | None = None
    ) -> "Environment":
        """`ends`: shared by the streams of a run."""
        records = LoggedRecords(spark, bootstrap)
        return cls(Topics(bootstrap), ends or LogEnds(bootstrap), records, Clock())


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


class Stream:
    """Applies all tables to one sink, in the thread that calls `run`."""

    def __init__(
        self,
        environment: Environment,
        sink: Applier,
        pipeline: Pipeline,
        describe: DescribeTables,
        placeholder: str,
        trigger_s: float,
        *,
        names: Mapping[str, str] | None = None,
        worker: BackgroundWorker | None = None,
    ) -> None:
        """`describe` returns the tables as they are now, at every start. `placeholder` is the
        connector's. `trigger_s`: the seconds between the starts of two batches, see
        `sink_kinds.TRIGGER`. `names`: the generation to apply to, by table, if readers don't see it.
        `worker`: the work between batches.
        """
        self.sink = sink
        self.progress = Progress(sink.name)
        self._environment = environment
        self._clock = environment.clock
        self._trigger_s = trigger_s
        self._worker = worker
        self._is_working = False
        """Whether the worker has more to do."""
        self._resumed_at = 0.0
        """When the plan had been loaded: its positions may be ahead of ends that are older."""
        kafka = environment.kafka
        self._views = SinkViews(sink, pipeline, kafka, describe, placeholder, names, self._clock)
        self._stopping = threading.Event()
        self._recovery = Recovery(self._views, self._stopping, self._publish, self._clock)
        self._batches = BatchWriter(
            environment.records, self._views, uuid4().hex, self._recovery.retry_batch
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
            try:
                decision = self._resume(until_caught_up)
            except Exception as error:
                decision = self._recovery.decide(error)
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
        """Load the plan and follow the log until a decision ends it."""
        pause = self._views.read_pause()
        if pause and until_caught_up:
            return Stop(RunState.FAILED, paused_error(pause, self.sink.name))
        if pause and not self._outwait_pause():
            return Stop(RunState.STOPPED)
        plan = self._views.load()
        if self._worker:
            self._worker.begin()
        self._environment.records.begin(self.sink.name)
        self._batches.process_redrives()
        self._batch_size.begin(plan)
        ends = {topic: end.offsets for topic, end in plan.shapes.items()}
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
        applied_at = looked_at = self._resumed_at = self._clock.monotonic()
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
                due_at = 0.0 if size >= LEAST else self._next_start(began)
                applied_at = looked_at = self._clock.monotonic()
                is_turn = True
            elif last_ends is not None:
                return self._finish_work()
            elif began - looked_at >= LOOK_S:
                decision = self._look_while_idle(is_log_read=ends is not None)
                looked_at = self._clock.monotonic()
                is_turn = True
            if self._worker and is_turn and isinstance(decision, Continue):
                with self._batches.account.measured("documents"):
                    self._is_working = self._worker.work(self._views.plan.positions)
            is_busy = self._is_working or last_ends is not None or size >= LEAST
            if not is_busy:
                now = self._clock.monotonic()
                if now - applied_at > IDLE_S:
                    pause_s = IDLE_POLL_S - now % IDLE_POLL_S
                else:
                    pause_s = due_at - now if now < due_at else POLL_S
                pause_s = max(LEAST_PAUSE_S, pause_s, look_s / LOOK_SHARE)
                self._clock.wait(self._stopping, min(LOOK_S, pause_s))
        return decision

    def _next_start(self, began: float) -> float:
        """When the next batch may start. Short intervals are multiples of `trigger_s`, half of it from now
        at least: so all sinks with the same interval start at the same time, and can share a job.
        """
        interval_s = self._trigger_s
        if not 0.0 < interval_s <= ALIGNED_S:
            return began + interval_s
        return ceil(began / interval_s + 0.5) * interval_s

    def _see_ends(self) -> Ends | None:
        """Read the topics' ends. None while the broker can't be reached, which is published. Raises
        TopicMissing.
        """
        try:
            shapes = self._views.plan.shapes
            ends = self._environment.ends.read(
                {name: shape.partition_count for name, shape in shapes.items()},
                since=max(self._resumed_at, self._clock.monotonic() - SHARED_S),
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
            decision = self._look_before_batch()
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

    def _look(self, waited_s: float = 0.0) -> Decision:
        return self._views.look(
            self._environment.ends,
            waited_s=waited_s,
            redrive_requested=self._batches.redrive_requested(),
        )

    def _look_before_batch(self) -> Decision:
        """Observe and decide. While a promotion is under way, the batch waits for a time."""
        began = self._clock.monotonic()
        # Looked at before each batch as well, because a busy stream is never idle.
        decision = self._look()
        while isinstance(decision, WaitForPromotion):
            if self._clock.wait(self._stopping, POLL_S):
                return Stop(RunState.STOPPED)
            decision = self._look(waited_s=self._clock.monotonic() - began)
        return decision

    def _look_while_idle(self, *, is_log_read: bool) -> Decision:
        """Observe between batches, and decide. If a server doesn't answer, the next observation
        asks again.

        is_log_read: whether the ends of the tables' topics could be read. If not, that stays
        published: the control topics may be answered all the same.
        """
        try:
            decision = self._look()
        except KafkaForbidden:
            raise
        except CdcError as error:
            self._report_unread(error)
            return Continue()
        if is_log_read:
            self._publish(state=RunState.APPLYING, error=None, hint=None)
        return decision

    def _publish(self, **news: object) -> None:
        account = self._batches.account
        self.progress = self._lag.progress(
            self.progress,
            self._views.plan,
            account.total,
            batches=account.batches,
            tables=account.by_table,
            phases_s=account.seconds,
            retries=dict(self._recovery.retries),
            sent_per_s=self._worker.sent_per_s if self._worker else None,
            **news,
        )


class Recovery:
    """Decides what follows a failure, and waits out one that passes."""

    def __init__(
        self,
        views: SinkViews,
        stopping: threading.Event,
        publish: Callable[..., None],
        clock: Clock,
    ) -> None:
        """`stopping` ends every pause; `publish` takes new fields of the stream's progress."""
        self._views = views
        self._stopping = stopping
        self._publish = publish
        self._clock = clock
        self._patience = Patience()
        self.retries = Counter[str]()
        """Attempts after a failure, of batches and of the stream, by its class of errors."""

    def decide(self, error: Exception) -> Decision:
        """Decide what follows a failure; a transient one is waited out here."""
        failure = explain(error, self._views.sink.name)
        plan = self._views.plan
        switching = False
        if failure is not error:
            failure.__cause__ = error
        if isinstance(failure, Fenced):
            try:
                switching = self._views.is_switching()
            except CdcError as unread:
                # Whether a promotion explains it can't be decided now.
                failure = unread
        reached = tuple(
            sorted(
                (topic, position.offsets if position else ())
                for topic, position in plan.positions.items()
            )
        )
        observed = Observed(
            self._views.control,
            failure=failure,
            tolerable=self._patience.meet(failure, reached),
            switching=switching,
            stopping=self._stopping.is_set(),
        )
        decision = decide(plan, observed)
        if decision == Restart(Reason.FAILURE):
            self._report_waiting(failure, self._patience.count)
            # A failure may come back for days: ten doublings are past the longest pause, a thousand
            # past the largest float.
            doublings = min(self._patience.count - 1, 10)
            pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0**doublings)
            self._clock.wait(self._stopping, pause_s)
        return decision

    def retry_batch(self) -> Retrying:
        """Retry a step after a pause, until the stream is stopped.

        Not once the log may have lost records that the views need, or the sink is paused: a start of
        the stream checks that.
        """
        return Retrying(
            retry=retry_if_exception(lambda error: remedy(error) is Remedy.RETRY),
            wait=wait_exponential(multiplier=FIRST_PAUSE_S, max=LONGEST_PAUSE_S),
            sleep=self._wait,
            stop=stop_when_event_set(self._stopping)
            | (lambda _: self._clock.time() > self._views.plan.sure_until or self._is_paused()),  # type: ignore[operator]
            before_sleep=self._report_attempt,
            reraise=True,
        )

    def _wait(self, seconds: float) -> None:
        self._clock.wait(self._stopping, seconds)

    def _is_paused(self) -> bool:
        """Whether the sink is known to be paused; False while the broker is away."""
        with suppress(CdcError):
            return self._views.read_pause() is not None
        return False

    def _report_attempt(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        if isinstance(error, CdcError) and not isinstance(error, HeldUp):
            self._report_waiting(error, state.attempt_number)

    def _report_waiting(self, error: CdcError, attempt: int) -> None:
        self.retries[type(error).__name__] += 1
        self._publish(state=RunState.RETRYING, error=error.message, hint=error.hint)
        log.warning(
            "sink_waiting", sink=self._views.sink.name, error=error.message, attempt=attempt
        )


class Lag:
    """The lag of one stream; used by the thread that owns it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ends: Ends = {}
        self._looked_at = 0.0
        self._unreached: deque[tuple[float, Ends]] = deque()
        """What was seen of the ends and isn't applied, and when, the oldest first: a stream under a
        steady load never has all, though each change is soon applied.
        """
        self._rows: deque[tuple[float, int]] = deque()

    def begin(self, ends: Ends) -> None:
        """Begin from a plan that has just been loaded; the topics end at `ends`. The longest wait so far
        still counts. Earlier ends don't, because a topic may have been recreated.
        """
        self._ends = ends
        self._looked_at = self._clock.time()
        since = self._unreached[0][0] if self._unreached else self._looked_at
        self._unreached = deque([(since, ends)])

    def see(self, ends: Ends, seen_at: float) -> None:
        """See that the topics ended there at `seen_at`, in Unix seconds. Ends that are seen soon after
        others take their place, and count as seen with them: a wait is never reported too short.
        """
        self._ends = ends
        self._looked_at = seen_at
        if self._unreached:
            first_at, _ = self._unreached[0]
            last_at, last_ends = self._unreached[-1]
            if ends == last_ends:
                return
            # Never those that have waited longest: they would never be reached under a steady load.
            if first_at < last_at and seen_at - last_at < RESOLUTION * (last_at - first_at):
                self._unreached.pop()
                seen_at = last_at
        self._unreached.append((seen_at, ends))

    def progress(self, last: Progress, plan: ResumePlan, applied: Applied, **news: Any) -> Progress:
        """The next snapshot. `lag_records` is 0 only if the views had reached the ends seen
        last; `lag_seconds` goes by when the oldest end was seen that they haven't reached.
        """
        now = self._clock.time()
        remaining = self._remaining(plan, now)
        while self._unreached and not plan.behind(self._unreached[0][1]):
            self._unreached.popleft()
        waiting_s = now - self._unreached[0][0] if self._unreached else 0.0
        measured = {
            "lag_records": remaining,
            "lag_seconds": None if remaining is None else waiting_s,
            "rows_per_s": self._rate(now, applied.rows),
            "applied": replace(applied),
            "aside": dict(plan.blocked),
            "published_at": now,
        }
        return replace(last, **{**measured, **news})

    def _remaining(self, plan: ResumePlan, now: float) -> int | None:
        """Offsets to the ends seen last. There may be more by now, so that 0 is valid for a while
        only.
        """
        offsets = plan.behind(self._ends)
        return offsets if offsets or now - self._looked_at < STALE_S else None

    def _rate(self, now: float, rows: int) -> float:
        self._rows.append((now, rows))
        while len(self._rows) > 2 and self._rows[1][0] < now - WINDOW_S:
            self._rows.popleft()
        start, first_count = self._rows[0]
        end, last_count = self._rows[-1]
        return (last_count - first_count) / (end - start) if end > start else 0.0
