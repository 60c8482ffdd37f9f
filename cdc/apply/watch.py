"""What has changed since a plan was loaded: asks the control topics, the registry, the sink and the log. Facts only."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from cdc.apply.machine import Continue, Observed, decide
from cdc.apply.plan import ResumePlan
from cdc.apply.views import Views
from cdc.errors import SinkRejected
from cdc.generations.registry import GenerationBuild, RetainedView
from cdc.kafka.log_continuity import Continuity, Discontinued
from cdc.model.table import Table
from cdc.sink.contract import SchemaMismatch

AGAIN_S = 10.0
"""How often the sink itself is looked at: a table that waits may fit by now, a view may have been lost or cleared."""
LATELY_S = 10.0
"""How long after a switch whoever has kept current what readers see now may still be at it."""


class Watch:
    """Of one sink; used by the thread that owns its stream."""

    def __init__(self, views: Views) -> None:
        self._views = views
        self._looked_at = 0.0
        self._changed_at = -1
        self._retained: Mapping[str, RetainedView] = {}

    def begin(self) -> None:
        """A plan has just been loaded: everything was looked at."""
        beside = self._views.sink_generations
        self._looked_at, self._changed_at, self._retained = time.monotonic(), beside.changed_at, dict(beside.retained)

    def observe(self, plan: ResumePlan, *, waited_s: float = 0.0, quarantine: bool = False) -> Observed:
        """One request for what is cheap; the sink is asked when a command has done something, and every 10 s.

        Raises:
            CdcError: what the broker and, where they are asked, the sink and Postgres raise.
        """
        views = self._views
        ends = views.kafka.ends([*views.control_topics, views.registry.topic], decided=False)
        control = views.read_control(ends)
        if views.registry.has_changed(ends):
            views.registry.read()
        beside, sink = views.sink_generations, views.sink
        level = isinstance(beside.work, GenerationBuild) or sink.is_caught_up
        observed = Observed(
            control,
            standby=beside.standby_names,
            standby_returns=sink.may_retry,
            promoting=not plan.shadow and beside.promotion_in_progress and level,
            waited_s=waited_s,
            now=time.time(),
            quarantine=quarantine,
        )
        if not isinstance(decide(plan, replace(observed, quarantine=False)), Continue):
            return observed
        return replace(observed, **self._look(plan, waited_s))

    def _look(self, plan: ResumePlan, waited_s: float) -> dict[str, Any]:
        """What costs more to ask."""
        changed_at = self._views.sink_generations.changed_at
        overdue = time.monotonic() - self._looked_at >= AGAIN_S
        if not (overdue or waited_s or changed_at != self._changed_at):
            return {}
        facts: dict[str, Any] = {"unblocked": self._unblocked(plan.waiting)}
        try:
            standing = self._views.standing(plan.tables)
            facts["views"] = {table.topic: standing[table.qualified] for table in plan.tables}
        except SchemaMismatch as error:
            # Set aside when the plan is loaded again.
            facts["unheld"] = str(error.details.get("table") or self._views.sink.name)
        if overdue:
            facts["unblocked"] = facts["unblocked"] or self._described(plan.unheld)
            facts["topics"] = self._views.kafka.ends(list(plan.shapes))
            self._looked_at = time.monotonic()
        self._changed_at = changed_at
        return facts

    def switching(self, plan: ResumePlan) -> bool:
        """Whether another writer may have been at the views because readers are being shown another generation."""
        self._views.registry.read()
        beside = self._views.sink_generations
        lately = any(time.time() - retained.at < LATELY_S for retained in beside.retained.values())
        if lately or beside.promotion_in_progress or self._retained != beside.retained:
            return True
        standing = self._views.standing(plan.tables)
        known = ((plan.generations.get(table.topic), standing[table.qualified]) for table in plan.tables)
        return any(generation and stored and stored.generation != generation for generation, stored in known)

    def _unblocked(self, waiting: Sequence[Table]) -> str | None:
        """A table that waited for its topic or its view and can go on by now."""
        if not waiting:
            return None
        views = self._views
        existing = views.kafka.existing(table.topic for table in waiting)
        there = [table for table in waiting if table.topic in existing]
        now = Continuity(views.pipeline, views.kafka).read([table.topic for table in there])
        return next((table.qualified for table in there if self._fits(table, now)), None)

    def _fits(self, table: Table, now: Continuity) -> bool:
        sink = self._views.sink.live
        try:
            now.refuse(sink.name, table, sink.position(table))
            sink.prepare(table)
        except (SinkRejected, Discontinued):
            return False
        return True

    def _described(self, unheld: frozenset[str]) -> str | None:
        """A table that was refused for its columns: they have other names by now, or are left out."""
        if not unheld:
            return None
        views = self._views
        tables, troubled = views.describe(views.control.definitions, views.control.registration)
        candidates = [table for table in tables if table.qualified in unheld - troubled.keys()]
        return next((table.qualified for table in candidates if not views.sink.refusals(table)), None)
