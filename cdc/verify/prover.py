"""The continuous proof of `cdc run`: the rows that have changed are compared soon after they have settled.

In:  views that are proved through some moment. Out: later moments, in the registry; rows that differ.
Invariant: only `TableVerification` says that a row is wrong. A turn only says which rows to ask it for.

    1. read Postgres' clock; place a barrier behind that moment; wait for the views that pass it soon
    2. compare the rows with a record between the last turn's barrier and this one, in one task of one
       job (`changed_rows`)
    3. judge the rows that differ (`turns`)

The pause after a turn is as long as the turn's CPU may take by the file's `proof.percent`.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from threading import Event
from typing import TYPE_CHECKING, NamedTuple

import structlog

from cdc.config.settings import Pipeline
from cdc.control.control_topics import Truncations
from cdc.control.repetition import repeating
from cdc.errors import CdcError, ConnectorError, Interrupted, SinkRejected, SinkUnavailable
from cdc.generations.registry import Damage, Proof, Registry
from cdc.kafka.log_reader import OffsetRange
from cdc.kafka.topics import Topics
from cdc.model.generation import FIRST
from cdc.model.position import Position, ViewCheckpoint, distance
from cdc.model.table import Table
from cdc.postgres.table_survey import tables_in
from cdc.sink.contract import ReadRows, RowReader, Sink, positions
from cdc.sink.factory import open_clocks
from cdc.verify.barrier import Barrier, WaitOptions, passed_views, place_barrier, read_time_ms
from cdc.verify.changed_rows import ChangedAnswer, ChangedTable, ChangedView, compare_changed
from cdc.verify.comparison import Options, View
from cdc.verify.proof import damage_of
from cdc.verify.source_rows import clock_setting
from cdc.verify.turns import Moment, ProvedView, begin, judge, range_end
from cdc.verify.verification import TableVerification

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LEAST_PAUSE_S = 5.0
RECORDS_PER_S = 10.0
"""Proofs written to the registry per second on average. All who look at the pipeline read them."""
MARK_S = 20.0
"""The longest wait for a heartbeat."""
PASS_S = 30.0
"""The longest wait for views to pass a barrier. One that was late the last time isn't waited for."""
TURN_OFFSETS = 20_000
"""Offsets of a table that a turn takes at most: their ids are in a task's memory."""
BEHIND_OFFSETS = 1_000_000
"""So far behind, comparing all rows is faster."""
CONFIRM_S = 120.0
JOB_S = 0.035
"""CPU that a job takes in Spark, whatever it does: see `cdc.spark.lane_records`."""
EVERY_S = 1.0
"""Seconds between two looks whether the time of a turn has come."""
POOL = "cdc-proof"
"""The scheduler's pool of its jobs, and their tag."""
log = structlog.get_logger()


class Proving(NamedTuple):
    """What is proved: the tables as Postgres describes them now, in sinks of the prover's own."""

    pipeline: Pipeline
    tables: Sequence[Table]
    sinks: Sequence[Sink]


class Marked(NamedTuple):
    """A table with a barrier that some of its views have passed."""

    table: Table
    barrier: Barrier
    passed: frozenset[View]
    now: int | None


@contextmanager
def proving(
    spark: "SparkSession", load: Callable[[], Pipeline], describe: Callable[[], Proving]
) -> Iterator[None]:
    """Prove views in a separate thread until the block ends. A failure ends no stream: it is logged, and
    the next turn begins with the same rows.

    `load` reads the pipeline file. `describe` is called again when that, a table or the registration has
    changed.
    """
    stopping = Event()
    prover = Prover(spark, load, describe, stopping)

    def report(failure: CdcError) -> None:
        if not stopping.is_set():
            log.warning("proof_failed", error=failure.message, hint=failure.hint)

    with repeating(prover.turn, EVERY_S, subject="the proof", report=report, close=prover.close):
        try:
            yield
        finally:
            stopping.set()
            spark.sparkContext.cancelJobsWithTag(POOL)


class Log:
    """What stays open from turn to turn: each reads on where the last one has ended."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.kafka = Topics(pipeline.kafka)
        self.registry = Registry(pipeline, self.kafka)
        self.truncations = Truncations(pipeline, self.kafka)


class Prover:
    """Takes the turns. One thread uses it."""

    def __init__(
        self,
        spark: "SparkSession",
        load: Callable[[], Pipeline],
        describe: Callable[[], Proving],
        stopping: Event,
    ) -> None:
        self._spark = spark
        self._load = load
        self._describe = describe
        self._stopping = stopping
        self._log: Log | None = None
        self._views: dict[View, ProvedView] = {}
        self._late: frozenset[View] = frozenset()
        """Views that had not passed the last barrier in time."""
        self._clocks: dict[str, int] = {}
        """By view: the time of its documents in the last turn, which the next barrier has to be behind."""
        self._resume_at = 0.0
        self._seen: object = None
        self._proving: Proving | None = None
        self._unread: dict[View, str] = {}

    def turn(self) -> None:
        """Take a turn, if its time has come.

        Raises:
            CdcError: a server can't be read.
        """
        if time.monotonic() < self._resume_at:
            return
        self._resume_at = time.monotonic() + LEAST_PAUSE_S
        began_s = time.thread_time()
        context = self._spark.sparkContext
        context.setLocalProperty("spark.scheduler.pool", POOL)
        context.addJobTag(POOL)
        pipeline = self._load()
        if not pipeline.proof.percent:
            return
        try:
            cpu_s = self._take(pipeline)
        except CdcError:
            self.close()
            raise
        cpu_s += time.thread_time() - began_s
        pause_s = max(
            LEAST_PAUSE_S, len(self._views) / RECORDS_PER_S, cpu_s * 100 / pipeline.proof.percent
        )
        self._resume_at = time.monotonic() + pause_s

    def close(self) -> None:
        if self._log:
            self._log.kafka.close()
        self._log = None

    def _take(self, file: Pipeline) -> float:
        """Take a turn. Returns the seconds of CPU that its job has taken."""
        if self._log is None:
            self._log = Log(file)
        kafka = self._log.kafka
        registry = self._log.registry.read()
        if not any(registry.for_sink(name).proofs for name in file.sinks):
            return 0.0
        proving = self._described(file, self._log)
        pipeline = proving.pipeline
        now_ms = read_time_ms(pipeline)
        tables = tables_in([sink.name for sink in proving.sinks], proving.tables)
        self._follow(registry, tables, proving.sinks, now_ms / 1000, pipeline)
        marked = list(self._mark(proving, kafka, tables, now_ms))
        busy: list[ChangedTable] = []
        ends: dict[View, Position] = {}
        answers: list[ChangedAnswer] = []
        for mark in marked:
            for changed, end in self._parts(mark, proving.sinks):
                name = changed.table.qualified
                ends |= {(view.sink, name): end for view in changed.views}
                if changed.ranges or any(view.suspects for view in changed.views):
                    busy.append(changed)
                else:
                    answers += [ChangedAnswer(view.sink, name) for view in changed.views]
        cpu_s = 0.0
        if busy:
            dsn = pipeline.source.reader_dsn
            compared, cpu_s = compare_changed(self._spark, pipeline.kafka, dsn, busy)
            answers += compared
            cpu_s += JOB_S
        self._clocks = {mark.table.name: mark.now for mark in marked if mark.now is not None}
        by_view = {(answer.sink, answer.table): answer for answer in answers}
        self._judge(proving, self._log, marked, by_view, ends, now_ms / 1000)
        return cpu_s

    def _described(self, file: Pipeline, log_read: Log) -> Proving:
        """The tables; described again, and proved anew, once anything about them has changed."""
        ends = log_read.kafka.log_ends([file.topic("cdc.ddl"), file.registered_topic])
        seen = (file, ends)
        if self._proving is None or seen != self._seen:
            former = (
                {table.qualified: table for table in self._proving.tables} if self._proving else {}
            )
            self._proving = self._describe()
            changed = {
                table.qualified
                for table in self._proving.tables
                if former.get(table.qualified, table) != table
            }
            self._seen = seen
            if changed:
                log.info("proof_begins_again", tables=sorted(changed))
                sinks = self._proving.sinks
                self._withdraw([(sink.name, name) for sink in sinks for name in changed])
        return self._proving

    def _withdraw(self, views: Sequence[View]) -> None:
        assert self._log
        for view in views:
            self._views.pop(view, None)
        if views:
            self._log.registry.write(*((("proof", *view), None) for view in views))

    def _follow(
        self,
        registry: Registry,
        tables: Sequence[Table],
        sinks: Sequence[Sink],
        now: float,
        pipeline: Pipeline,
    ) -> None:
        """Follow the proofs in the registry: a view that has none isn't proved by changed rows alone."""
        keeps_deletes_s = pipeline.delete_retention_hours * 3600
        followed: dict[View, ProvedView] = {}
        for table in tables:
            for sink in sinks:
                if not table.is_in(sink.name) or not isinstance(sink, RowReader):
                    continue
                view = (sink.name, table.qualified)
                proof = registry.for_sink(sink.name).proofs.get(table.qualified)
                if proof is None or now - proof.through > keeps_deletes_s / 2:
                    continue
                known = self._views.get(view)
                if (
                    known is None
                    or known.generation != proof.generation
                    or known.proved.at < proof.through
                ):
                    passed = Position(proof.topic_id, tuple(proof.offsets))
                    known = begin(proof.generation, Moment(proof.through, passed))
                followed[view] = known
        self._views = followed

    def _mark(
        self, proving: Proving, kafka: Topics, tables: Sequence[Table], now_ms: float
    ) -> Iterator[Marked]:
        """Place a barrier for the tables, and another one for documents, which may stand still by
        themselves. Yields the tables with the views that have passed it.
        """
        late: set[View] = set()
        known = {name for _, name in self._views}
        proved = [table for table in tables if table.qualified in known]
        captured = [table for table in proved if not table.derivation]
        derived = [table for table in proved if table.derivation]
        wait = WaitOptions(MARK_S, report=self._go_on)
        clocks = open_clocks(proving.pipeline)().read if derived else {}
        for group in (captured, derived):
            if not group:
                continue
            floor = {name: now for name, now in self._clocks.items() if name in clocks}
            try:
                barrier = place_barrier(
                    proving.pipeline, kafka, group, now_ms, wait, floor if group is derived else {}
                )
            except ConnectorError:
                if group is captured:
                    raise
                continue
            passed = passed_views(barrier, group, proving.sinks, PASS_S, self._late, self._stopping)
            names = {table.qualified for table in group}
            late |= {view for view in self._views if view[1] in names and view not in passed}
            for table in group:
                needs_clock = table.derivation is not None and table.derivation.clock is not None
                if needs_clock and table.name not in clocks:
                    continue
                own = frozenset(
                    view for view in passed if view[1] == table.qualified and view in self._views
                )
                yield Marked(table, barrier, own, clocks[table.name] if needs_clock else None)
        self._late = frozenset(late)

    def _go_on(self, _: str) -> None:
        if self._stopping.is_set():
            raise Interrupted("The run ends.", hint="no action needed")

    def _parts(
        self, mark: Marked, sinks: Sequence[Sink]
    ) -> Iterator[tuple[ChangedTable, Position]]:
        """Divide the views of a table by where their ranges begin. Yields also where these end."""
        table = mark.table
        end = mark.barrier.ends[table.topic]
        by_start: dict[Position, list[Sink]] = {}
        for sink in sinks:
            view = (sink.name, table.qualified)
            if view in mark.passed and table.is_in(sink.name):
                by_start.setdefault(self._views[view].reached, []).append(sink)
        for start, own in by_start.items():
            gap = distance(start, end)
            views = [(sink.name, table.qualified) for sink in own]
            if not gap.comparable or gap.offsets > BEHIND_OFFSETS:
                log.info("proof_too_far_behind", table=table.qualified, offsets=gap.offsets)
                self._withdraw(views)
                continue
            until = range_end(start, end, TURN_OFFSETS)
            ranges = tuple(
                OffsetRange(table.topic, partition, first, last, end.topic_id)
                for partition, (first, last) in enumerate(
                    zip(start.offsets, until.offsets, strict=True)
                )
                if first < last
            )
            settings = clock_setting(table, mark.now)
            try:
                readers = {sink.name: _row_reader(sink, table) for sink in own}
            except (SinkUnavailable, SinkRejected) as error:
                log.warning("proof_failed", error=error.message, hint=error.hint)
                continue
            compared = tuple(
                ChangedView(name, read, self._views[name, table.qualified].suspects)
                for name, read in readers.items()
            )
            yield ChangedTable(table, ranges, compared, settings), until

    def _judge(
        self,
        proving: Proving,
        log_read: Log,
        marked: Sequence[Marked],
        answers: Mapping[View, ChangedAnswer],
        ends: Mapping[View, Position],
        at: float,
    ) -> None:
        """Judge the answers on views that have not been set back meanwhile, and record what is proved."""
        log_read.truncations.read()
        registry = log_read.registry.read()
        entries: list[tuple[Sequence[str], dict[str, object] | None]] = []
        for sink in proving.sinks:
            own = [mark for mark in marked if (sink.name, mark.table.qualified) in answers]
            own = [mark for mark in own if mark.table.is_in(sink.name)]
            if not own:
                continue
            try:
                stored = positions(sink, [mark.table for mark in own])
            except (SinkUnavailable, SinkRejected) as error:
                log.warning("proof_failed", error=error.message, hint=error.hint)
                continue
            for mark in own:
                table = mark.table
                name = table.qualified
                view = (sink.name, name)
                answer = answers[view]
                state = self._views[view]
                floor = log_read.truncations.floors.number(name)
                if floor != mark.barrier.floors.number(name):
                    continue
                if not _is_intact(state, stored[name], mark.barrier.ends[table.topic], floor):
                    continue
                if not self._was_read(view, answer):
                    continue
                moment = Moment(at, mark.barrier.ends[table.topic])
                judged, wrong = judge(state, moment, ends[view], answer.differing, answer.explained)
                if wrong:
                    try:
                        damage = self._confirm(proving, log_read.kafka, table, sink, wrong, state)
                    except CdcError as error:
                        # The next turn begins with the same rows.
                        log.warning("proof_failed", error=error.message, hint=error.hint)
                        continue
                    if damage is not None:
                        del self._views[view]
                        entries.append((("proof", *view), vars(damage)))
                        continue
                self._views[view] = judged
                current = registry.for_sink(sink.name).proofs.get(name)
                if current and _renews(judged, current):
                    entries.append((("proof", *view), _proof(judged, current)))
        if entries:
            registry.write(*entries)

    def _was_read(self, view: View, answer: ChangedAnswer) -> bool:
        """Say whether a view could be compared. Log it once if not."""
        if answer.error is None:
            self._unread.pop(view, None)
            return True
        if self._unread.get(view) != answer.error:
            log.warning("rows_not_compared", sink=view[0], table=view[1], error=answer.error)
        self._unread[view] = answer.error
        return False

    def _confirm(
        self,
        proving: Proving,
        kafka: Topics,
        table: Table,
        sink: Sink,
        wrong: frozenset[str],
        state: ProvedView,
    ) -> Damage | None:
        """Compare rows as `cdc verify` does. Returns what is wrong.

        Raises:
            CdcError: that couldn't be done: the next turn begins with the same rows.
        """
        pipeline = proving.pipeline
        wait = WaitOptions(CONFIRM_S, report=self._go_on)
        verification = TableVerification(
            self._spark, pipeline, kafka, table, [sink], Options(), wait
        )
        (comparison,) = verification.result(sorted(wrong))
        if comparison.verdict != "differs":
            return None
        damage = damage_of(comparison, state.generation, time.time())
        log.error("rows_differ", sink=sink.name, table=table.qualified, rows=damage.rows)
        return damage


def _row_reader(sink: Sink, table: Table) -> ReadRows:
    assert isinstance(sink, RowReader)
    return sink.row_reader(table)


def _is_intact(view: ProvedView, stored: ViewCheckpoint | None, end: Position, floor: int) -> bool:
    """Whether the view is still the generation that is proved, and past the barrier."""
    generation = stored.generation if stored else FIRST
    return view.generation == generation and distance(stored, end, floor).reached


def _renews(view: ProvedView, current: Proof) -> bool:
    return current.generation == view.generation and current.through < view.proved.at


def _proof(view: ProvedView, current: Proof) -> dict[str, object]:
    passed = view.proved.position
    proof = replace(
        current, through=view.proved.at, topic_id=passed.topic_id, offsets=passed.offsets
    )
    return vars(proof)
