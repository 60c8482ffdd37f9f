"""Observe changes since a plan was loaded: in control topics, registry, sink and log. Decides
nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from cdc.apply.machine import Continue, Observed, decide
from cdc.apply.plan import Ends, ResumePlan
from cdc.apply.stream_options import Clock
from cdc.apply.views import Views
from cdc.errors import SinkRejected
from cdc.generations.registry import GenerationBuild, RetainedView
from cdc.kafka.log_continuity import Continuity
from cdc.kafka.log_ends import LogEnds
from cdc.kafka.log_refusals import Discontinued
from cdc.model.table import Table
from cdc.sink.contract import SchemaMismatch

TOPICS_S = 1.0
"""Seconds between checks that control topics are still the same topics: one that was created again
may have as many records.
"""
RECHECK_S = 10.0
"""Seconds between checks of the sink itself: a waiting table may fit by now, a view may be lost or
cleared.
"""
SETTLING_S = 10.0
"""How long after a promotion the former writer of the promoted generation may still be at work."""


class Watch:
    """The observer of one sink; used by the thread that owns its stream."""

    def __init__(self, views: Views, ends: LogEnds, clock: Clock) -> None:
        self._views = views
        self._clock = clock
        self._ends = ends
        self._control_ends: Ends = {}
        """Where the control topics ended when they were read last, at `_control_read_at`."""
        self._control_read_at = 0.0
        self._looked_at = 0.0
        self._changed_at = -1
        self._retained: Mapping[str, RetainedView] = {}

    def begin(self) -> None:
        """Begin from a plan that has just been loaded, with everything that it depends on."""
        generations = self._views.sink_generations
        self._looked_at = self._clock.monotonic()
        self._changed_at, self._retained = generations.changed_at, dict(generations.retained)

    def observe(
        self, plan: ResumePlan, *, waited_s: float = 0.0, quarantine: bool = False
    ) -> Observed:
        """The facts since the plan was loaded, in one request; the sink is asked after a command,
        and every 10 s.

        Raises:
            CdcError: from the broker and, if they are asked, from the sink and Postgres.
        """
        views = self._views
        topics = [*views.control_topics, views.registry.topic]
        ends = self._ends.read(dict.fromkeys(topics, 1), is_committed=False)
        if (
            ends != self._control_ends
            or self._clock.monotonic() - self._control_read_at >= TOPICS_S
        ):
            self._read_control(topics)
        control = views.control
        generations, sink = views.sink_generations, views.sink
        level = isinstance(generations.work, GenerationBuild) or sink.is_caught_up
        observed = Observed(
            control,
            standby=generations.standby_names,
            standby_returns=sink.may_retry,
            paused=generations.pause is not None,
            promoting=not plan.shadow and generations.promotion_in_progress and level,
            waited_s=waited_s,
            now=self._clock.time(),
            quarantine=quarantine,
        )
        if not isinstance(decide(plan, replace(observed, quarantine=False)), Continue):
            return observed
        return replace(observed, **self._check_sink(plan, waited_s))

    def _read_control(self, topics: Sequence[str]) -> None:
        views = self._views
        began = self._clock.monotonic()
        ends = views.kafka.log_ends(topics)
        views.read_control(ends)
        if views.registry.has_changed(ends):
            views.registry.read()
        self._control_ends = {topic: dict(enumerate(end.offsets)) for topic, end in ends.items()}
        self._control_read_at = began

    def _check_sink(self, plan: ResumePlan, waited_s: float) -> dict[str, Any]:
        """The facts that cost requests to the sink, if they are due."""
        changed_at = self._views.sink_generations.changed_at
        overdue = self._clock.monotonic() - self._looked_at >= RECHECK_S
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
            facts["unblocked"] = facts["unblocked"] or self._redescribed(plan)
            facts["topics"] = self._views.kafka.ends(list(plan.shapes))
            self._looked_at = self._clock.monotonic()
        self._changed_at = changed_at
        return facts

    def switching(self, plan: ResumePlan) -> bool:
        """Whether a promotion may explain another writer at the views: it is under way, or has just
        been.
        """
        self._views.registry.read()
        generations = self._views.sink_generations
        lately = any(
            self._clock.time() - retained.at < SETTLING_S
            for retained in generations.retained.values()
        )
        if lately or generations.promotion_in_progress or self._retained != generations.retained:
            return True
        standing = self._views.standing(plan.tables)
        pairs = (
            (plan.generations.get(table.topic), standing[table.qualified]) for table in plan.tables
        )
        return any(
            generation and stored and stored.generation != generation
            for generation, stored in pairs
        )

    def _unblocked(self, waiting: Sequence[Table]) -> str | None:
        """A table that waited for its topic or its view and can go on now."""
        if not waiting:
            return None
        views = self._views
        existing = views.kafka.existing(table.topic for table in waiting)
        present = [table for table in waiting if table.topic in existing]
        continuity = Continuity(views.pipeline, views.kafka, self._clock.time)
        continuity.read([table.topic for table in present])
        return next(
            (table.qualified for table in present if self._can_resume(table, continuity)), None
        )

    def _can_resume(self, table: Table, continuity: Continuity) -> bool:
        sink = self._views.sink.live
        try:
            stored = sink.position(table)
            self._views.refuse_unfilled(continuity, table, stored)
            continuity.resume(sink.name, table, stored)
            sink.prepare(table)
        except (SinkRejected, Discontinued):
            return False
        return True

    def _redescribed(self, plan: ResumePlan) -> str | None:
        """A table that was refused for its columns and can go on, since they were renamed or
        excluded; or one that has other columns than the plan has.
        """
        if not plan.unheld:
            return None
        views = self._views
        tables, troubled = views.describe(views.control.definitions, views.control.registration)
        # What describes tables may have turned to them: nothing is applied by the plan before.
        if changed := sorted(table.qualified for table in {*plan.tables} - {*tables}):
            return changed[0]
        candidates = [table for table in tables if table.qualified in plan.unheld - troubled.keys()]
        return next(
            (table.qualified for table in candidates if not views.sink.live.refusals(table)), None
        )
