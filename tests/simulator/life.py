"""One life of a pipeline: a history is played, and at each quiet point everything must be right."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Sequence
from typing import Any

import msgspec

from cdc.apply.progress import RunState
from cdc.apply.stream import LOOK_S, Environment, Stream
from cdc.control.registrations import KEY, Captured, Registration
from cdc.errors import CdcError, SinkUnavailable
from cdc.kafka.log_reader import Block, OffsetRange
from cdc.kafka.log_refusals import Discontinued
from cdc.model.table import Table
from tests.simulator.history import History, Step
from tests.simulator.processes import Process, Processes
from tests.simulator.source import (
    HEARTBEAT,
    PARTITIONS,
    TABLES,
    TRUNCATION,
    Connector,
    Source,
)
from tests.simulator.views import KINDS, Link, Warehouse
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
        registered = Registration(tables={table.qualified: Captured() for table in TABLES})
        self.log.write(SHOP.registered_topic, [(KEY, msgspec.json.encode(registered))])
        self.connector = Connector(self.processes, self.source, self.log)
        self.link = Link(self.processes, history.seed)
        self.sink: Warehouse = KINDS[history.kind](self.link)
        self.sink.on_write = self._look
        self.readers = {table: Reader() for table in TABLES}
        self.connector_process = self.processes.spawn(self.connector.run)
        self.runs: list[Process] = []
        self.start_run()

    def play(self, steps: Sequence[Step]) -> None:
        """Play the steps, and check.

        Raises:
            Violation: what is wrong.
        """
        for step in steps:
            getattr(self, f"do_{step.kind}")(*step.numbers)
            self.processes.pass_time(step.pause_ms / 1000)
        self.do_quiet()

    def start_run(self) -> None:
        ends = MemoryEnds(self.log)
        environment = Environment(
            self.log, ends, InProcess(None, "", read=self.log.read), self.processes
        )
        self.stream = Stream(
            environment, self.sink, SHOP, lambda *_: (TABLES, {}), PLACEHOLDER, TRIGGER_S
        )
        stream = self.stream

        def run() -> None:
            while True:
                try:
                    stream.run()
                except CdcError:
                    self.processes.sleep(AGAIN_S)
                    stream.note_restart()
                else:
                    return

        self.runs.append(self.processes.spawn(run))

    # What a history is made of.

    def do_write(self, *numbers: int) -> None:
        changes = zip(*[iter(numbers)] * 4, strict=True)
        self.source.write((VERBS[verb], table, key, value) for verb, table, key, value in changes)

    def do_truncate(self, table: int) -> None:
        self.source.truncate(TABLES[table])

    def do_kill_run(self) -> None:
        self.processes.kill(self.runs.pop())
        self.start_run()

    def do_kill_connector(self) -> None:
        self.processes.kill(self.connector_process)
        self.connector_process = self.processes.spawn(self.connector.run)

    def do_quiet(self) -> None:
        """Nothing is broken from here on: in the end everything must be right."""
        self.link.away_until = 0.0
        self.link.lost_answers = 0
        self._pass_until(lambda: self.connector.is_done)
        # An idle stream looks for a TRUNCATE every second.
        self.processes.pass_time(2 * LOOK_S)
        self._pass_until(self._is_settled)
        self._check()

    def _pass_until(self, condition: Callable[[], bool]) -> None:
        until = self.processes.now + PATIENCE_S
        while not condition():
            if self.processes.now > until:
                raise Violation(f"it doesn't get to the end: {self.stream.progress}")
            self.processes.pass_time(0.5)

    def _is_settled(self) -> bool:
        progress = self.stream.progress
        return (
            progress.state is RunState.APPLYING
            and progress.lag_records == 0
            and all(self._has_all(table) for table in TABLES if table.qualified not in progress.aside)
        )

    def _has_all(self, table: Table) -> bool:
        stored = self.sink.stored.get(table.qualified)
        end = self.log.ends([table.topic])[table.topic]
        return (stored.position if stored else None) == (end if any(end.offsets) else None)

    def _check(self) -> None:
        for table in TABLES:
            view = self.view(table)
            rows = self.source.rows[table]
            if view != rows:
                raise Violation(f"{table.qualified} has {view}, Postgres {rows}")

    def view(self, table: Table) -> dict[str, Row]:
        view = self.sink.views.get(table.qualified, {})
        return {key: json.loads(text) for key, text in view.items()}

    def _look(self) -> None:
        """Look as a reader does."""
        for table, reader in self.readers.items():
            reader.check(self.view(table))


VERBS = ("put", "keep", "delete", "rename")


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
