"""One life of a pipeline: a history is played, and at each quiet point everything must be right."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Sequence
from copy import deepcopy
from typing import Any

from cdc.apply.progress import RunState
from cdc.apply.stream import LOOK_S, Environment, Stream
from cdc.control import registrations
from cdc.control.registrations import Captured, Registration
from cdc.errors import CdcError, Fenced
from cdc.generations.registry import Registry
from cdc.generations.rollback import rollback, settle_rollback
from cdc.kafka.log_reader import Block, OffsetRange
from cdc.kafka.log_refusals import Discontinued
from cdc.model.position import ViewCheckpoint
from cdc.model.table import Table
from cdc.model.trace import kind, trace
from cdc.rebuild.build import Rebuild
from tests.simulator.history import VERBS, History, Step
from tests.simulator.processes import Process, Processes
from tests.simulator.source import (
    HEARTBEAT,
    PARTITIONS,
    TABLES,
    TRUNCATION,
    Connector,
    Source,
    floor_record,
)
from tests.simulator.views import KINDS, Link, Place, Server, View
from tests.support.envelopes import PLACEHOLDER, Row
from tests.support.histories import Reader
from tests.support.pipelines import pipeline
from tests.support.simulated import InProcess, MemoryEnds, MemoryLog

SHOP = pipeline("shop", "postgresql://127.0.0.1:1/x", *(table.qualified for table in TABLES))
TRIGGER_S = 0.2
AGAIN_S = 10.0
"""After so long a run that has failed is started again."""
PATIENCE_S = 120.0
"""How long everything may take to be right once nothing is broken any more."""


class Violation(AssertionError):
    """Something isn't as it was promised."""


class SlowLog(MemoryLog):
    """A log whose answers take time, in which it may become another one."""

    def __init__(self, processes: Processes) -> None:
        super().__init__(processes)
        self._processes = processes

    def read(self, bootstrap: str, ranges: Sequence[OffsetRange]) -> Generator[Block]:
        self._processes.sleep(0.002)
        for block in super().read(bootstrap, ranges):
            self._processes.sleep(0.002)
            yield block


class Life:
    """Everything that there is in a history."""

    def __init__(self, history: History) -> None:
        self.processes = Processes()
        self.source = Source(is_identity_full=history.is_identity_full)
        self.log = SlowLog(self.processes)
        for topic, partitions in PARTITIONS.items():
            self.log.create(topic, partitions)
        for topic in _control_topics():
            self.log.create(topic)
        self.registration = Registration(tables={table.qualified: Captured() for table in TABLES})
        registrations.write(self.log, SHOP, self.registration)
        self.connector = Connector(
            self.processes, self.source, self.log, is_exactly_once=history.is_exactly_once
        )
        self.link = Link(self.processes, history.seed)
        self.server = Server()
        self.make_sink = KINDS[history.kind]
        self.readers = {table: Reader() for table in TABLES}
        self.saved: Server | None = None
        self.excused: set[str] = set()
        """Tables that may be refused: something was done to their topics that loses records."""
        self.goes_back = False
        """Whether what readers have seen doesn't bind the views, until the next quiet point."""
        self.seen: list[str] = []
        """What readers must not see, and have seen."""
        self.errors: list[CdcError] = []
        """What ended streams and commands."""
        self.connector_process = self.processes.spawn(self.connector.run)
        self.command: Process | None = None
        self.runs: list[Process] = []
        self.start_run()

    def play(self, steps: Sequence[Step]) -> None:
        """Play the steps, and check.

        Raises:
            Violation: what is wrong.
        """
        for step in steps:
            getattr(self, f"do_{step.kind}")(*step.numbers)
            self.pass_time(step.pause_ms / 1000)
        self.do_quiet()

    def pass_time(self, seconds: float) -> None:
        self.processes.pass_time(seconds)
        if self.seen:
            raise Violation(self.seen[0])

    def sink(self) -> View:
        """The destination, as a new process sees it."""
        sink = self.make_sink(self.server, self.link)
        sink.on_write = self._look
        return sink

    def environment(self) -> Environment:
        records = InProcess(NO_SPARK, "", read=self.log.read)
        return Environment(self.log, MemoryEnds(self.log), records, self.processes)

    def start_run(self) -> None:
        """Start `cdc run` as its supervisor does, beside one that may still be there."""
        self.stream = stream = Stream(
            self.environment(), self.sink(), SHOP, describe, PLACEHOLDER, TRIGGER_S
        )

        def run() -> None:
            while True:
                try:
                    stream.run()
                except CdcError as error:
                    self.errors.append(error)
                    if isinstance(error, Fenced):
                        return
                    self.processes.sleep(AGAIN_S)
                    stream.note_restart()
                else:
                    return

        self.runs.append(self.processes.spawn(run))

    def start_command(self, work: Callable[[], object]) -> None:
        """Start a command of a person, unless one is at work."""

        def run() -> None:
            try:
                work()
            except CdcError as error:
                self.errors.append(error)

        if self.command is None or not self.command.is_running:
            self.command = self.processes.spawn(run)

    def restart_connector(self) -> None:
        self.processes.kill(self.connector_process)
        self.connector_process = self.processes.spawn(self.connector.run)

    # What happens to the source.

    def do_write(self, *numbers: int) -> None:
        changes = zip(*[iter(numbers)] * 4, strict=True)
        self.source.write((VERBS[verb], table, key, value) for verb, table, key, value in changes)

    def do_truncate(self, table: int) -> None:
        self.source.truncate(TABLES[table])

    # What happens to the connector and to Kafka.

    def do_kill_connector(self) -> None:
        self.restart_connector()
        # Without transactions it repeats what it has sent since it has stored its offset.
        self.goes_back |= not self.connector.is_exactly_once

    def do_repeat(self, transactions: int) -> None:
        """The connector has lost its newest offsets: it sends transactions again."""
        self.connector.stored = max(self.connector.slot_start, self.connector.stored - transactions)
        self.restart_connector()
        self.goes_back = True

    def do_resend(self, table: int) -> None:
        self.connector.snapshots.append(TABLES[table])

    def do_lose_slot(self) -> None:
        """What isn't in Kafka is lost, and a new snapshot replaces what is there."""
        self.processes.kill(self.connector_process)
        self.connector.abandon()
        self.connector.stored = len(self.source.wal)
        self.source.lsn += 1
        self.connector.slot_lsn = self.source.lsn
        self.connector.slot_start = self.connector.stored
        for table in TABLES:
            topic, partition, key, value = floor_record(table, self.source.lsn)
            self.log.append(topic, partition, key, value)
        self.registration = self.registration.renew(
            self.registration,
            self.registration.tables,
            self.log.log_ends([table.topic for table in TABLES]),
            moved=False,
        )
        registrations.write(self.log, SHOP, self.registration)
        self.connector.snapshots[:] = TABLES
        self.connector_process = self.processes.spawn(self.connector.run)
        self.goes_back = True

    def do_compact(self, table: int) -> None:
        self.log.compact(TABLES[table].topic)

    def do_delete_beginning(self, table: int, offset: int) -> None:
        topic = TABLES[table].topic
        for partition in self.log.topics[topic].partitions:
            partition.delete_before(offset)
        self.excused.add(TABLES[table].qualified)

    def do_recreate(self, table: int) -> None:
        """A topic is deleted and made again; its table's rows are sent again."""
        self.processes.kill(self.connector_process)
        self.connector.abandon()
        topic = TABLES[table].topic
        self.log.create(topic, PARTITIONS[topic])
        self.excused.add(TABLES[table].qualified)
        self.connector.snapshots.append(TABLES[table])
        self.connector_process = self.processes.spawn(self.connector.run)

    # What happens to the run.

    def do_kill_run(self) -> None:
        for run in self.runs:
            self.processes.kill(run)
        self.runs.clear()
        self.start_run()

    def do_freeze_run(self, tenths: int) -> None:
        """The run is stopped, is taken for dead, and goes on beside the new one."""
        self.runs[-1].frozen_until = self.processes.now + tenths / 10
        self.start_run()

    def do_night(self, hours: int) -> None:
        """Nobody works for hours."""
        self.processes.kill(self.connector_process)
        if self.command:
            self.processes.kill(self.command)
        for run in self.runs:
            self.processes.kill(run)
        self.runs.clear()
        for topic in PARTITIONS:
            self.log.compact(topic)
        self.processes.now += hours * 3600
        for topic in PARTITIONS:
            self.log.compact(topic)
        self.excused |= {table.qualified for table in TABLES}
        self.connector_process = self.processes.spawn(self.connector.run)
        self.start_run()

    # What happens to the destination.

    def do_away(self, tenths: int) -> None:
        self.link.away_until = self.processes.now + tenths / 10

    def do_lose_answers(self, count: int) -> None:
        self.link.lost_answers = count

    def do_save(self) -> None:
        if self.make_sink.goes_back:
            self.saved = deepcopy(self.server)

    def do_go_back(self) -> None:
        """The server loses its newest writes, rows and positions together."""
        if self.saved:
            self.goes_back = True
            saved = deepcopy(self.saved)
            self.server.places = saved.places
            self.server.live = saved.live

    # What people do.

    def do_rebuild(self, tables: int) -> None:
        chosen = [table for number, table in enumerate(TABLES) if tables >> number & 1]
        self.saved = None
        self.start_command(lambda: self._rebuild(chosen))

    def _rebuild(self, tables: Sequence[Table]) -> None:
        sink = self.sink()
        registry = Registry(SHOP, self.log, self.processes)
        settle_rollback(registry, sink, TABLES, KEPT_S)
        Rebuild(
            self.environment,
            SHOP,
            self.log,
            sink,
            tables,
            describe,
            PLACEHOLDER,
            KEPT_S,
            verify=lambda *_: None,
            show=lambda _: None,
            clock=self.processes,
        ).run()

    def do_rollback(self) -> None:
        registry = Registry(SHOP, self.log, self.processes)
        self.saved = None
        self.start_command(lambda: rollback(registry, self.sink(), TABLES, KEPT_S))

    def do_kill_command(self) -> None:
        if self.command:
            self.processes.kill(self.command)

    # What must be right in the end.

    def do_quiet(self) -> None:
        """Nothing is broken from here on: in the end everything must be right."""
        self.link.away_until = 0.0
        self.link.lost_answers = 0
        self.do_kill_run()
        self._settle()
        if refused := self._refused():
            self._repair(refused)
        self._check()
        self.excused.clear()
        self.saved = None
        self.goes_back = False

    def _settle(self) -> None:
        self._pass_until(lambda: self.connector.is_done)
        self._pass_until(lambda: self.command is None or not self.command.is_running)
        # An idle stream looks for a TRUNCATE every second.
        self.pass_time(2 * LOOK_S)
        self._pass_until(self._is_settled)

    def _pass_until(self, condition: Callable[[], bool]) -> None:
        until = self.processes.now + PATIENCE_S
        while not condition():
            if self.processes.now > until:
                raise Violation(f"it doesn't get to the end: {self.stream.progress} {self.errors}")
            self.pass_time(0.5)

    def _is_settled(self) -> bool:
        progress = self.stream.progress
        if progress.state is RunState.FAILED:
            # All tables are refused.
            return isinstance(self.errors[-1], Discontinued)
        return (
            progress.state is RunState.APPLYING
            and progress.lag_records == 0
            and all(
                self._has_all(table) for table in TABLES if table.qualified not in progress.aside
            )
        )

    def _has_all(self, table: Table) -> bool:
        stored = self.server.place(table).stored
        end = self.log.ends([table.topic])[table.topic]
        return (stored.position if stored else None) == (end if any(end.offsets) else None)

    def _refused(self) -> list[Table]:
        """The tables that are refused: loudly, and for a reason."""
        aside = self.stream.progress.aside
        if self.stream.progress.state is RunState.FAILED:
            aside = {table.qualified: [] for table in TABLES}
        cut = {
            table.qualified
            for table in TABLES
            if any(self.log.starts([table.topic])[table.topic].offsets)
        }
        if unexcused := aside.keys() - self.excused - cut:
            raise Violation(f"{unexcused} refused for nothing: {aside} {self.errors[-1:]}")
        return [table for table in TABLES if table.qualified in aside]

    def _repair(self, refused: Sequence[Table]) -> None:
        """Do what the refusal says: renew the topics, then rebuild the views."""
        for table in refused:
            self.do_recreate(TABLES.index(table))
        self.saved = None
        self._pass_until(lambda: self.connector.is_done)
        self.start_command(lambda: self._rebuild(refused))
        self._pass_until(lambda: self.command is not None and not self.command.is_running)
        self.do_kill_run()
        self._settle()
        self.excused.clear()
        self._refused()

    def _check(self) -> None:
        for table in TABLES:
            rows = self.source.rows[table]
            shown = self.server.place(table)
            if _parsed(shown) != rows:
                raise Violation(f"{table.qualified} has {_parsed(shown)}, Postgres {rows}")
            for (name, generation), place in self.server.places.items():
                is_current = shown.stored and _is_as_far(place.stored, shown.stored)
                if name == table.qualified and is_current and _parsed(place) != rows:
                    raise Violation(f"generation {generation} has {_parsed(place)}, not {rows}")

    def _look(self) -> None:
        """Look as a reader does."""
        for table, reader in self.readers.items():
            # A view whose first batch was cut is emptied.
            if self.goes_back or self.server.place(table).stored is None:
                reader.restart()
            try:
                reader.check(_parsed(self.server.place(table)))
            except AssertionError as error:
                self.seen.append(f"a reader of {table.qualified}: {error}")


def failure(history: History) -> str | None:
    """What goes wrong in a history; None if nothing does."""
    life = Life(history)
    try:
        life.play(history.steps)
    except Violation as violation:
        return str(violation)
    except Exception as error:
        return f"{kind(error)}: {trace(error)}"
    finally:
        life.processes.close()
    return None


def _parsed(place: Place) -> dict[str, Row]:
    return {key: json.loads(text) for key, text in place.rows.items()}


def _is_as_far(stored: ViewCheckpoint | None, shown: ViewCheckpoint) -> bool:
    return stored is not None and (stored.position, stored.floor) == (shown.position, shown.floor)


KEPT_S = 3600.0
NO_SPARK: Any = None


def describe(*_: object) -> tuple[Sequence[Table], dict[str, list[str]]]:
    return TABLES, {}


def _control_topics() -> list[str]:
    return [
        SHOP.registered_topic,
        SHOP.quarantine_topic,
        SHOP.generations_topic,
        SHOP.settings_topic,
        TRUNCATION,
        HEARTBEAT,
        SHOP.topic("cdc.ddl"),
        SHOP.topic("cdc.signal"),
    ]
