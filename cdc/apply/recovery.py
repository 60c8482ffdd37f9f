"""What follows a failure of a stream: its batch is tried again, it starts again, or it ends.

Used by the thread that owns the stream. Which errors pass is in `cdc.sink.remedy`, what is decided
about the others in `machine`.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from threading import Event

import structlog
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception,
    stop_when_event_set,
)
from tenacity.wait import wait_exponential

from cdc.apply.machine import Decision, Observed, Reason, Restart, decide
from cdc.apply.progress import RunState
from cdc.apply.stream_options import Clock
from cdc.apply.views import Views
from cdc.apply.watch import Watch
from cdc.errors import CdcError, Fenced
from cdc.sink.remedy import Patience, Remedy, remedy
from cdc.spark.failures import explain

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 10.0
"""The first pause after a failure, and the longest."""
log = structlog.get_logger()


class Recovery:
    """Decides what follows a failure, and waits out one that passes."""

    def __init__(
        self,
        views: Views,
        watch: Watch,
        stopping: Event,
        publish: Callable[..., None],
        clock: Clock,
    ) -> None:
        """`stopping` ends every pause; `publish` takes new fields of the stream's progress."""
        self._views, self._watch = views, watch
        self._stopping, self._publish = stopping, publish
        self._clock = clock
        self._patience = Patience()
        self.retries = Counter[str]()
        """Attempts after a failure, of batches and of the stream, by its class of errors."""

    def decide(self, error: Exception) -> Decision:
        """Decide what follows a failure; a transient one is waited out here."""
        failure, plan, switching = explain(error, self._views.sink.name), self._views.plan, False
        if failure is not error:
            failure.__cause__ = error
        if isinstance(failure, Fenced):
            try:
                switching = self._watch.switching(plan)
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
        if isinstance(error, CdcError):
            self._report_waiting(error, state.attempt_number)

    def _report_waiting(self, error: CdcError, attempt: int) -> None:
        self.retries[type(error).__name__] += 1
        self._publish(state=RunState.RETRYING, error=error.message, hint=error.hint)
        log.warning(
            "sink_waiting", sink=self._views.sink.name, error=error.message, attempt=attempt
        )
