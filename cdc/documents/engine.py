"""Keep documents current: the work of the state's stream apart from its batches.

    load      list the tables that the views of the file need now; become the documents' owner
    recover   mark as dirty all documents that were sent since the state was last noted as current
    release   wait until the state has all that was in the log when it was loaded
    send      find dirty documents, put them together and send them, on an executor
    note      store up to where the documents of a view are current, once none of it is dirty

A state that has lost its last second, with its server, has lost marks as well. The topics may have
documents of rows that the state never meets again, since a log is folded when it is read again. So
all documents in the topics since the last note are marked dirty (recover), and sent when the state
is no older than they are (release). Each turn checks whether the state has gone back. In the same
way, a state that is rebuilt withdraws documents that no longer exist.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple
from uuid import uuid4

import structlog

from cdc.config.settings import Pipeline
from cdc.control.heartbeat import last_heartbeat
from cdc.documents.needs import all_needs, require_room, topic_ids
from cdc.documents.plan import StatePlan, View
from cdc.documents.resolve import Resolution
from cdc.documents.state import State, StateSink, Turn
from cdc.documents.tables import Waiting, waiting
from cdc.documents.tasks import Emission, Report, mark, read_report
from cdc.kafka.log_reader import OffsetRange
from cdc.kafka.log_refusals import missing_topic
from cdc.kafka.topics import Topics
from cdc.model.position import Position, ViewCheckpoint, distance
from cdc.model.table import Table
from cdc.scalar.instants import FIRST
from cdc.sink.contract import positions as checkpoints
from cdc.sink.lane import Failure
from cdc.sink.lane_run import freeze_gc_after, reported_error
from cdc.spark.lane_records import read_on_executors

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HINTS = {
    "fenced": "run one `cdc run` per pipeline; start this one again when the other has ended",
    "unavailable": "it is tried again; is the server of `state` up?",
    "rejected": "repair the server's setting or memory, then start `cdc run` again",
    "oversized": "lower `limit` of the view's lists, or name fewer `columns`; then start `cdc run` again",
    "rekeyed": "end `cdc run`, renew the view's topic with `cdc topics renew --table`, and start it again",
    "gone": "find what deletes records of the view's topic; then end `cdc run`, empty the state's database, and start"
    " it again",
    "rewound": "no action needed: its changes are applied again from where it stands",
}
"""What a person can do about a failure, by its kind."""
TAKE_S = 1.0
"""Seconds between two looks at the heartbeat."""
Positions = Mapping[str, Position | None]
"""By topic; None: offset zero."""
log = structlog.get_logger()
ResolveViews = Callable[[Sequence[Table]], Resolution]
"""Takes the captured tables as they are now."""


class DocumentEngine:
    """The documents of a pipeline, behind the stream of its state, whose thread uses it."""

    def __init__(
        self, spark: "SparkSession", state: StateSink, pipeline: Pipeline, resolve: ResolveViews
    ) -> None:
        self._spark = spark
        self._sink = state
        self._pipeline = pipeline
        self._resolve = resolve
        self._turn = Turn(uuid4().hex, 0)
        self._kafka = Topics(pipeline.kafka)
        self._one_task = spark.sparkContext.parallelize([None], 1)
        self._begin()

    def _begin(self) -> None:
        self._recovered = False
        self._released = False
        self._release: Mapping[str, Position] | None = None
        self._noted: dict[str, Positions] = {}
        """By view, the positions of its tables that its documents were last noted as of."""
        self._noted_clocks: dict[str, int] = {}
        self.sent_per_s: float | None = None
        """Documents a second, from one round's end to the next one's; None while nothing is left to send."""
        self._round_ended: float | None = None
        self._clocks = ViewClocks(self._kafka, self._pipeline, self._state.times_seen)

    def tables(self, captured: Sequence[Table]) -> tuple[Sequence[Table], Waiting]:
        """Return the tables of the state, with the columns in use, for the captured ones as they
        are now; and the views that wait. Called whenever the stream loads its plan, before
        anything else is.

        Raises:
            TopicMissing: the topic of a view isn't there. StateTooLarge: what is to be read won't
            fit; nothing has changed. CdcError: the state can't be reached.
        """
        resolution = self._resolve(captured)
        waits = waiting(resolution.refused)
        plan = StatePlan(resolution.views)
        ids = topic_ids(self._pipeline, plan, self._kafka)
        if missing := [name for name, topic_id in ids.items() if not topic_id]:
            raise missing_topic(self._pipeline.view_topic(min(missing)))
        needed = all_needs(plan, ids)
        with self._failures():
            risk = require_room(self._pipeline, self._sink, plan, needed)
            if risk is not None:
                log.warning("state_may_not_fit", sink=self._sink.name, message=risk.message)
            self._sink.adopt(plan, needed, waits)
        return plan.tables, waits

    def begin(self) -> None:
        """Become the owner of the documents, once a plan is loaded: tasks of another one are refused."""
        self._begin()
        with self._failures():
            self._turn = self._state.take(self._turn.owner)

    def work(self, positions: Positions) -> bool:
        """Send documents for about a second at most; returns whether there are more.

        `positions`: how far the state has got. Called after each batch, and every second while
        there is none.

        Raises:
            CdcError: the state, the broker or another run is in the way.
        """
        with self._failures():
            if not self._recovered:
                self._recover()
            if not self._is_released(positions):
                return False
            clocks = self._read_clocks(positions)
            if clocks is None:
                return False
            is_due = any(self._state.is_due(view, now) for view, now in clocks.items())
            is_noted = self.is_current(positions) and self._noted_clocks == clocks
            if is_noted and self._state.is_clean() and not is_due:
                return False
            self._state.begin_turn(self._turn.next)
            self._turn = self._turn.next
            began = time.monotonic()
            self._state.advance(self._turn, clocks)
            is_idle = self._state.is_clean() and not is_due
            report = Report(done=True) if is_idle else self._run_task(self._emission().run)
            ended = time.monotonic()
            took_s = ended - (self._round_ended or began)
            self.sent_per_s = None if report.done else report.documents / took_s
            self._round_ended = None if report.done else ended
            if report.documents:
                # Also where no table has moved, as by `verify --repair`: the notes contain the ends
                # of the views' topics.
                self._noted = {}
            self._note(positions, clocks, report)
        return not report.done

    def _read_clocks(self, positions: Positions) -> Mapping[str, int] | None:
        """Read the clocks of the views that have one; None while no time counts yet. None is behind the
        state's, which began no earlier than what the topics have of closed windows.
        """
        views = [view for view in self._sink.plan.views if view.has_clock]
        if not views:
            return {}
        topics = [table.topic for table in self._sink.plan.tables]
        clocks = self._clocks.read(views, topics, positions)
        if clocks is None:
            return None
        held = self._state.clocks()
        return {name: max(now, held.get(name, now)) for name, now in clocks.items()}

    def is_current(self, positions: Positions) -> bool:
        return not self._unnoted_views(positions, self._noted_clocks)

    def _unnoted_views(
        self, positions: Positions, clocks: Mapping[str, int]
    ) -> dict[str, Positions]:
        """The positions of the tables of each view that isn't noted as of them, or of its clock."""
        reached = {
            view.name: {topic: positions.get(topic) for topic in view.topics.values()}
            for view in self._sink.plan.views
        }
        return {
            name: own
            for name, own in reached.items()
            if own != self._noted.get(name) or clocks.get(name) != self._noted_clocks.get(name)
        }

    @property
    def _state(self) -> State:
        return self._sink.open_state()

    @property
    def _topics(self) -> dict[str, str]:
        return {view.name: self._pipeline.view_topic(view.name) for view in self._sink.plan.views}

    def _recover(self) -> None:
        """Mark as dirty every document that the topics have received since the last note."""
        topics = self._topics
        sending_once = [view.name for view in self._sink.plan.views if view.sends_once]
        if sending_once:
            # Before the ends are read: no former writer commits a document beyond them.
            self._run_task(self._emission().fence)
        ends = self._kafka.ends(list(topics.values()))
        notes = self._state.current()
        ranges = []
        for name, topic in topics.items():
            end = ends[topic]
            note = notes.get(name, {}).get(topic)
            starts = (0,) * end.partition_count
            if note is not None and distance(note, end).comparable:
                starts = note.position.offsets
            elif name in sending_once:
                # All of its topic is read again, which may be another one than before.
                self._state.forget_digests(self._turn, name)
            for partition, (start, stop) in enumerate(zip(starts, end.offsets, strict=True)):
                if start < stop:
                    ranges.append(OffsetRange(topic, partition, start, stop, end.topic_id))
        views = {topics[view.name]: view for view in self._sink.plan.views}
        marking = partial(mark, self._state, self._turn, views)
        for report in read_on_executors(self._spark, self._pipeline.kafka, ranges, marking):
            read_report(report)
        self._recovered = True

    def _is_released(self, positions: Positions) -> bool:
        """Say whether the state has all that was in the log when it was loaded.

        The connector sends no heartbeat before its snapshot is complete: so the first one proves
        that no row is merely late.
        """
        if self._released:
            return True
        if self._release is None:
            if last_heartbeat(self._kafka, self._pipeline) is None:
                return False
            self._release = self._kafka.ends([table.topic for table in self._sink.plan.tables])
        self._released = all(
            distance(positions.get(topic), end).reached for topic, end in self._release.items()
        )
        return self._released

    def _emission(self) -> Emission:
        return Emission(
            self._sink.plan,
            self._state,
            self._pipeline.kafka,
            self._topics,
            f"{self._pipeline.pipeline}.documents",
            self._turn,
        )

    def _run_task(self, run: Callable[[Iterator[object]], Iterator[Report]]) -> Report:
        # Twice as quick as a DataFrame, which Spark would plan every time: 77 ms instead of 144,
        # and half of the CPU.
        (report,) = self._one_task.mapPartitions(freeze_gc_after(run)).collect()
        return read_report(report)

    def _note(self, positions: Positions, clocks: Mapping[str, int], report: Report) -> None:
        """Note each view whose documents are all sent as current, with the end of its topic. A view
        doesn't wait for others: the task has climbed from all changed rows, and none is applied
        before the next turn, so what isn't dirty by now is as of these positions.

        The topics' ends are read first: what is below them was made of the state before this note,
        so a state that has the note lacks nothing of it. They are the log's ends, since a commit
        returns before readers are shown what it commits. Nothing is noted unless the state has got
        to these positions: it may have gone back since they were written to it. A TRUNCATE has no
        record in the topic, so whoever waits for one compares the floors.
        """
        news = self._unnoted_views(positions, clocks)
        if news and not report.done:
            sizes = self._state.sizes((), list(news))
            clean = {name for name in news if not sizes.pending and not sizes.dirty[name]}
            news = {name: own for name, own in news.items() if name in clean}
        if not news:
            return
        stored = checkpoints(self._sink, self._sink.plan.tables)
        floors = dict[str, int]()
        for table in self._sink.plan.tables:
            checkpoint = stored[table.qualified]
            goal = positions.get(table.topic)
            if goal and not distance(checkpoint, goal).reached:
                raise Failure("rewound", f"The state of {table.qualified} lost its last writes.")
            floors[table.topic] = checkpoint.floor if checkpoint else 0
        topics = self._topics
        ends = self._kafka.log_ends([topics[name] for name in news])
        notes = {
            name: {
                topic: ViewCheckpoint(position, floor=floors.get(topic, 0)) if position else None
                for topic, position in {**own, topics[name]: ends[topics[name]]}.items()
            }
            for name, own in news.items()
        }
        noted_clocks = {name: now for name, now in clocks.items() if name in news}
        self._state.note_current(self._turn, notes, noted_clocks)
        self._noted |= news
        self._noted_clocks |= noted_clocks

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except Failure as failure:
            raise reported_error(
                failure.kind, failure.message, HINTS, sink=self._sink.name
            ) from None


class _Taken(NamedTuple):
    """Times that count once the state has got to some ends.

    committed  of the heartbeat
    seen       of columns, by view
    """

    committed: int
    seen: Mapping[str, int]
    ends: Mapping[str, Position]


class ViewClocks:
    """The clocks of documents: up to when every commit is in the state. Used by the stream's thread.

        commit      the commit time of the connector's newest heartbeat, which comes also while no table
                    changes
        a column    the latest time that any row had there, but never later than `commit`

    Both count in two phases: take the times, and then the ends of the tables' topics. Once the state has
    got to these ends, it has whatever was committed before. So neither an idle table nor a partition that
    is read more slowly makes a clock wrong.

    see     reads the latest times that rows had, as `State.times_seen` does
    """

    def __init__(
        self,
        kafka: Topics,
        pipeline: Pipeline,
        see: Callable[[], Mapping[str, int]],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kafka = kafka
        self._pipeline = pipeline
        self._see = see
        self._monotonic = monotonic
        self._taken: _Taken | None = None
        self._taken_at = float("-inf")
        self._current: _Taken | None = None

    def read(
        self, views: Sequence[View], topics: Sequence[str], positions: Mapping[str, Position | None]
    ) -> Mapping[str, int] | None:
        """Return the times of views in microseconds since 1970, by name; None while none counts yet.
        While no row had a time, it is the first one of the year 1.

        `positions`: how far the state has got with the tables' topics.

        Raises:
            ConnectorError: from the broker. Failure: from the state.
        """
        if self._taken is None and self._monotonic() - self._taken_at >= TAKE_S:
            # The times first: what was committed before the heartbeat is in front of the ends, and so
            # are the rows that had these times.
            beat = last_heartbeat(self._kafka, self._pipeline)
            if beat is not None:
                seen = self._see() if any(view.clock for view in views) else {}
                self._taken = _Taken(beat.committed_ms * 1000, seen, self._kafka.ends(topics))
            self._taken_at = self._monotonic()
        # Also of what was taken just now: while nobody writes, the state has all of it already.
        if self._taken is not None:
            ends = self._taken.ends.items()
            if all(distance(positions.get(topic), end).reached for topic, end in ends):
                self._current = self._taken
                self._taken = None
        if self._current is None:
            return None
        committed, seen, _ = self._current
        return {
            view.name: committed
            if view.clock is None
            else min(seen.get(view.name, FIRST), committed)
            for view in views
        }
