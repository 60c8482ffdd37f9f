"""What a way back needs: the generation beside the live views, kept as current as they are, by the same batches.

In:  the record of builds, where the live views stand. Out: a second sink and where its views stand.
It takes each batch before what readers see, so it is never behind, and `cdc rollback` has nothing to wait for. When it
fails that is logged, and it is left alone: nothing that readers see depends on it.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import structlog

from cdc.change import Advance, Applied, Position, Stored, Table, distance
from cdc.continuity import Discontinued
from cdc.errors import CdcError, Fenced
from cdc.explain import explain
from cdc.failures import Remedy, remedy
from cdc.order import LACKING
from cdc.sink import Batch, Misfit, Refused, Rewound, Sink
from cdc.step import Steps

AGAIN_S = 20.0
"""After how long it is tried again, where the destination was only away: it costs the live views a start."""
log = structlog.get_logger()


class Kept:
    """`at` is where each view of it stands, by topic; empty when there is nothing to keep."""

    def __init__(self, live: Sink) -> None:
        self._live = live
        self._names: Mapping[str, str] = {}
        self._sink: Sink | None = None
        self._again_at = float("inf")
        self.at: dict[str, Position | None] = {}
        self.lost: Discontinued | None = None
        """Why the log can't continue it any more."""

    def begin(self, names: Mapping[str, str]) -> None:
        """Look for the generations of these names, by table; then `find` each of their views."""
        self._names, self.at, self._again_at, self.lost = names, {}, float("inf"), None
        self._sink = self._live.beside(self._names) if self._names else None

    def find(self, table: Table, seen: Stored | None, floor: int, gap: Callable[[Stored | None], object]) -> None:
        """Where the view of a table stands; `seen`: that of the live one. `gap` raises where the log can't go on."""
        name = self._names.get(table.qualified)
        # Just after a switch the record still names what readers see by now.
        if self._sink is None or name is None or (seen and seen.generation == name):
            return
        try:
            stored = self._sink.position(table)
            if stored and stored.floor < floor:
                self._sink.clear(table)
                stored = None
            if stored is None and seen is not None:
                log.warning("standby_lost_rows", sink=self._live.name, table=table.qualified)
                return
            gap(stored)
            self._sink.prepare(table)
            self.at[table.topic] = stored.position if stored else None
        except Discontinued as error:
            self.lost = error
            self.leave(error)
        except Misfit as error:
            # As after a rebuild that gave the view other columns or fields; the other tables' way back stays open.
            log.warning("standby_dropped", sink=self._live.name, table=table.qualified, error=error.message)
        except Exception as error:
            self.leave(self._told(error))

    def outdated(self, names: Mapping[str, str]) -> bool:
        """Whether `begin` with these names would find something else."""
        return names != self._names or time.monotonic() > self._again_at

    def level(self, at: Mapping[str, Position | None]) -> bool:
        """Whether there is something, and none of it behind the live views, which stand at `at`."""
        both = [(there, at.get(topic)) for topic, there in self.at.items()]
        return bool(both) and all(seen is None or distance(there, seen).reached for there, seen in both)

    def apply(self, batch: Batch, steps: Steps) -> Mapping[str, Applied]:
        """Make a batch durable here first, so that this is never behind what readers see, and then in the live views.

        Both read the log once. A row that both refuse is the live views' matter, one that only this refuses ends it.

        Raises:
            CdcError, PySparkException, Py4JJavaError: what the live sink raises, and what a record causes in either.
        """
        shared = batch.changes if self._live.form == "documents" else batch.events
        shared.persist()
        refused: Refused | None = None
        try:
            try:
                self.write(replace(batch, advances=tuple(steps.kept)))
            except Refused as error:
                refused = error
            applied = self._live.apply(batch) if steps.seen else {}
        except Refused as error:
            if refused and not refused.rows.keys() <= error.rows.keys():
                self.leave(refused)
            raise
        finally:
            shared.unpersist()
        if refused:
            self.leave(refused)
        return applied

    def write(self, batch: Batch) -> None:
        """Make a batch durable here alone. Raises only what a record causes, the same perhaps for the live views."""
        if self._sink is None:
            return
        try:
            self._sink.apply(batch)
        except Exception as error:
            told = self._told(error)
            if LACKING in str(error) or remedy(told) is Remedy.QUARANTINE:
                raise
            self.leave(told)

    def advance(self, steps: Sequence[Advance]) -> None:
        for step in steps:
            if step.table.topic in self.at:
                self.at[step.table.topic] = step.until

    def _told(self, error: Exception) -> CdcError:
        """Whatever it is: who removes it for a newer build may do so at any moment."""
        return explain(error, self._live.name)

    def leave(self, error: CdcError) -> None:
        """Apply nothing to it from now on; after what may pass, it is looked for again."""
        # Another process has just shown it to readers, or made something newer: the record will say which.
        if not isinstance(error, Fenced | Rewound):
            log.warning("standby_dropped", sink=self._live.name, error=error.message)
        if remedy(error) in (Remedy.RETRY, Remedy.RESTART):
            self._again_at = time.monotonic() + AGAIN_S
        self._sink, self.at = None, {}
