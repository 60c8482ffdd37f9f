"""The standby: the generation kept beside the live views, as current as they are, by the same batches.

It takes each batch before what readers see does, so it is never behind, and `cdc rollback` has nothing to wait for.
When it fails that is logged and it is dropped: nothing that readers see depends on it.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import structlog

from cdc.errors import CdcError, DecodeError, Fenced, SinkRejected, ValueNotRepresentable
from cdc.kafka.log_continuity import Discontinued
from cdc.model.outcome import Advance
from cdc.model.position import Position, ViewCheckpoint, distance
from cdc.model.table import Table
from cdc.sink.contract import Batch, Misfit, Outcome, Refused, Rewound, Sink, positions
from cdc.sink.lane import Entries
from cdc.sink.rejection import Rejected, Skip, Stop
from cdc.sink.remedy import Remedy, remedy
from cdc.spark.failures import explain

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

AGAIN_S = 20.0
"""After how long it is tried again, where the destination was only away: it costs the live views a start."""
log = structlog.get_logger()


class StandbySink(Sink):
    """A live sink and the generation beside it as one; the live sink alone while there is nothing to keep.

    `live_at` and `standby_at` are where the views of each stand, by topic. One thread uses it.
    """

    def __init__(self, live: Sink) -> None:
        self.live, self.name, self.form, self.whole = live, live.name, live.form, live.whole
        self.live_at: dict[str, Position | None] = {}
        self.standby_at: dict[str, Position | None] = {}
        self.lost: Discontinued | None = None
        """Why the log can't continue the standby any more."""
        self._standby: Sink | None = None
        self._retry_at = float("inf")

    def follow(
        self,
        names: Mapping[str, str],
        views: Mapping[Table, ViewCheckpoint | None],
        floor: Callable[[Table], int],
        refuse: Callable[[Table, ViewCheckpoint | None], object],
    ) -> None:
        """Go on from where the live `views` stand, and keep beside them the generations of these names, by table.

        `refuse` raises Discontinued where the log can't continue a view of the standby.
        """
        self.live_at = {table.topic: stored.position if stored else None for table, stored in views.items()}
        self.standby_at, self.lost, self._retry_at = {}, None, float("inf")
        self._standby = self.live.beside(names) if names else None
        # Just after a switch the record still names what readers see by now.
        kept = [table for table, live in views.items() if names.get(table.qualified, _name(live)) != _name(live)]
        if not kept:
            return
        try:
            standing = self._positions(kept)
            for table in kept:
                self._resume(table, standing, views[table], floor(table), refuse)
        except Discontinued as error:
            self.lost = error
            self.drop(error)
        except Exception as error:
            self.drop(explain(error, self.name))

    def _positions(self, tables: Sequence[Table]) -> Mapping[str, ViewCheckpoint | None]:
        try:
            return positions(self._beside, tables)
        except Misfit:
            # Of one table: each is asked alone then.
            return {}

    @property
    def _beside(self) -> Sink:
        assert self._standby is not None
        return self._standby

    def _resume(
        self,
        table: Table,
        standing: Mapping[str, ViewCheckpoint | None],
        live: ViewCheckpoint | None,
        floor: int,
        refuse: Callable[[Table, ViewCheckpoint | None], object],
    ) -> None:
        try:
            name = table.qualified
            stored = standing[name] if name in standing else self._beside.position(table)
            if stored and stored.floor < floor:
                self._beside.clear(table)
                stored = None
            if stored is None and live is not None:
                log.warning("standby_lost_rows", sink=self.name, table=name)
                return
            refuse(table, stored)
            self._beside.prepare(table)
            self.standby_at[table.topic] = stored.position if stored else None
        except Misfit as error:
            # As after a rebuild that gave the view other columns or fields; the other tables' way back stays open.
            log.warning("standby_dropped", sink=self.name, table=table.qualified, error=error.message)

    @property
    def returns(self) -> bool:
        """Whether a standby that was dropped because it was away may be tried again."""
        return time.monotonic() > self._retry_at

    @property
    def level(self) -> bool:
        """Whether there is a standby, and none of it behind the live views."""
        pairs = [(position, self.live_at.get(topic)) for topic, position in self.standby_at.items()]
        return bool(pairs) and all(live is None or distance(standby, live).reached for standby, live in pairs)

    def oldest(self) -> dict[str, Position | None]:
        """By topic, up to where both have everything."""
        return {topic: _older(live, self.standby_at.get(topic, live)) for topic, live in self.live_at.items()}

    def live_position(self, table: Table) -> ViewCheckpoint | None:
        """How far the view has got that readers see."""
        return self.live.position(table)

    def position(self, table: Table) -> ViewCheckpoint | None:
        """How far both have got."""
        stored = self.live.position(table)
        if stored is None or table.topic not in self.standby_at:
            return stored
        older = _older(stored.position, self.standby_at[table.topic])
        return replace(stored, position=older) if older else None

    def apply(self, batch: Batch) -> Outcome:
        """Make a batch durable in the standby first, so that it is never behind what readers see, and then live.

        Each goes from its own position. The standby passes no record that it rejects, until it is known that the live
        views reject it as well: one that only the standby rejects ends it.

        Raises:
            CdcError, PySparkException, Py4JJavaError: what the live sink raises.
        """
        steps = _from(batch.advances, self.standby_at) if self._standby else []
        rejection = self._write(replace(batch, advances=tuple(steps), rejection=Stop())) if steps else None
        outcome = self._apply_live(batch)
        if rejection and (outcome.rejected or any(batch.entries.values())):
            self.write(replace(batch, advances=tuple(_from(batch.advances, self.standby_at))), outcome)
        elif rejection:
            self.drop(rejection)
        return outcome

    def _apply_live(self, batch: Batch) -> Outcome:
        started = {step.table.topic: step.start for step in batch.advances}
        steps = _from(batch.advances, {**started, **self.live_at})
        outcome = self.live.apply(replace(batch, advances=tuple(steps))) if steps else Outcome()
        self.live_at |= {step.table.topic: step.end for step in steps}
        return outcome

    def write(self, batch: Batch, live: Outcome) -> None:
        """Make a batch durable in the standby alone; live: what became of it in the live views.

        A failure ends the standby, and so does a record that the live views have not rejected.
        """
        if self._standby is None:
            return
        try:
            outcome = self._standby.apply(replace(batch, rejection=Skip()))
        except Exception as error:
            self.drop(explain(error, self.name))
            return
        self.standby_at |= {step.table.topic: step.end for step in batch.advances}
        if alone := _rejected_alone(outcome, live, batch.entries):
            self.drop(Refused({(one.topic, one.id or ""): one.reason for one in alone}, self.name))
        elif not (outcome.complete and live.complete):
            self.drop(
                SinkRejected(
                    f"So many records of {self.name} are rejected that its generations can't be compared.",
                    hint="nothing to do: readers see what they saw; a new generation is made by: cdc -p FILE rebuild",
                )
            )

    def _write(self, batch: Batch) -> CdcError | None:
        """Make a batch durable in the standby, up to a record that it rejects: that is the answer."""
        assert self._standby is not None
        try:
            self._standby.apply(batch)
        except (DecodeError, ValueNotRepresentable, Refused) as rejection:
            return rejection
        except Exception as error:
            self.drop(explain(error, self.name))
            return None
        self.standby_at |= {step.table.topic: step.end for step in batch.advances}
        return None

    def drop(self, error: CdcError) -> None:
        """Apply nothing to the standby from now on; after what may pass, it is looked for again."""
        # Another process has just shown it to readers, or made something newer: the registry will say which.
        if not isinstance(error, Fenced | Rewound):
            log.warning("standby_dropped", sink=self.name, error=error.message)
        if remedy(error) in (Remedy.RETRY, Remedy.RESTART):
            self._retry_at = time.monotonic() + AGAIN_S
        self._standby, self.standby_at = None, {}

    def refusals(self, table: Table) -> list[str]:
        return self.live.refusals(table)

    def prepare(self, table: Table) -> None:
        self.live.prepare(table)

    def clear(self, table: Table) -> None:
        self.live.clear(table)

    def scan(self, table: Table, spark: "SparkSession", ids: Sequence[str] | None = None) -> "DataFrame":
        return self.live.scan(table, spark, ids)

    def close(self) -> None:
        self.live.close()

    def beside(self, names: Mapping[str, str]) -> Sink:
        return self.live.beside(names)

    def require_room(self, tables: Sequence[Table]) -> None:
        self.live.require_room(tables)

    def promote(self, tables: Sequence[Table], names: Mapping[str, str]) -> Mapping[str, str]:
        return self.live.promote(tables, names)

    def generations(self, table: Table) -> list[str]:
        return self.live.generations(table)

    def sweep(self, tables: Sequence[Table], keep: Mapping[str, str]) -> None:
        self.live.sweep(tables, keep)


def _rejected_alone(standby: Outcome, live: Outcome, entries: Entries) -> list[Rejected]:
    """What only the standby lacks: neither what both reject, now or earlier, nor what was made up for since."""
    places = {(one.topic, one.partition, one.offset) for one in live.rejected}
    return [
        one
        for one in standby.rejected
        if (one.topic, one.partition, one.offset) not in places
        and one.offset not in entries.get((one.topic, one.partition), ())
        and one.offset >= standby.cured.get((one.topic, one.id or ""), 0)
    ]


def _name(stored: ViewCheckpoint | None) -> str | None:
    return stored.generation if stored else None


def _older(live: Position | None, standby: Position | None) -> Position | None:
    """Up to where both have everything of a topic; None where one begins from nothing."""
    if live is None or standby is None:
        return None
    return Position(live.topic_id, tuple(map(min, live.offsets, standby.offsets)))


def _from(advances: Sequence[Advance], standing: Mapping[str, Position | None]) -> list[Advance]:
    """The same steps from where these views stand; without those of which they lack nothing, or are no views of."""
    steps = []
    for step in advances:
        if step.table.topic not in standing:
            continue
        position = standing[step.table.topic]
        start = position.offsets if position else (0,) * step.end.partition_count
        until = Position(step.end.topic_id, tuple(map(max, start, step.end.offsets)))
        if step.is_repair or until != position:
            steps.append(replace(step, start=position, end=position or until if step.is_repair else until))
    return steps
