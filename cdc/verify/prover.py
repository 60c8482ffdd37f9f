"""The continuous proof of `cdc run`: the rows that have changed are compared soon after they have settled.

In:  views that are proved through some moment. Out: later moments, in the registry; rows that differ.
Invariant: only `TableVerification` says that a row is wrong. A turn only says which rows to ask it for.

    1. read Postgres' clock; place a barrier behind that moment; wait for the views that pass it soon
    2. compare the rows with a record between the last turn's barrier and this one, in one task of one
       job (`changed_rows`)
    3. judge the rows that differ (`turns`); record how far each view is proved, unless rows of it may
       have changed without a record meanwhile (`proof.view_shapes`)

If not all rows of a view have been compared for `proof.sweep_hours`, each turn also compares a slice of
them, of one view after the other. A sweep first lists the rows of the view, then the rows of Postgres
that the view lacks. How far it has come is in the registry, so that the next run goes on from there.

The pause after a turn is as long as the turn's work may take by the file's `proof.percent`.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from threading import Event
from typing import TYPE_CHECKING, NamedTuple

import structlog

from cdc.config.settings import Pipeline
from cdc.control.control_topics import Control
from cdc.control.repetition import repeating
from cdc.errors import CdcError, ConnectorError, Interrupted, SinkRejected, SinkUnavailable
from cdc.generations.registry import Proof, Registry, Sweep
from cdc.kafka.log_reader import OffsetRange
from cdc.kafka.topics import Topics
from cdc.model.position import Position, distance
from cdc.model.table import Table
from cdc.postgres.table_survey import tables_in
from cdc.sink.contract import Expiring, RowReader, Sink, positions
from cdc.sink.factory import open_clocks
from cdc.sink.remedy import classify
from cdc.verify.barrier import Barrier, WaitOptions, passed_views, place_barrier, read_time_ms
from cdc.verify.changed_rows import (
    ChangedAnswer,
    ChangedTable,
    ChangedView,
    Slicing,
    compare_changed,
)
from cdc.verify.comparison import Comparison, Options, View
from cdc.verify.proof import damage_of, view_shapes
from cdc.verify.repair import repair
from cdc.verify.source_rows import clock_setting
from cdc.verify.turns import Moment, ProvedView, begin, judge, mark_of, next_slice, range_end
from cdc.verify.verification import TableVerification

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LEAST_PAUSE_S = 5.0
RECORDS_PER_S = 10.0
"""Proofs written to the registry per second on average. All who look at the pipeline read them."""
MARK_S = 20.0
"""The longest wait for a heartbeat."""
PASS_S = 30.0
"""The longest wait for views to pass a barrier. There is no wait for a view that was late the last time."""
TURN_OFFSETS = 20_000
"""Offsets of a table that a turn takes at most: their ids are in a task's memory."""
BEHIND_OFFSETS = 1_000_000
"""A view that is further behind is proved no longer: comparing all rows is faster."""
CONFIRM_S = 120.0
REPAIR_ROWS = 100
"""Rows of a view that a turn repairs at most."""
SLICE_RETRY_S = 600.0
"""The pause of a sweep that couldn't list rows. Changed rows are compared meanwhile."""
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
        self.control = Control(pipeline, self.kafka)


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
        self._work_s = 0.0
        """Of this turn, outside of its thread: CPU, or the time that servers have taken to answer."""
        self._resume_at = 0.0
        self._seen: object = None
        self._proving: Proving | None = None
        self._unread: dict[View, str] = {}
        self._unlisted: dict[View, str] = {}
        """Why no slice of a view could be listed."""
        self._sweep_at = 0.0
        """When the next slice of any view may be compared."""
        self._slice_at: dict[View, float] = {}
        """When the last slice of a view was compared; of a view that couldn't be listed, when the next one is."""
        self._repaired: dict[View, set[str]] = {}
        """Rows that were repaired: each once."""

    def turn(self) -> None:
        """Take a turn, if its time has come.

        Raises:
            CdcError: a server can't be read.
        """
        if time.monotonic() < self._resume_at:
            return
        self._resume_at = time.monotonic() + LEAST_PAUSE_S
        began_s = time.thread_time()
        self._work_s = 0.0
        context = self._spark.sparkContext
        context.setLocalProperty("spark.scheduler.pool", POOL)
        context.addJobTag(POOL)
        pipeline = self._load()
        if not pipeline.proof.percent:
            return
        try:
            self._log = self._log or Log(pipeline)
            self._take(pipeline, self._log)
        except CdcError:
            self.close()
            raise
        finally:
            work_s = self._work_s + time.thread_time() - began_s
            least_s = max(LEAST_PAUSE_S, len(self._views) / RECORDS_PER_S)
            pause_s = max(least_s, work_s * 100 / pipeline.proof.percent)
            self._resume_at = time.monotonic() + pause_s

    def close(self) -> None:
        if self._log:
            self._log.kafka.close()
        self._log = None

    def _take(self, file: Pipeline, opened: Log) -> None:
        registry = opened.registry.read()
        if not any(registry.for_sink(name).proofs for name in file.sinks):
            return
        proving = self._described(file, opened.control)
        now_ms = read_time_ms(proving.pipeline)
        tables = tables_in([sink.name for sink in proving.sinks], proving.tables)
        shapes = view_shapes(tables, proving.sinks, opened.control)
        self._follow(proving, opened.registry, shapes, now_ms / 1000)
        marked = list(self._mark(proving, opened.kafka, tables, now_ms))
        slices = self._choose_slice(marked, proving, now_ms / 1000)
        compared: list[ChangedTable] = []
        ends: dict[View, Position] = {}
        for mark in marked:
            for changed, end in self._parts(mark, proving.sinks, opened.registry, slices):
                compared.append(changed)
                ends |= {(view.sink, changed.table.qualified): end for view in changed.views}
        answers = self._compare(proving.pipeline, compared)
        self._clocks = {mark.table.name: mark.now for mark in marked if mark.now is not None}
        self._judge(proving, opened, marked, answers, ends, shapes, now_ms / 1000)

    def _described(self, file: Pipeline, control: Control) -> Proving:
        """Describe the tables, if the file, the registration or a definition has changed since the last time."""
        control.read()
        seen = (file, control.registration, control.definitions)
        if self._proving is None or seen != self._seen:
            self._proving = self._describe()
            self._seen = seen
        return self._proving

    def _follow(
        self, proving: Proving, registry: Registry, shapes: Mapping[View, str], now: float
    ) -> None:
        """Follow the proofs in the registry: a view that has none isn't proved by changed rows alone. A
        proof of another shape ends.
        """
        keeps_deletes_s = proving.pipeline.delete_retention_hours * 3600
        readable = {sink.name for sink in proving.sinks if isinstance(sink, RowReader)}
        followed: dict[View, ProvedView] = {}
        ended: list[View] = []
        for view, shape in shapes.items():
            sink_name, table_name = view
            proof = registry.for_sink(sink_name).proofs.get(table_name)
            if proof is None or sink_name not in readable:
                continue
            if proof.shape != shape:
                ended.append(view)
            elif now - proof.through <= keeps_deletes_s / 2:
                known = self._views.get(view)
                followed[view] = known if known and proof.continues(known.proof) else begin(proof)
        self._views = followed
        self._withdraw(registry, ended, "its columns, or rows without a record, have changed")

    def _withdraw(self, registry: Registry, views: Sequence[View], reason: str) -> None:
        for view in views:
            log.info("proof_ended", sink=view[0], table=view[1], reason=reason)
            self._views.pop(view, None)
        if views:
            registry.write(*((("proof", *view), None) for view in views))

    def _mark(
        self, proving: Proving, kafka: Topics, tables: Sequence[Table], now_ms: float
    ) -> Iterator[Marked]:
        """Place a barrier for the tables, and another one for documents: these may be late alone. Yields
        the tables with the views that have passed.
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

    def _choose_slice(
        self, marked: Sequence[Marked], proving: Proving, now: float
    ) -> Mapping[View, Sweep]:
        """Choose the view that has waited longest for its next slice, if any waits for one."""
        sinks = {sink.name: sink for sink in proving.sinks}
        period_s = proving.pipeline.proof.sweep_hours * 3600
        waiting: dict[View, Sweep] = {}
        for mark in marked:
            for view in mark.passed:
                if (
                    can_sweep(sinks[view[0]], mark.table)
                    and self._slice_at.get(view, 0.0) <= time.monotonic()
                    and (begin_at := next_slice(self._views[view], now, period_s))
                ):
                    waiting[view] = begin_at
        if not waiting or time.monotonic() < self._sweep_at:
            return {}
        chosen = min(waiting, key=lambda view: self._slice_at.get(view, 0.0))
        self._slice_at[chosen] = time.monotonic()
        return {chosen: waiting[chosen]}

    def _parts(
        self,
        mark: Marked,
        sinks: Sequence[Sink],
        registry: Registry,
        slices: Mapping[View, Sweep],
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
            if not gap.comparable or gap.offsets > BEHIND_OFFSETS:
                views = [(sink.name, table.qualified) for sink in own]
                self._withdraw(registry, views, f"{gap.reach}, {gap.offsets} offsets")
                continue
            until = range_end(start, end, TURN_OFFSETS)
            ranges = tuple(
                OffsetRange(table.topic, partition, first, last, end.topic_id)
                for partition, (first, last) in enumerate(
                    zip(start.offsets, until.offsets, strict=True)
                )
                if first < last
            )
            compared: list[ChangedView] = []
            try:
                for sink in own:
                    assert isinstance(sink, RowReader)
                    view = (sink.name, table.qualified)
                    begin_at = slices.get(view)
                    slicing = Slicing(begin_at, sink.id_lister(table)) if begin_at else None
                    suspects = frozenset(self._views[view].suspects)
                    compared.append(
                        ChangedView(sink.name, sink.row_reader(table), suspects, slicing)
                    )
            except (SinkUnavailable, SinkRejected) as error:
                log.warning("proof_failed", error=error.message, hint=error.hint)
                continue
            setting = clock_setting(table, mark.now)
            yield ChangedTable(table, ranges, tuple(compared), setting), until

    def _compare(
        self, pipeline: Pipeline, tables: Sequence[ChangedTable]
    ) -> Mapping[View, ChangedAnswer]:
        """Compare rows. Where there are none, no job runs."""
        busy: list[ChangedTable] = []
        answers: list[ChangedAnswer] = []
        for changed in tables:
            if changed.ranges or any(view.suspects or view.slicing for view in changed.views):
                busy.append(changed)
            else:
                name = changed.table.qualified
                answers += [ChangedAnswer(view.sink, name) for view in changed.views]
        if busy:
            began_s = time.monotonic()
            compared, cpu_s = compare_changed(self._spark, pipeline, busy)
            self._work_s += cpu_s + JOB_S
            if any(view.slicing for changed in busy for view in changed.views):
                # By its time and not its CPU: servers that are busy are asked for slices less often.
                took_s = time.monotonic() - began_s
                self._sweep_at = time.monotonic() + took_s * 100 / pipeline.proof.percent
            answers += compared
        return {(answer.sink, answer.table): answer for answer in answers}

    def _judge(
        self,
        proving: Proving,
        opened: Log,
        marked: Sequence[Marked],
        answers: Mapping[View, ChangedAnswer],
        ends: Mapping[View, Position],
        shapes: Mapping[View, str],
        at: float,
    ) -> None:
        """Judge the answers on views that have not been set back meanwhile, and record what is proved."""
        # By now the control topics have all that happened before the mark.
        opened.control.read()
        tables = [mark.table for mark in marked]
        present = view_shapes(tables, proving.sinks, opened.control)
        entries: list[tuple[Sequence[str], dict[str, object]]] = []
        judged: set[View] = set()
        for sink in proving.sinks:
            own = {
                (sink.name, mark.table.qualified): mark
                for mark in marked
                if mark.table.is_in(sink.name) and (sink.name, mark.table.qualified) in answers
            }
            try:
                stored = positions(sink, [mark.table for mark in own.values()]) if own else {}
            except (SinkUnavailable, SinkRejected) as error:
                log.warning("proof_failed", error=error.message, hint=error.hint)
                continue
            for view, mark in own.items():
                state = self._views[view]
                answer = answers[view]
                moment = mark_of(state, at, mark.barrier.ends[mark.table.topic], answer.slice.after)
                floor = mark.barrier.floors.number(view[1])
                is_intact = (
                    present[view] == shapes[view]
                    and state.proof.is_of(stored[view[1]])
                    and distance(stored[view[1]], moment.position, floor).reached
                )
                if not is_intact or not self._was_read(view, answer):
                    continue
                after, wrong = judge(state, moment, ends[view], answer.differing, answer.explained)
                if wrong:
                    comparison, unrepaired = self._confirm(
                        proving, opened.kafka, mark.table, sink, wrong
                    )
                    if comparison and comparison.verdict == "differs":
                        damage = damage_of(comparison, state.proof.generation, at, unrepaired)
                        log.error("rows_differ", sink=view[0], table=view[1], rows=damage.rows)
                        entries.append((("proof", *view), asdict(damage)))
                    if not comparison or not comparison.equal:
                        # The next turn begins with the same rows.
                        continue
                    repaired = state.proof.repaired + comparison.repaired
                    after = replace(after, proof=replace(state.proof, repaired=repaired))
                if answer.slice.after or answer.slice.error:
                    self._was_listed(view, answer.slice.error)
                self._views[view] = after
                judged.add(view)
        # Another comparison may have found meanwhile that a view differs.
        opened.registry.read()
        for view in judged:
            current = opened.registry.for_sink(view[0]).proofs.get(view[1])
            state = self._views[view]
            if current and current.continues(state.proof) and current.through < state.proved.at:
                moved = _moved(state.proof, state.proved)
                self._views[view] = replace(state, proof=moved)
                entries.append((("proof", *view), asdict(moved)))
        if entries:
            opened.registry.write(*entries)

    def _was_read(self, view: View, answer: ChangedAnswer) -> bool:
        """Say whether a view could be compared. Log it once if not."""
        if answer.error is None:
            self._unread.pop(view, None)
            return True
        if self._unread.get(view) != answer.error:
            log.warning("rows_not_compared", sink=view[0], table=view[1], error=answer.error)
        self._unread[view] = answer.error
        return False

    def _was_listed(self, view: View, error: str | None) -> None:
        """Put the next slice of a view off if none could be listed. Log it once."""
        if error is None:
            self._unlisted.pop(view, None)
            return
        self._slice_at[view] = time.monotonic() + SLICE_RETRY_S
        if self._unlisted.get(view) != error:
            log.warning("rows_not_listed", sink=view[0], table=view[1], error=error)
        self._unlisted[view] = error

    def _confirm(
        self, proving: Proving, kafka: Topics, table: Table, sink: Sink, wrong: frozenset[str]
    ) -> tuple[Comparison | None, str]:
        """Compare rows as `cdc verify` does, and repair those that differ if the file says so. None: they couldn't
        be compared. Also returns why rows that differ weren't repaired.
        """
        wait = WaitOptions(CONFIRM_S, report=self._go_on)
        verification = TableVerification(
            self._spark, proving.pipeline, kafka, table, [sink], Options(), wait
        )
        began_s = time.monotonic()
        try:
            (comparison,) = verification.result(sorted(wrong))
            if comparison.verdict == "differs" and proving.pipeline.proof.repair:
                return self._repair(proving.pipeline, table, sink, comparison)
        except CdcError as error:
            log.warning("proof_failed", error=error.message, hint=error.hint)
            return None, ""
        finally:
            self._work_s += time.monotonic() - began_s
        return comparison, ""

    def _repair(
        self, pipeline: Pipeline, table: Table, sink: Sink, comparison: Comparison
    ) -> tuple[Comparison, str]:
        """Repair the rows that differ, each once. Returns how they are then, and why they weren't repaired.

        Raises Interrupted.
        """
        ids = {row.id for row in comparison.differences}
        repaired = self._repaired.setdefault((sink.name, table.qualified), set())
        if comparison.wrong > REPAIR_ROWS:
            return comparison, f"a run repairs {REPAIR_ROWS} rows at once at most"
        if ids & repaired:
            return comparison, "they were repaired before, and something has changed them again"
        try:
            (after,) = repair(
                self._spark, pipeline, [table], [sink], Options(timeout_s=CONFIRM_S), [comparison]
            )
        except Exception as error:
            self._go_on("")
            return comparison, classify(error, "the repair").message
        repaired |= ids
        log.warning("rows_repaired", sink=sink.name, table=table.qualified, rows=after.repaired)
        return after, "they were sent through the log again, which didn't help"


def can_sweep(sink: Sink, table: Table) -> bool:
    """Whether a sweep can say which rows a view must have. It can't where rows expire, or are made of events, which
    Postgres may have no longer.
    """
    if isinstance(sink, Expiring) and sink.lifetime_s(table) is not None:
        return False
    return not (table.derivation and table.derivation.events)


def _moved(proof: Proof, proved: Moment) -> Proof:
    position = proved.position
    return replace(
        proof,
        through=proved.at,
        complete_at=proved.complete_at,
        sweep=proved.sweep,
        topic_id=position.topic_id,
        offsets=position.offsets,
    )
