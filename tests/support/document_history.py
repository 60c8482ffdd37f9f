"""Histories of documents without a connector: statements run in Postgres, what they changed is
written to a log as the connector would write it, and batches of the log are applied to a state in
Valkey and sent. At any place the documents can be compared with Postgres' own query.

A history is in one process and one thread, so a test chooses the cuts: which tables and partitions a
batch takes, and after which step the process ends.
"""

import json
import random
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import redis
from psycopg import sql
from psycopg.conninfo import make_conninfo

from cdc.codec.decode_options import DecodeOptions
from cdc.codec.table import codec
from cdc.config import settings
from cdc.config.settings import Pipeline
from cdc.documents.engine import TAKE_S, ViewClocks
from cdc.documents.needs import all_needs
from cdc.documents.plan import StatePlan, View
from cdc.documents.resolve import resolve_views
from cdc.documents.sql import clock_setting
from cdc.documents.state import LateChange, State, Turn, shard_prefix
from cdc.documents.tables import view_table
from cdc.documents.tasks import Emission, Report, mark, read_report
from cdc.kafka.clients import kafka
from cdc.kafka.topic_setup import ensure_topics
from cdc.kafka.topics import Topics
from cdc.kafka.transactions import Outgoing
from cdc.model.outcome import Advance
from cdc.model.pg_types import base_type
from cdc.model.position import Position
from cdc.model.table import Column, Table
from cdc.postgres import catalog, source, table_survey
from cdc.postgres.row_query import row_query
from cdc.scalar.instants import FIRST, microseconds, text_of
from cdc.sink.lane import ChunkLimits, Failure, Lane, Part, Verdicts
from cdc.sink.lane_task import LaneRun
from cdc.sink.rejection import Rejected, Skip
from cdc.sinks.redis.database import Database
from cdc.sinks.redis.documents.executor import StateWriter
from cdc.sinks.redis.documents.sink import DocumentState
from cdc.sinks.redis.executor import PendingAdvance
from cdc.sinks.redis.positions import Positions
from tests.support.budget import SCALE
from tests.support.envelopes import PLACEHOLDER
from tests.support.simulated import MemoryLog, SimulatedClock

NAME, PARTITIONS, SCHEMA = "lib", 2, "lib"
PREFIX = shard_prefix(NAME)
HEAD = """\
pipeline: {name}
kafka: {kafka}
connect: http://localhost:8083
source: {{dsn: "{dsn}", tables: [{{table: "lib.*", partitions: 2}}]}}
sinks:
  cache: {{type: redis, url: "redis://localhost/0", prefix: lib}}
state: {{type: redis, url: "{state}", prefix: lib}}
"""
WIRE = {
    "date": "({0} - date '1970-01-01')",
    "timestamp without time zone": "(extract(epoch FROM {0}) * 1000000)::bigint",
    "timestamp with time zone": (
        "CASE WHEN NOT isfinite({0}) THEN {0}::text ELSE"
        " CASE WHEN {0} < '0001-01-01 00:00+00'::timestamptz THEN '-' ||"
        " lpad((-1 - extract(year FROM {0} AT TIME ZONE 'UTC'))::text, 4, '0')"
        " WHEN {0} > '9999-12-31 23:59:59.999999+00'::timestamptz THEN '+' ||"
        " to_char({0} AT TIME ZONE 'UTC', 'YYYY')"
        " ELSE to_char({0} AT TIME ZONE 'UTC', 'YYYY') END ||"
        """ to_char({0} AT TIME ZONE 'UTC', '-MM-DD"T"HH24:MI:SS.US"Z"') END"""
    ),
    "json": "{0}::text",
    "jsonb": "{0}::text",
    "uuid": "{0}::text",
    "numeric": (
        "CASE {0}::text WHEN 'NaN' THEN 'NAN' WHEN 'Infinity' THEN 'POSITIVE_INFINITY'"
        " WHEN '-Infinity' THEN 'NEGATIVE_INFINITY' ELSE {0}::text END"
    ),
}
"""SQL for a value as the connector writes it, by type; others travel as they are."""
CHANGES = 100
"""Rounds of a random history."""
MOST_ROWS = 4 if SCALE == 1 else 60
"""A round changes fewer rows than this. Of each kind of view 40 histories with 60 change more than
100,000 (`make properties`).
"""
STEPS = ("climbed", "begin_sending", "sent", "write")
"""At which the process of a random history ends."""
Documents = dict[str, str]
"""Texts of documents, by id."""
Partition = tuple[str, int]
"""A table's name and a number."""


class Broker(NamedTuple):
    """A broker, and the name of the pipeline, which begins the names of its topics."""

    pipeline: str
    bootstrap: str


class Crash(Exception):
    """The process ends here."""


def do_nothing() -> None:
    """Let the process go on."""


@dataclass
class Record:
    """A record of the log. lsn: of the change; None for a tombstone."""

    offset: int
    key: bytes
    value: bytes | None


@dataclass(frozen=True)
class Collecting(Skip):
    """Records that can't be applied are left out, and named here."""

    rejected: list[Rejected] = field(default_factory=list)

    def put(self, records: Any) -> None:
        self.rejected.extend(rejected for rejected, _ in records)


class _CrashingState:
    """A state that ends the process at one of its methods: before the call, or after it."""

    def __init__(self, target: Any, method: str, when: str) -> None:
        self._target, self._method, self._when = target, method, when

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._target, name)
        if name != self._method:
            return method

        def call(*arguments: Any) -> Any:
            if self._when == "before":
                raise Crash
            method(*arguments)
            raise Crash

        return call


class _InterruptedState:
    """A state of which each call may end the process, before it or after it."""

    def __init__(self, target: Any, interrupt: Callable[[], None]) -> None:
        self._target = target
        self._interrupt = interrupt

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._target, name)

        def call(*arguments: Any, **options: Any) -> Any:
            self._interrupt()
            answer = method(*arguments, **options)
            if isinstance(answer, Iterator):
                answer = list(answer)
            self._interrupt()
            return answer

        return call


class _InterruptedWriter(StateWriter):
    """Each of its writes may end the process, before it or after it."""

    interrupt: Callable[[], None]

    def write(self, parts: Sequence[Part]) -> Sequence[Verdicts]:
        self.interrupt()
        verdicts = super().write(parts)
        self.interrupt()
        return verdicts


class _CountingState:
    """A state that counts the rows that are read from it, and the questions."""

    def __init__(self, target: Any, history: "History") -> None:
        self._target, self._history = target, history

    def __getattr__(self, name: str) -> Any:
        self._history.questions += 1
        return getattr(self._target, name)

    def rows(self, table: str, ids: Collection[str]) -> Any:
        self._history.questions += 1
        self._history.rows_read += len(ids)
        return self._target.rows(table, ids)


class History:
    """Tables in Postgres, their log, a state, and the topics of documents.

    emitted  what was sent since `forget_emitted`: view, id, value
    """

    def __init__(
        self,
        connection: source.Connection,
        state_url: str,
        folder: Path,
        broker: "Broker | None" = None,
    ) -> None:
        """`broker`: where the log is written to besides."""
        self.connection, self.url, self._folder = connection, state_url, folder
        self.writer, self.lsn, self._broker = uuid4().hex, 0, broker
        self.log: dict[Partition, list[Record]] = {}
        self.ends: dict[Partition, int] = {}
        self.rows: dict[str, dict[str, tuple[bytes, bytes]]] = {}
        self.topics: dict[str, dict[str, str]] = {}
        self.emitted: list[tuple[str, str, bytes | None]] = []
        self.floors: dict[str, int] = {}
        self.rejection = Collecting()
        self.interrupt: Callable[[], None] = do_nothing
        """Called where the process may end with a `Crash`: before and after each call of the state and each
        write.
        """
        self.chunk_rows, self.rows_read = 500, 0
        self.questions = 0
        self.sent: dict[str, list[tuple[str, bytes, bytes | None, int]]] = {}
        """By view, what its topic has: the root's id, the record's key and value, its offset."""
        self._crashes = 0
        self.is_new_process = True
        """Whether the next `send` begins as an engine does after a crash."""
        self.has_gone_back = False
        """Whether the state has lost what the topics show, so that the next `send` reads all of them."""
        self.repeats_tasks = False
        """Whether a task that ends amid a transaction is run once more, as Spark does."""
        self.clocks: dict[str, int] = {}
        """By view, the time of its clock, in microseconds since 1970; set forward by `send`."""
        self.changed_after_closing: list[tuple[str, str]] = []
        """Views, and ids of documents that were sent again although they had been final."""
        self._view_clocks: ViewClocks | None = None
        connection.execute("SET timezone = 'UTC'")

    def begin_again(self) -> "History":
        """Return a history with nothing in its tables, its log, its state and its topics, whose clocks haven't
        begun.
        """
        self.connection.execute("DROP SCHEMA lib CASCADE; CREATE SCHEMA lib")
        with redis.Redis.from_url(self.url) as server:
            server.flushdb()
        return History(self.connection, self.url, self._folder, self._broker)

    # Tables and views

    def declare(self, views: str, *, prepare: bool = True) -> None:
        """Resolve views, given as the section of a pipeline file, with the tables as they are;
        `prepare`: and begin with them.
        """
        name, bootstrap = self._broker or ("lib", "localhost:1")
        dsn = make_conninfo(self.connection.info.dsn, options="")
        head = HEAD.format(name=name, dsn=dsn, state=self.url, kafka=bootstrap)
        path = self._folder / "lib.yaml"
        path.write_text(f"{head}views:\n{views}")
        pipeline = settings.load(path, {})
        names = catalog.find_tables(self.connection, pipeline).names
        self.pipeline: Pipeline = pipeline.with_tables(names)
        self.tables = table_survey.describe(self.connection, self.pipeline)
        self.views = {view.name: view for view in resolve_views(self.pipeline, self.tables)}
        self.plan = StatePlan(tuple(self.views.values()))
        self._codecs = {
            name: codec(view_table(pipeline, view)) for name, view in self.views.items()
        }
        self.topic_ids = {table.topic: table.topic for table in self.tables}
        if self._broker:
            self._make_topics()
        self.sink = DocumentState(self.url, NAME)
        self.sink.plan = self.plan
        self.sink.needs = all_needs(self.plan, dict.fromkeys(self.views, "topic"))
        self._positions = Positions(Database("documents", self.url, PREFIX), None)
        self.topics |= {name: {} for name in self.views if name not in self.topics}
        if prepare:
            self.prepare()

    def prepare(self) -> None:
        """Make the tables of the state ready, as a stream does; the ones that lack something start over."""
        for table in self.plan.tables:
            if self.sink.position(table) is None:
                self.sink.clear(table)
            self.sink.prepare(table)

    def _make_topics(self) -> None:
        with Topics(self.pipeline.kafka) as topics:
            ensure_topics(topics, self.pipeline)
            ends = topics.ends([table.topic for table in self.tables])
            self.topic_ids = {topic: end.topic_id for topic, end in ends.items()}

    def table(self, name: str) -> Table:
        return next(table for table in self.tables if table.name == name)

    # Changes

    def do(self, *statements: str) -> None:
        """Run statements in one transaction, and write what they changed to the log."""
        with self.connection.transaction():
            for statement in statements:
                self.connection.execute(statement.encode())
        self.capture()

    def capture(self) -> None:
        """Write to the log in what the tables differ from what the log has."""
        self.lsn += 1
        for table in self.tables:
            former, current = self.rows.get(table.name, {}), dict(self._wire_rows(table))
            for row_id, (key, _) in former.items():
                if row_id not in current:
                    self.append(table, row_id, key, None)
            for row_id, (key, row) in current.items():
                if row_id not in former or former[row_id][1] != row:
                    self.append(table, row_id, key, self.envelope(table, row))
            self.rows[table.name] = current
        if self._broker:
            _producer(self._broker.bootstrap).flush()

    def envelope(self, table: Table, row: bytes) -> bytes:
        source_part = b'"source":{"schema":"lib","table":"%b","lsn":%d}' % (
            table.name.encode(),
            self.lsn,
        )
        return b'{"op":"u","after":%b,%b}' % (row, source_part)

    def append(self, table: Table, row_id: str, key: bytes, value: bytes | None) -> None:
        """Append a record to the partition of its key."""
        place = table.name, sum(row_id.encode()) % PARTITIONS
        offset = self.ends.get(place, 0)
        self.log.setdefault(place, []).append(Record(offset, key, value))
        self.ends[place] = offset + 1
        if self._broker:
            producer = _producer(self._broker.bootstrap)
            producer.send(table.topic, key=key, value=value, partition=place[1])

    def compact(self) -> None:
        """Leave the newest record of each key, as a compacted topic may."""
        for records in self.log.values():
            newest = {record.key: record.offset for record in records}
            records[:] = [record for record in records if newest[record.key] == record.offset]

    def _wire_rows(self, table: Table) -> Iterator[tuple[str, tuple[bytes, bytes]]]:
        columns = sql.SQL(", ").join([_wire(column) for column in table.columns])
        query = sql.SQL("SELECT {} FROM {}").format(
            columns, sql.Identifier(table.schema, table.name)
        )
        names = [column.name for column in table.columns]
        for values in self.connection.execute(query):
            row = dict(zip(names, values, strict=True))
            key = _json({name: row[name] for name in table.key})
            yield codec(table).row_id(key), (key, _json(row))

    # Batches

    @property
    def positions(self) -> dict[str, Position | None]:
        """How far the state has got, by topic."""
        checkpoints = self.sink.positions(self.plan.tables)
        return {
            table.topic: stored.position if (stored := checkpoints[table.qualified]) else None
            for table in self.plan.tables
        }

    def reached(self, table: Table) -> tuple[int, ...]:
        stored = self._positions.checkpoint(table)
        offsets = stored.position.offsets if stored else ()
        return (*offsets, *(0,) * (PARTITIONS - len(offsets)))

    def apply(self, *only: str | Partition) -> None:
        """Apply what is in the log of tables, or of partitions; of all if none is named."""
        advances = []
        for table in self.plan.tables:
            start = self.reached(table)
            end = tuple(
                self.ends.get((table.name, number), 0)
                if not only or table.name in only or (table.name, number) in only
                else start[number]
                for number in range(PARTITIONS)
            )
            if end != start:
                stored = self._positions.checkpoint(table)
                position = stored.position if stored else None
                topic_end = Position(self.topic_ids[table.topic], end)
                advances.append(
                    Advance(table, position, topic_end, self.floors.get(table.topic, 0))
                )
        steps = [step for part in advances if (step := self._positions.take(part, self.writer))]
        writer = _InterruptedWriter(
            self.url, PREFIX, {step.advance.table.topic: step for step in steps}, self.plan
        )
        writer.interrupt = self.interrupt
        writer.limits = ChunkLimits(self.chunk_rows, 1 << 20)
        reading = DecodeOptions(PLACEHOLDER, floors=self.floors)
        run = LaneRun(Lane(tuple(advances), reading, writer, self.rejection))
        try:
            self._fold(run, steps)
        except Crash:
            # Every other time Spark repeats the task, and its process is the same writer.
            self._crashes += 1
            if self._crashes % 2:
                self._begin_process()
            return
        moved = writer.finish()
        for step in steps:
            self._positions.finish(step, moved.get(step.advance.table.topic, ()))

    def _fold(self, run: LaneRun, steps: Sequence[PendingAdvance]) -> None:
        for step in steps:
            table = step.advance.table
            for number, (low, high) in enumerate(
                zip(step.offsets, step.advance.end.offsets, strict=True)
            ):
                records = [
                    (record.key, record.value, record.offset)
                    for record in self.log.get((table.name, number), [])
                    if low <= record.offset < high
                ]
                if records:
                    run.fold(table.topic, number, records)
        failures = [report.message for report in run.finish() if report.failure]
        assert failures == [], failures

    def _begin_process(self) -> None:
        """The next process is another writer."""
        self.writer = uuid4().hex
        self.is_new_process = True

    def send(self, crash: str | None = None) -> int:
        """Send what is dirty; return the number of rounds. `crash`: "before climbed", "after sent"
        and the like, of a method of the state, or "before write", "after write".
        """
        topics = {name: name for name in self.views}
        state: Any = _CountingState(self.state, self)
        turn = state.take(self.writer)
        if self.is_new_process:
            self._read_topics(state, turn)
            self._view_clocks = None
        self.is_new_process = False
        self._read_clocks(state)
        state.advance(turn, self.clocks)
        self.clocks |= state.clocks()
        when, _, method = (crash or "").partition(" ")
        if crash and method != "write":
            state = _CrashingState(state, method, when)
        if self.interrupt is not do_nothing:
            state = _InterruptedState(state, self.interrupt)
        emission = Emission(self.plan, state, "", topics, "documents", turn)

        def write(records: Sequence[Outgoing]) -> None:
            self.interrupt()
            if crash == "before write":
                raise Crash
            for record in records:
                self._receive(record)
            self.interrupt()
            if crash == "after write":
                raise Crash

        def write_again(records: Sequence[Outgoing]) -> None:
            for record in records:
                self._receive(record)

        report, rounds = Report(), 0
        try:
            while not report.done:
                rounds += 1
                emission.send(report, write)
        except Crash:
            self._begin_process()
            if method == "write" and self.repeats_tasks:
                with suppress(Failure):
                    again = Emission(self.plan, self.state, "", topics, "documents", turn)
                    again.send(Report(), write_again)
        else:
            assert crash is None, f"nothing came to {crash}"
        return rounds

    def _read_clocks(self, state: Any) -> None:
        """Read the clocks that are columns, as an engine does: what is taken now counts once the state has
        all that is in the log now.
        """
        views = [view for view in self.views.values() if view.clock is not None]
        if not views:
            return
        if self._view_clocks is None:
            ticks = count()
            self._view_clocks = ViewClocks(
                Ends(self), self.pipeline, state.times_seen, lambda: next(ticks) * TAKE_S
            )
        topics = [table.topic for table in self.plan.tables]
        for _ in range(2):
            times = self._view_clocks.read(views, topics, self.positions)
        for view in views:
            now = self.clocks.get(view.name, FIRST)
            self.clocks[view.name] = max(now, (times or {}).get(view.name, now))

    def _read_topics(self, state: Any, turn: Turn) -> None:
        """Read what the topics have of views that send each change once, as an engine does that begins
        without notes; of all views where the state has gone back.
        """
        blocks = []
        for view in self.views.values():
            if view.sends_once:
                state.forget_digests(turn, view.name)
            if view.sends_once or self.has_gone_back:
                records = self.sent.get(view.name, [])
                blocks.append(
                    (view.name, 0, [(key, value, offset) for _, key, value, offset in records])
                )
        read_report(mark(state, turn, self.views, blocks))
        self.has_gone_back = False

    def renew_topics(self) -> None:
        """Make the views' topics again, empty."""
        self.sent.clear()
        self.topics = {name: {} for name in self.views}

    def go_back(self) -> None:
        """Bring the state's server back without its last writes: those since `save`."""
        with redis.Redis.from_url(self.url) as server:
            server.flushdb()
            for key, dumped in self.saved.items():
                server.restore(key, 0, dumped)
        self._begin_process()
        self.has_gone_back = True
        for view in self.views.values():
            if view.clock is not None:
                self.clocks.pop(view.name, None)

    def save(self) -> None:
        """Remember what the state has."""
        with redis.Redis.from_url(self.url) as server:
            self.saved = {key: server.dump(key) for key in server.scan_iter()}

    def batch(self, *only: str | Partition) -> None:
        """Apply and send."""
        self.apply(*only)
        self.send()

    def _receive(self, record: Outgoing) -> None:
        view = self.views[record.topic]
        table = self._codecs[view.name]
        row_id = table.row_id(record.key)
        self.emitted.append((view.name, row_id, record.value))
        if is_final(self.topics[view.name].get(row_id)):
            self.changed_after_closing.append((view.name, row_id))
        sent = self.sent.setdefault(view.name, [])
        sent.append((row_id, record.key, record.value, len(sent)))
        if record.value is None:
            self.topics[view.name].pop(row_id, None)
        else:
            after = json.loads(record.value, parse_float=Decimal)["after"]
            assert isinstance(after, dict)
            self.topics[view.name][row_id] = table.document(_after(record.value)).decode()

    def forget_emitted(self) -> None:
        self.emitted.clear()

    @property
    def emitted_ids(self) -> list[str]:
        """Which documents were sent, as often as they were: view/id."""
        return [f"{view}/{row_id}" for view, row_id, _ in self.emitted]

    def truncate(self, name: str) -> None:
        """Truncate a table: its topic gets no record of it; the connector writes one to the topic of
        TRUNCATEs.
        """
        self.connection.execute(f"TRUNCATE lib.{name}".encode())
        self.rows[name] = {}
        row = {"table_name": f"lib.{name}", "lsn": f"0/{self.lsn + 1:X}"}
        with Topics(self.pipeline.kafka) as topics:
            topics.write(
                self.pipeline.topic("cdc.truncation"),
                [(_json({"table_name": row["table_name"]}), _json({"after": row}))],
            )

    def clear(self, name: str) -> None:
        """Start a table over, as after a TRUNCATE, whose floor is the next change."""
        table = next(table for table in self.plan.tables if table.name == name)
        self.floors[table.topic] = self.lsn + 1
        self.sink.clear(table)
        self.sink.prepare(table)

    # What must hold

    def queried(self, view: View, clock: int | None = None) -> Documents:
        """The documents as Postgres computes them now. clock: another one than in `clocks`"""
        query = row_query(view_table(self.pipeline, view)).as_string(None)
        self.connection.execute("SET extra_float_digits = 1")
        if view.has_clock:
            now = text_of(self.clocks[view.name] if clock is None else clock)
            self.connection.execute(
                "SELECT set_config(%s, %s, false)", [clock_setting(view.name), now]
            )
        rows = self.connection.execute(query.encode()).fetchall()
        return {row_id: text.replace("\n", " ") for row_id, text in rows}

    def differences(self) -> list[tuple[str, str, str | None, str | None]]:
        """Documents that aren't what Postgres says: view, id, both. Those of closed windows are what they were."""
        return [
            (name, row_id, current.get(row_id), expected.get(row_id))
            for name, view in self.views.items()
            for expected in [self.queried(view)]
            for current in [without_final(self.topics[name])]
            for row_id in sorted(expected.keys() | current.keys())
            if expected.get(row_id) != current.get(row_id)
        ]

    def late(self, view: str) -> list[LateChange]:
        """The changes that came after windows of a view had closed, in the order in which they came."""
        return self.state.late(view)[::-1]

    @property
    def state(self) -> State:
        return self.sink.open_state()

    def repetitions(self) -> list[tuple[str, str]]:
        """Views that send each change once, and ids of documents of which they didn't."""
        wrong = []
        for view in self.views.values():
            if view.sends_once:
                changes = [
                    (
                        row_id,
                        "" if value is None else json.loads(value)["op"],
                        value and _after(value),
                    )
                    for row_id, _, value, _ in self.sent.get(view.name, [])
                ]
                wrong += [(view.name, str(row_id)) for row_id in repetitions(changes)]
        return wrong

    def check(self) -> None:
        """Each document equals Postgres' own query, views that send each change once have, and nothing
        is left to do in the state.
        """
        assert self.differences() == []
        assert self.repetitions() == []
        assert self.changed_after_closing == []
        with redis.Redis.from_url(self.url, decode_responses=True) as server:
            remaining = [
                key
                for kind in ("_pending", "_dirty:*", "_gone:*")
                for key in server.scan_iter(f"{PREFIX}:{kind}")
            ]
        assert remaining == []

    def settle(self) -> None:
        """Apply and send all that is in the log, and check; also that windows close as they are, with all
        rows that came while the state's clock was before.
        """
        self.apply()
        started = self.state.clocks()
        opened = {
            view.name: {
                row_id: text
                for row_id, text in self.queried(view, started.get(view.name, FIRST)).items()
                if not is_final(self.topics[view.name].get(row_id))
            }
            for view in self.views.values()
            if view.grouping is not None and view.grouping.closing is not None
        }
        self.send()
        self.check()
        closed = [
            (name, row_id, json.loads(text) | {"final": True}, json.loads(current or ""))
            for name, documents in opened.items()
            for row_id, text in documents.items()
            if is_final(current := self.topics[name].get(row_id))
        ]
        assert [wrong for wrong in closed if wrong[2] != wrong[3]] == []

    def document(self, view: str, row_id: object) -> Any:
        """A document as it was sent last; None if there is none."""
        text = self.topics[view].get(str(row_id))
        return None if text is None else json.loads(text, parse_float=Decimal)

    def index_keys(self) -> list[str]:
        """The keys of all indexes, lists and tallies of the state."""
        with redis.Redis.from_url(self.url, decode_responses=True) as server:
            return sorted(server.scan_iter(f"{PREFIX}:_x:*"))


def run_random_history(
    history: History,
    seed: int,
    tables: str,
    views: str,
    change: Callable[[random.Random, int], None],
    touch: Callable[[random.Random, int], None],
) -> None:
    """Compare documents with their query through a random history, with crashes and lost states. Clocks
    of commits go with it.

    change  makes random changes at a time, in microseconds since 1970, and may apply some of them
    touch   changes a row so that each view has something to send
    """
    rng = random.Random(seed)
    history.connection.execute(tables.encode())
    history.declare(views)
    now = microseconds("1969-12-31T20:00:00.000000Z")
    assert now is not None
    history.chunk_rows = rng.choice([1, 3, 500])
    history.repeats_tasks = True
    history.save()
    for _ in range(CHANGES):
        now += rng.choice([0, 0, 1, 1_800_000_000, 3_600_000_000])
        change(rng, now)
        # What follows applies all of them before it sends anything.
        history.clocks |= {
            view.name: now for view in history.views.values() if view.has_clock and not view.clock
        }
        if rng.random() < 0.15:
            history.settle()
        elif rng.random() < 0.3:
            # A step that is reached; the send after it has all to do.
            touch(rng, now)
            history.apply()
            history.send(f"{rng.choice(['before', 'after'])} {rng.choice(STEPS)}")
        elif rng.random() < 0.1:
            history.save()
        elif rng.random() < 0.1:
            # The state's server comes back without its last writes. Nothing is sent until it has all
            # that was in the log.
            history.go_back()
            history.apply()
    history.settle()


class Ends(MemoryLog):
    """The ends of a history's log, and a heartbeat."""

    def __init__(self, history: History) -> None:
        super().__init__(SimulatedClock())
        self._history = history
        self.create(history.pipeline.heartbeat_topic)
        source = {"ts_ms": int(time.time() * 1000), "lsn": 1}
        value = {"op": "u", "after": {"pipeline": NAME}, "source": source}
        self.append(history.pipeline.heartbeat_topic, 0, b"{}", _json(value))

    def ends(self, topics: Sequence[str]) -> dict[str, Position]:
        tables = {table.topic: table.name for table in self._history.tables}
        return {
            topic: Position(
                self._history.topic_ids[topic],
                tuple(
                    self._history.ends.get((tables[topic], number), 0)
                    for number in range(PARTITIONS)
                ),
            )
            if topic in tables
            else super(Ends, self).ends([topic])[topic]
            for topic in topics
        }


def is_final(document: str | None) -> bool:
    """Whether the window of a document is closed."""
    return document is not None and json.loads(document).get("final") is True


def without_final(documents: Documents) -> Documents:
    """The documents of open windows, and all that are of none."""
    return {row_id: text for row_id, text in documents.items() if not is_final(text)}


def repetitions(changes: Iterable[tuple[object, str, object]]) -> list[object]:
    """Return the ids of documents that a topic has twice in succession, or with another `op` than `c`
    for one that appears and `u` for one that changes.

    changes: in order, a document's id, the record's `op` and its row; None for a tombstone
    """
    held: dict[object, object] = {}
    wrong = []
    for row_id, op, row in changes:
        expected = "u" if row_id in held else "c"
        if row == held.pop(row_id, None) or (row is not None and op != expected):
            wrong.append(row_id)
        if row is not None:
            held[row_id] = row
    return wrong


@cache
def _producer(bootstrap: str) -> Any:
    return kafka.KafkaProducer(bootstrap_servers=bootstrap)


def _wire(column: Column) -> sql.Composable:
    form = WIRE.get(base_type(column.type), "{0}")
    if "." in base_type(column.type):
        form = "{0}::text"
    return sql.SQL(form).format(sql.Identifier(column.name))


def _json(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode()


def _after(value: bytes) -> bytes:
    """The row of a document's envelope, as text."""
    head, tail = b'{"op":"u","after":', b',"source":{"schema":"view"'
    assert value.replace(b'"c"', b'"u"', 1).startswith(head)
    return value[len(head) : value.rindex(tail)]
