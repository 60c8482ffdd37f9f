"""Rebuild views from offset zero beside the live ones, and promote them.

A view is promoted once it is proved equal to the source.

In:  a sink, its tables, the topics. Out: a new generation of the views, promoted; the previous one,
     retained.
Phases: replay (a stream applies the log as it was at the start), catch up (the stream goes on),
verify, promote. However a rebuild ends, the same command continues it. Until the promotion readers
see the previous generation.
"""

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import structlog

from cdc.apply.progress import Progress as StreamProgress
from cdc.apply.progress import RunState
from cdc.apply.resume import SinkViews
from cdc.apply.schema_follower import Described, DescribeTables
from cdc.apply.stream import Environment, Stream
from cdc.config.settings import Pipeline
from cdc.control.registrations import Registration
from cdc.errors import CdcError, DivergenceError, KafkaUnavailable, SinkError, TopicMissing
from cdc.generations.claim import claim
from cdc.generations.pause import refuse_paused
from cdc.generations.registry import GenerationBuild, Progress, Registry, RetainedView
from cdc.generations.rollback import promote, retain
from cdc.kafka.log_continuity import Continuity
from cdc.kafka.log_refusals import Discontinued, refuse_foreign
from cdc.kafka.topics import Topics
from cdc.model.clock import Clock
from cdc.model.generation import new_generation
from cdc.model.position import distance
from cdc.model.table import Table
from cdc.postgres.table_definition import Definition
from cdc.sink.contract import (
    FitChecker,
    SchemaMismatch,
    Sink,
    positions,
    require_known_columns,
    require_same_shape,
)
from cdc.sink.promotion import GenerationReplaced, are_live

POLL_S = 0.1
RETRY_LIMIT_S = 120.0
"""Seconds that a rebuild waits for a sink, or for the broker, that is away."""
CAUGHT_UP_S = 1.0
"""Seconds within which a view that has caught up applies what is in the topics."""
log = structlog.get_logger()


@dataclass
class Rebuild:
    """Rebuilds a sink's views as a new generation. Runs in one thread, but for `show`.

    environment             opens what the new generation's stream depends on
    describe, placeholder   as a stream has them
    retention_s             seconds that the previous generation is retained, and kept current
    verify                  called once, before the promotion, in the thread of `run`. Raises
                            DivergenceError when views of the sink differ from their source,
                            UndecidedError when it can't be decided
    show                    called at every phase in the thread of `run`, and once a second in the
                            claim's thread
    """

    environment: Callable[[], Environment]
    pipeline: Pipeline
    kafka: Topics
    sink: Sink
    tables: Sequence[Table]
    describe: DescribeTables
    placeholder: str
    retention_s: float
    verify: Callable[[Sink, Sequence[Table]], None]
    show: Callable[[GenerationBuild], object]
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self._describe = only_tables(self.describe, {table.qualified for table in self.tables})
        self._lock = threading.Lock()
        self._stream: Stream | None = None

    def run(self) -> dict[str, RetainedView]:
        """Run the phases that remain, and return the retained previous views, by table.

        Raises:
            SettingsError: another command is at work on this sink. SinkPaused. Discontinued: a view is another
            pipeline's.
            DivergenceError: the new generation differs from the source; it is removed, readers see
            what they saw.
            UndecidedError: it couldn't be proved equal; it stays, and the same command compares it
            again.
            CdcError: what the sink or the broker raises; the same command continues.
        """
        self._refuse_foreign()
        with claim(Registry(self.pipeline, self.kafka, self.clock), self.sink.name) as self._claim:
            refuse_paused(self._claim.generations, self.sink.name)
            self._build = self._resume_or_start()
            if self._build.phase == "promote" and (previous := self._replaced_by_emptied()):
                return self._finish(previous)
            if self._build.phase == "promote" and self._is_promoted():
                # The promotion goes on after the switches: what it replaces is retained then.
                retained = self._finish(promote(self.sink, self.tables, self._build.names))
                if not self._is_discontinued():
                    return retained
                log.warning("promoted_view_is_discontinued", sink=self.sink.name)
                self._claim.check()
                self._build = self._resume_or_start()
            self._publish()
            self._claim.forget_retained(list(self._build.names))
            self.sink.drop_unreferenced(self.tables, self._build.names)
            self._claim.progress = self._progress
            return self._finish(self._build_and_promote())

    def _refuse_foreign(self) -> None:
        """Raise Discontinued where a live view is another pipeline's: its readers would see this
        pipeline's rows. Raise SchemaMismatch where the sink's list of columns doesn't fit its table.
        """
        ends = self.kafka.ends([table.topic for table in self.tables])
        checkpoints = positions(self.sink, self.tables)
        for table in self.tables:
            require_known_columns(table, self.sink.name)
            refuse_foreign(
                self.kafka, self.sink.name, table, checkpoints[table.qualified], ends[table.topic]
            )

    def _resume_or_start(self) -> GenerationBuild:
        """Return the build to continue, or begin a new one."""
        work = self._claim.generations.work
        names = dict.fromkeys((table.qualified for table in self.tables), new_generation())
        if isinstance(work, GenerationBuild) and work.names.keys() == names.keys():
            return work
        self.sink.check_capacity(self.tables)
        return GenerationBuild(self.sink.name, "replay", names, self.clock.time())

    def _is_discontinued(self) -> bool:
        """Whether the log can't continue a live view: the command was killed long ago, and the topic has
        been made again, or cut, since.
        """
        continuity = self._continuity()
        checkpoints = positions(self.sink, self.tables)
        try:
            for table in self.tables:
                continuity.refuse(
                    self.sink.name, table, checkpoints[table.qualified], complete=True
                )
        except Discontinued:
            return True
        return False

    def _continuity(self) -> Continuity:
        topics = [table.topic for table in self.tables]
        return Continuity(self.pipeline, self.kafka, self.clock.time).read(topics)

    def _resume_error(self, candidate: Sink) -> CdcError | None:
        """Find out why an interrupted build can't continue.

        Either its log is gone, or its views would be different now, or another generation lies in
        their place: views without a record may have changed places unnoticed. None: it can
        continue.
        """
        continuity = self._continuity()
        try:
            for table in self.tables:
                stored = candidate.position(table)
                continuity.refuse(self.sink.name, table, stored)
                require_same_shape(table, self.sink.name, stored)
                candidate.prepare(table)
                if isinstance(candidate, FitChecker):
                    candidate.rehearse(table)
        except (Discontinued, SchemaMismatch, GenerationReplaced) as error:
            return error
        return None

    def _build_and_promote(self) -> Mapping[str, str]:
        """Replay, catch up, verify, promote. Returns the previous generation, by table."""
        candidate = self.sink.for_generation(self._build.names)
        if error := self._resume_error(candidate):
            log.warning("build_begun_again", sink=self.sink.name, error=error.message)
            for table in self.tables:
                candidate.clear(table)
            if self._build.phase != "replay":
                self._publish(phase="replay", done=0)
        self._refuse_incomplete(candidate)
        with keep_current(
            self.environment(),
            candidate,
            self._build.names,
            self.pipeline,
            self._describe,
            self.placeholder,
        ) as stream:
            self._stream = stream
            if self._build.phase == "replay":
                apply_all(self.kafka, candidate, self.tables, lambda: stream.progress, self.clock)
                self._publish(phase="catch up", done=self._build.total)
            catch_up(self.kafka, candidate, self.tables, lambda: stream.progress, self.clock)
            self._publish(phase="verify")
            try:
                self.verify(candidate, self.tables)
            except DivergenceError:
                self._finish({})
                raise
            self._publish(phase="promote")
            self._empty_views_of_empty_topics(candidate)
            return self.sink.promote(self.tables, self._build.names)

    def _refuse_incomplete(self, candidate: Sink) -> None:
        """Raise the refusal of a table that the log can't make. A run goes on with the others; a
        generation has all of its tables, or it is none.
        """
        names = self._build.names
        plan = SinkViews(
            candidate,
            self.pipeline,
            self.kafka,
            self._describe,
            self.placeholder,
            names,
            self.clock,
        ).load()
        if plan.refused:
            raise plan.refused[0]
        total = sum(sum(shape.offsets) for shape in plan.shapes.values())
        with self._lock:
            self._build = replace(self._build, total=total)

    def _empty_views_of_empty_topics(self, candidate: Sink) -> None:
        """Empty the live views that were made from another topic, where the topic of now has no record. The
        new generation has no position then, and without one it would count as behind for ever.
        """
        ends = self.kafka.ends([table.topic for table in self.tables])
        live = positions(self.sink, self.tables)
        new = positions(candidate, self.tables)
        for table in self.tables:
            stored = live[table.qualified]
            is_of_other = stored is not None and not distance(stored, ends[table.topic]).comparable
            if is_of_other and new[table.qualified] is None:
                self.sink.clear(table)

    def _is_promoted(self) -> bool:
        """Whether the new generation is live already, since an earlier run was killed then."""
        try:
            checkpoints = positions(self.sink, self.tables)
        except SchemaMismatch:
            # A live view doesn't fit its table: that is the generation to replace.
            return False
        return are_live(checkpoints, self._build.names)

    def _replaced_by_emptied(self) -> dict[str, str]:
        """List what readers saw before a promotion, by table, where one of its views is emptied since,
        as after a TRUNCATE; nothing where none is.

        Such a view is of a newer generation. The replaced generation lies beside it, and the
        promoted one is gone. Before a promotion the new generation lies beside the live one. In a
        warehouse it lies there afterwards, too, so that an emptied view isn't recognized.
        """
        generations = {table.qualified: self.sink.generations(table) for table in self.tables}
        beside = {name: names[1:] for name, names in generations.items()}
        is_any_emptied = any(
            beside[name] and self._build.names[name] not in names
            for name, names in generations.items()
        )
        if not is_any_emptied or any(self._build.names[name] in beside[name] for name in beside):
            return {}
        return {name: names[-1] for name, names in beside.items() if names}

    def _finish(self, previous: Mapping[str, str]) -> dict[str, RetainedView]:
        return retain(self._claim, self.sink, self.tables, previous, self.retention_s)

    def _publish(self, **changes: Any) -> None:
        with self._lock:
            self._build = replace(self._build, **changes)
        self._claim.announce(self._build)
        self.show(self._build)

    def _progress(self) -> Progress:
        """Return the progress of the build. Called every second, in the claim's thread."""
        with self._lock:
            if self._build.phase == "replay" and self._stream:
                progress = self._stream.progress
                remaining = progress.lag_records
                done = self._build.done
                if remaining is not None:
                    done = max(done, self._build.total - remaining)
                self._build = replace(self._build, done=done, rows_per_s=progress.rows_per_s)
            build = self._build
        self.show(build)
        return Progress(self.clock.time(), build.done, build.total, build.rows_per_s)


def only_tables(describe: DescribeTables, names: Collection[str]) -> DescribeTables:

    def describe_subset(history: Sequence[Definition], registration: Registration) -> Described:
        tables, blocked = describe(history, registration)
        subset = [table for table in tables if table.qualified in names]
        return subset, {name: reasons for name, reasons in blocked.items() if name in names}

    return describe_subset


@contextmanager
def keep_current(
    environment: Environment,
    sink: Sink,
    names: Mapping[str, str],
    pipeline: Pipeline,
    describe: DescribeTables,
    placeholder: str,
) -> Iterator[Stream]:
    """Apply changes to a generation that isn't live, in a thread, until the context ends.

    The stream closes `environment.kafka`.

    A failure ends the stream and is logged: its `progress.state` is "failed", and positions stand
    still.
    """
    stream = Stream(
        environment,
        sink,
        pipeline,
        describe,
        placeholder,
        pipeline.sinks[sink.name].trigger_s,
        names=names,
    )

    def run() -> None:
        try:
            stream.run()
        except GenerationReplaced:
            # Another command has promoted or replaced the generation, and continues it.
            log.info("standby_replaced", sink=sink.name)
        except CdcError as error:
            log.warning("standby_dropped", sink=sink.name, error=error.message)
        finally:
            stream.close()

    join = environment.clock.start(run)
    try:
        yield stream
    finally:
        stream.stop()
        join()


def apply_all(
    kafka: Topics,
    sink: Sink,
    tables: Sequence[Table],
    progress: Callable[[], StreamProgress],
    clock: Clock,
) -> None:
    """Wait until a stream has applied to the sink what is in the topics now.

    Raises:
        SinkError: the stream has failed, goes on without one of its tables, or has waited for the
            sink for `RETRY_LIMIT_S`.
    """
    topics = [table.topic for table in tables]
    ends = kafka.ends(topics)
    worked_at = clock.monotonic()
    while True:
        checkpoints = positions(sink, tables)
        if all(distance(checkpoints[t.qualified], ends[t.topic]).reached for t in tables):
            return
        now = progress()
        if now.lag_records == 0:
            # The stream is at the end of its topics. One of them was created again, if this goes on.
            with suppress(KafkaUnavailable, TopicMissing):
                current = kafka.ends(topics)
                ends = {
                    topic: end if distance(end, current[topic]).comparable else current[topic]
                    for topic, end in ends.items()
                }
        if now.state is not RunState.RETRYING:
            worked_at = clock.monotonic()
        _refuse_stopped(now, clock.monotonic() - worked_at)
        clock.sleep(POLL_S)


def catch_up(
    kafka: Topics,
    sink: Sink,
    tables: Sequence[Table],
    progress: Callable[[], StreamProgress],
    clock: Clock,
) -> None:
    """Wait until a stream takes less than a second to apply to the sink what is in the topics.

    The wait also ends once the stream stops getting faster. `progress`: the stream's, asked for
    every `POLL_S` seconds.

    Raises:
        SinkError: see `apply_all`.
    """
    duration_s = float("inf")
    while True:
        previous_s = duration_s
        start = clock.monotonic()
        apply_all(kafka, sink, tables, progress, clock)
        duration_s = clock.monotonic() - start
        if duration_s < CAUGHT_UP_S or duration_s > previous_s / 2:
            return


def _refuse_stopped(progress: StreamProgress, waits_s: float) -> None:
    """Raise SinkError where a stream no longer applies to one of its tables, or to none."""
    reason = progress.error
    hint = progress.hint
    if progress.aside:
        reason, hint = next(iter(progress.aside.values()))
    elif waits_s > RETRY_LIMIT_S:
        hint = "the same command goes on"
    elif progress.state is not RunState.FAILED:
        return
    raise SinkError(
        f"The new generation of {progress.sink} can't go on: {reason}",
        hint=hint or "readers see what they saw; the same command goes on",
        sink=progress.sink,
    )
