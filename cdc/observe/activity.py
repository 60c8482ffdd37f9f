"""What runs and commands publish in their topics. Each look reads on from the previous one.

In:  the pipeline, at each look. Out: `Activity`, and the state of a sink by it.
Invariant: reads only. A look costs the records since the one before it, however long runs have been
publishing.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from threading import Lock
from typing import NamedTuple

from cdc.apply.progress import WORKING, Progress, RunState
from cdc.config.settings import Pipeline
from cdc.config.view_settings import STATE
from cdc.errors import ConnectorError
from cdc.generations.registry import GenerationBuild, Generations, Registry
from cdc.kafka.topics import Topics, TopicsPool
from cdc.model.generation import FIRST
from cdc.observe.forecast import catch_up_s
from cdc.observe.run_log import LagSample, RunTopic
from cdc.observe.status import NEVER_RUN, BuildStatus, SinkStatus, ViewStatus


class Activity(NamedTuple):
    """What runs do, as they last published it, their lag of the last day, and what commands have
    registered; by sink.
    """

    progress: Mapping[str, Progress]
    lags: Mapping[str, Sequence[LagSample]]
    generations: Mapping[str, Generations]

    @property
    def sent_per_s(self) -> float | None:
        """Documents that the run sends a second; None while none is at work, or has any to send."""
        progress = self.progress.get(STATE)
        return progress.sent_per_s if progress and progress.state in WORKING else None


class LookConnections:
    """What stays open from look to look. Any thread may use it."""

    def __init__(self) -> None:
        self.topics = TopicsPool()
        self._lock = Lock()
        self._address: tuple[str, str] | None = None
        self._published: tuple[Topics, RunTopic, Registry] | None = None

    def read_activity(self, pipeline: Pipeline) -> Activity:
        """Read what is new. Raises ConnectorError: the broker is away, or the last call hasn't
        ended.
        """
        if not self._lock.acquire(blocking=False):
            raise ConnectorError("The last look at the topic of runs hasn't ended.", hint="wait")
        try:
            address = (pipeline.kafka, pipeline.pipeline)
            if self._published is None or self._address != address:
                # The file names other servers now.
                self._disconnect()
                kafka = Topics(pipeline.kafka)
                self._published = kafka, RunTopic(pipeline, kafka), Registry(pipeline, kafka)
                self._address = address
            kafka, run_topic, registry = self._published
            kafka.require_reachable()
            runs = run_topic.read()
            registry.read()
            generations = {sink: registry.for_sink(sink) for sink in pipeline.sinks}
            return Activity(runs.progress, runs.lags, generations)
        except BaseException:
            self._disconnect()
            raise
        finally:
            self._lock.release()

    def close(self) -> None:
        """Close what nobody uses at this moment. The next look opens it again."""
        self.topics.close()
        if self._lock.acquire(blocking=False):
            self._disconnect()
            self._lock.release()

    def _disconnect(self) -> None:
        if self._published:
            self._published[0].close()
        self._published = None


def describe_sink(
    name: str, activity: Activity | None, views: tuple[ViewStatus, ...]
) -> SinkStatus:
    """Describe a sink by what its run and commands last published, with its views. `activity` is
    None where that couldn't be read.
    """
    if activity is None:
        return SinkStatus(name, views=views)
    registered = activity.generations.get(name) or Generations()
    views = tuple(_with_proof(view, registered) for view in views)
    status = _run_status(name, activity.progress.get(name), views)
    if status.state in WORKING:
        samples = activity.lags.get(name, ())
        status = replace(status, catch_up_s=catch_up_s(samples, views, time.time()))
    status = replace(status, build=_build_status(registered))
    if not (pause := registered.pause):
        return status
    return replace(status, state=RunState.PAUSED, since=pause.since, paused_by=pause.by)


def _with_proof(view: ViewStatus, registered: Generations) -> ViewStatus:
    """Add the proof or the damage of the view's live generation. What was found of another generation
    is ignored.
    """
    proof = registered.proofs.get(view.table)
    damage = registered.damages.get(view.table)
    generation = view.generation or FIRST
    if damage and view.changes is not None and damage.generation == generation:
        return replace(
            view,
            wrong_at=damage.found_at,
            wrong=damage.rows,
            wrong_ids=tuple(damage.ids),
            unrepaired=damage.unrepaired,
        )
    if proof is None or view.changes is None or proof.generation != generation:
        return view
    if view.at is None and any(proof.offsets):
        # The view is lost.
        return view
    return replace(
        view,
        proved_through=proof.through,
        complete_at=proof.complete_at,
        repaired=proof.repaired,
    )


def _build_status(registered: Generations) -> BuildStatus | None:
    work = registered.work
    at_work = registered.in_progress
    if isinstance(work, GenerationBuild):
        return BuildStatus(work.phase, work.done, work.total, at_work)
    return BuildStatus(work.phase, 0, 0, at_work) if work else None


def _run_status(name: str, progress: Progress | None, views: tuple[ViewStatus, ...]) -> SinkStatus:
    """What the run of a sink last published, with its views."""
    if progress is None:
        return SinkStatus(name, NEVER_RUN, views=views)
    return SinkStatus(
        name,
        progress.state,
        progress.state_since,
        progress.error,
        progress.hint,
        progress.rows_per_s if progress.state in WORKING else None,
        views,
        progress.applied,
        progress.aside,
        progress.aside_since,
        progress.looked_s,
        progress.compared_s,
        progress.restarts,
        progress.restarted,
        stands_s(progress, views, time.time()),
        restart_at=progress.restart_at,
    )


def stands_s(progress: Progress, views: Sequence[ViewStatus], now: float) -> float:
    """Return the seconds for which the batch at hand has moved no position, 0 between batches. The
    views of one batch may move one after the other, so that a long batch needn't stand still.
    """
    moved_at = max((view.at for view in views if view.at is not None), default=0.0)
    return max(0.0, min(progress.busy_s, now - moved_at))
