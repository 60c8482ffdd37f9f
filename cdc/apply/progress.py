"""The progress of a sink's stream as its owner publishes it: an immutable snapshot that any thread
may read; and the account that a stream keeps for it.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import Literal

from cdc.model.outcome import Applied


class RunState(StrEnum):
    """The states of a stream; the words are those that `cdc status` prints."""

    LOADING = "starting"
    APPLYING = "running"
    RETRYING = "waiting"
    PAUSED = "paused"
    STOPPED = "stopped"
    CAUGHT_UP = "caught up"
    FAILED = "failed"
    NOT_RUNNING = "not running"
    """A run that has died without publishing an end; never published."""


WORKING = (RunState.LOADING, RunState.APPLYING, RunState.RETRYING)
LIVING = (*WORKING, RunState.PAUSED)
"""States of a stream whose run lives."""


@dataclass(frozen=True)
class Progress:
    """What a sink has done since `cdc run` started, as of `published_at`, in Unix seconds."""

    sink: str
    state: RunState = RunState.LOADING
    applied: Applied = field(default_factory=Applied)
    rows_per_s: float = 0.0
    sent_per_s: float | None = None
    """Documents a second; None while there is none to send."""
    lag_records: int | None = None
    """Records that remain, at least; None: unknown, because the topics' ends aren't known or are
    too old.
    """
    lag_seconds: float | None = None
    """For how long records have remained, at least; None as above."""
    looked_s: float = 0.0
    """Seconds since lag was measured, while no batch is at hand; long if the sink doesn't answer."""
    busy_s: float = 0.0
    """Seconds since the batch at hand, or its last attempt, began; 0 between batches."""
    compared_s: float | None = None
    """Seconds since its run compared table definitions; None if unknown."""
    batches: int = 0
    tables: Mapping[str, Applied] = field(default_factory=dict)
    """The same as `applied` by table, for as many as `Account` counts apart."""
    phases_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds since the run began by phase of a batch, see `Phase`."""
    aside: dict[str, list[str]] = field(default_factory=dict)
    """Tables that wait for a command, by name: the problem, and the hint."""
    error: str | None = None
    hint: str | None = None
    state_since: float | None = None
    """When the stream came into its state, in Unix seconds."""
    aside_since: Mapping[str, float] = field(default_factory=dict)
    """When this run first saw that a table waits, by name, in Unix seconds."""
    since: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    restarts: Mapping[str, int] = field(default_factory=dict)
    """Restarts by reason, see `cdc.apply.machine.Reason`."""
    retries: Mapping[str, int] = field(default_factory=dict)
    """Attempts after a failure, by its class of errors."""
    restarted: str | None = None
    """The reason of the last restart, with its table."""
    restart_at: float | None = None
    """When the stream, which has failed, starts again by itself, in Unix seconds."""
    published_at: float = field(default_factory=time.time)
    busy: bool = False
    """A batch is at hand: no snapshot is published until it ends."""

    def aged(self, now: float) -> "Progress":
        """The snapshot as of `now`: a stream that is behind stays so, and its silence counts."""
        age_s = max(0.0, now - self.published_at)
        behind = self.lag_records and self.lag_seconds is not None
        return replace(
            self,
            looked_s=0.0 if self.busy or self.state not in WORKING else round(age_s, 1),
            busy_s=round(age_s, 1) if self.busy and self.state in WORKING else 0.0,
            lag_seconds=self.lag_seconds + age_s
            if behind and self.lag_seconds is not None
            else self.lag_seconds,
        )


Phase = Literal["observe", "apply", "settle", "documents"]
"""The phases of a batch's time: checking the control topics before it; the sink's job, which reads,
decodes and writes; the quarantine after it; documents between batches.
"""
TABLES = 50
OTHERS = "other"
"""Most tables with numbers of their own, and the name under which the others are counted. Tables'
names have a dot.
"""


class Account:
    """Counts what a stream does since its run began: records in all and by table, batches, and
    seconds by phase. One thread writes; what it returns may be read by any.

    Bounded, whatever the number of tables: the first ones that change have numbers of their own for
    as long as the run lasts, and all others share one. So a number never goes down, as counters must
    not.
    """

    def __init__(self) -> None:
        self.total = Applied()
        self.batches = 0
        self._tables: dict[str, Applied] = {}
        self._seconds: dict[str, float] = {}

    def count(self, table: str, applied: Applied) -> None:
        """Count what became of a table's records in a batch. A batch without any is no change."""
        if not applied.read:
            return
        self.total.add(applied)
        name = (
            table
            if table in self._tables or len(self._tables.keys() - {OTHERS}) < TABLES
            else OTHERS
        )
        self._tables.setdefault(name, Applied()).add(applied)

    @contextmanager
    def measured(self, phase: Phase) -> Iterator[None]:
        """Count the time that the block takes, whether or not it fails."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.monotonic() - began

    @property
    def by_table(self) -> Mapping[str, Applied]:
        return {name: replace(count) for name, count in self._tables.items()}

    @property
    def seconds(self) -> Mapping[str, float]:
        return dict(self._seconds)
