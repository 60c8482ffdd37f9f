"""The standby: the previous generation of the views, current through every batch.

It receives each batch before the live views do.

So it is never behind, and `cdc rollback` never waits. A standby that fails is dropped, and the
failure is logged: nothing that readers see depends on it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import structlog

from cdc.errors import CdcError, DecodeError, Fenced, HeldUp, SinkRejected, ValueNotRepresentable
from cdc.kafka.log_refusals import Discontinued
from cdc.model.clock import Clock
from cdc.model.outcome import Advance
from cdc.model.position import Position, ViewCheckpoint, distance
from cdc.model.table import Table
from cdc.sink.contract import (
    Applier,
    Batch,
    Outcome,
    PositionLost,
    RowsRejected,
    SchemaMismatch,
    Sink,
    positions,
    require_same_shape,
)
from cdc.sink.lane import Entries
from cdc.sink.rejection import Rejected, Skip, Stop
from cdc.sink.remedy import Remedy, remedy
from cdc.spark.failures import explain

RETRY_S = 20.0
"""Seconds until a standby is resumed whose destination was only away. Resuming restarts the live
views' stream."""
log = structlog.get_logger()


class StandbySink:
    """A live sink and its standby, which take each batch one after the other; the live sink alone
    while there is no standby.

    `live_at` and `standby_at` are the positions of the views of each, by topic. One thread uses it.
    """

    def __init__(self, live: Applier, clock: Clock | None = None) -> None:
        self._clock = clock or Clock()
        self.live = live
        self.name = live.name
        self.live_at: dict[str, Position | None] = {}
        self.standby_at: dict[str, Position | None] = {}
        self._standby: Sink | None = None
        self._retry_at = float("inf")

    def resume(
        self,
        names: Mapping[str, str],
        views: Mapping[Table, ViewCheckpoint | None],
        floor: Callable[[Table], int],
        refuse: Callable[[Table, ViewCheckpoint | None], object],
    ) -> None:
        """Resume from the positions of the live `views`, with a standby of these names, by table.

        `refuse` raises Discontinued where the log can't continue a view of the standby. So does this
        method then, and the live views go on alone.
        """
        self.live_at = {
            table.topic: checkpoint.position if checkpoint else None
            for table, checkpoint in views.items()
        }
        self.standby_at = {}
        self._standby = None
        self._retry_at = float("inf")
        # Right after a promotion the registry still lists the generation that has just become live;
        # skip it.
        standby_tables = [
            table for table, live in views.items() if _is_standby(names.get(table.qualified), live)
        ]
        if not standby_tables or not isinstance(self.live, Sink):
            return
        self._standby = standby = self.live.for_generation(names)
        try:
            try:
                checkpoints = positions(standby, standby_tables)
            except SchemaMismatch:
                # Of a single table: each is read by itself.
                checkpoints = {}
            for table in standby_tables:
                self._resume_table(standby, table, checkpoints, views[table], floor(table), refuse)
        except Discontinued as error:
            self.drop(error)
            raise
        except Exception as error:
            self.drop(explain(error, self.name))

    def _resume_table(
        self,
        standby: Sink,
        table: Table,
        checkpoints: Mapping[str, ViewCheckpoint | None],
        live: ViewCheckpoint | None,
        floor: int,
        refuse: Callable[[Table, ViewCheckpoint | None], object],
    ) -> None:
        try:
            name = table.qualified
            checkpoint = checkpoints[name] if name in checkpoints else standby.position(table)
            if checkpoint and checkpoint.floor < floor:
                standby.clear(table)
                checkpoint = None
            if checkpoint is None and live is not None:
                log.warning("standby_lost_rows", sink=self.name, table=name)
                return
            if checkpoint is None:
                # Rows without a position are of a first batch that was cut: no record would remove them.
                standby.clear(table)
            refuse(table, checkpoint)
            require_same_shape(table, self.name, checkpoint)
            standby.prepare(table)
            self.standby_at[table.topic] = checkpoint.position if checkpoint else None
        except SchemaMismatch as error:
            # After a rebuild with other columns, say. The standby of the other tables goes on.
            log.warning(
                "standby_dropped", sink=self.name, table=table.qualified, error=error.message
            )

    @property
    def may_retry(self) -> bool:
        """Whether a standby that was dropped because its destination was away may be resumed."""
        return self._clock.monotonic() > self._retry_at

    @property
    def is_caught_up(self) -> bool:
        """Whether there is a standby and none of its views is behind the live one."""
        pairs = [(position, self.live_at.get(topic)) for topic, position in self.standby_at.items()]
        return bool(pairs) and all(
            live is None or distance(standby, live).reached for standby, live in pairs
        )

    def oldest_positions(self) -> dict[str, Position | None]:
        """Return the older position of both generations, by topic. Both have everything below."""
        return {
            topic: _older_position(live, self.standby_at.get(topic, live))
            for topic, live in self.live_at.items()
        }

    def apply(self, batch: Batch) -> Outcome:
        """Make a batch durable in the standby first, then in the live views.

        So the standby is never behind.

        Each goes from its own position. The standby stops at a record that it rejects, until the
        live views turn out to reject it as well. A record that only the standby rejects drops the
        standby.

        Raises:
            CdcError, PySparkException, Py4JJavaError: what the live sink raises.
        """
        steps = _advances_from(batch.advances, self.standby_at) if self._standby else []
        rejection = (
            self._apply_to_standby(replace(batch, advances=tuple(steps), rejection=Stop()))
            if steps
            else None
        )
        outcome = self._apply_live(batch)
        if rejection and (outcome.rejected or any(batch.entries.values())):
            remaining = _advances_from(batch.advances, self.standby_at)
            self.write_standby(replace(batch, advances=tuple(remaining)), outcome)
        elif rejection:
            self.drop(rejection)
        return outcome

    def _apply_live(self, batch: Batch) -> Outcome:
        started = {step.table.topic: step.start for step in batch.advances}
        steps = _advances_from(batch.advances, {**started, **self.live_at})
        outcome = self.live.apply(replace(batch, advances=tuple(steps))) if steps else Outcome()
        self.live_at |= {step.table.topic: step.end for step in steps}
        return outcome

    def write_standby(self, batch: Batch, live: Outcome) -> None:
        """Make a batch durable in the standby alone.

        `live`: the outcome of the batch in the live views.

        A failure drops the standby, and so does a rejected record that the live views have not
        rejected.
        """
        if self._standby is None:
            return
        try:
            outcome = self._standby.apply(replace(batch, rejection=Skip()))
        except HeldUp:
            raise
        except Exception as error:
            self.drop(explain(error, self.name))
            return
        self.standby_at |= {step.table.topic: step.end for step in batch.advances}
        if unmatched := _rejected_by_standby_only(outcome, live, batch.entries):
            reasons = {
                (rejected.topic, rejected.id or ""): rejected.reason for rejected in unmatched
            }
            self.drop(RowsRejected(reasons, self.name))
        elif not (outcome.complete and live.complete):
            self.drop(
                SinkRejected(
                    f"So many records of {self.name} are rejected that its generations can't be compared.",
                    hint="no action needed: readers see what they saw. To build a new generation: cdc -p FILE rebuild",
                )
            )

    def _apply_to_standby(self, batch: Batch) -> CdcError | None:
        """Make a batch durable in the standby, up to a record that it rejects.

        Returns that rejection.
        """
        assert self._standby is not None
        try:
            self._standby.apply(batch)
        except (DecodeError, ValueNotRepresentable, RowsRejected) as rejection:
            return rejection
        except HeldUp:
            raise
        except Exception as error:
            self.drop(explain(error, self.name))
            return None
        self.standby_at |= {step.table.topic: step.end for step in batch.advances}
        return None

    def drop(self, error: CdcError) -> None:
        """Stop applying to the standby.

        After an error that may pass it is resumed later: see `may_retry`.
        """
        # Another process has promoted the standby, or built a newer generation: the registry will
        # say which.
        if not isinstance(error, Fenced | PositionLost):
            log.warning("standby_dropped", sink=self.name, error=error.message)
        if remedy(error) in (Remedy.RETRY, Remedy.RESTART):
            self._retry_at = self._clock.monotonic() + RETRY_S
        self._standby = None
        self.standby_at = {}


def _rejected_by_standby_only(standby: Outcome, live: Outcome, entries: Entries) -> list[Rejected]:
    """Select records that only the standby rejects.

    Leaves out those that the live views reject, now or earlier, and those that are cured since.
    """
    live_places = {
        (rejected.topic, rejected.partition, rejected.offset) for rejected in live.rejected
    }
    return [
        rejected
        for rejected in standby.rejected
        if (rejected.topic, rejected.partition, rejected.offset) not in live_places
        and rejected.offset not in entries.get((rejected.topic, rejected.partition), ())
        and rejected.offset >= standby.cured.get((rejected.topic, rejected.id or ""), 0)
    ]


def _is_standby(name: str | None, live: ViewCheckpoint | None) -> bool:
    live_name = live.generation if live else None
    return name is not None and name != live_name


def _older_position(live: Position | None, standby: Position | None) -> Position | None:
    """Return the older of two positions of a topic. None: one generation begins from nothing."""
    if live is None or standby is None:
        return None
    return Position(live.topic_id, tuple(map(min, live.offsets, standby.offsets)))


def _advances_from(
    advances: Sequence[Advance], positions_by_topic: Mapping[str, Position | None]
) -> list[Advance]:
    """Start the advances from these positions.

    Leaves out tables without a view here, and views that lack nothing.
    """
    steps = []
    for step in advances:
        if step.table.topic not in positions_by_topic:
            continue
        position = positions_by_topic[step.table.topic]
        start = position.offsets if position else (0,) * step.end.partition_count
        goal = Position(step.end.topic_id, tuple(map(max, start, step.end.offsets)))
        if step.is_repair or goal != position:
            steps.append(
                replace(step, start=position, end=position or goal if step.is_repair else goal)
            )
    return steps
