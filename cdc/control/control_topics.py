"""Read the control topics: floors of tables, their definitions over time, and how the connector
sends them.

In:  the topics of `cdc.truncation` and `cdc.ddl`, the registration. Out: floors, definitions, and
whether they have changed.
Invariant: a `has_changed` and `read` after the end of a batch is known miss nothing that was
committed before a change in the batch. The connector writes both in commit order, and `read` waits
for a transaction that the broker hasn't completed in every topic.
"""

from collections.abc import Mapping

from cdc.config.settings import Pipeline
from cdc.control import registrations
from cdc.control.floors import Floors
from cdc.control.registrations import Registration
from cdc.errors import KafkaUnavailable
from cdc.kafka.records import Record
from cdc.kafka.tail import Tail
from cdc.kafka.topics import Topics
from cdc.model.clock import Clock
from cdc.model.position import Position
from cdc.postgres.table_definition import Definition, lsn_number, parse

WAIT_S = 20.0
POLL_S = 0.005


class Truncations:
    """Floors alone, for readers that don't need the journal. One instance per thread."""

    def __init__(self, pipeline: Pipeline, kafka: Topics, clock: Clock | None = None) -> None:
        self._clock = clock or Clock()
        self._kafka = kafka
        self._pipeline = pipeline
        self._truncation = pipeline.topic("cdc.truncation")
        self._ends_read: dict[str, Position] = {}
        self._lsns: dict[str, tuple[int, int]] = {}
        """By table: the offset and the LSN of its last TRUNCATE."""
        self._tails = {
            self._truncation: Tail(
                kafka,
                self._truncation,
                begin=self._lsns.clear,
                take=self._take,
                now=self._clock.time,
            )
        }
        self.registration = Registration()

    @property
    def topics(self) -> list[str]:
        """The topics whose ends `has_changed` needs."""
        return [*self._tails, self._pipeline.registered_topic]

    @property
    def floors(self) -> Floors:
        """The floors of all tables, as of the last `read`."""
        start = self._start(self._truncation)
        lsns = {table: lsn for table, (offset, lsn) in self._lsns.items() if offset >= start}
        return Floors(self.registration.epoch, lsns, self.registration.events)

    def read(self) -> None:
        """Read the records written since the last call. Raises ConnectorError."""
        ends = self._settled_ends()
        registered_topic = self._pipeline.registered_topic
        if ends[registered_topic] != self._ends_read.get(registered_topic):
            self.registration = registrations.read(self._kafka, self._pipeline) or Registration()
        self._ends_read = ends
        for topic, tail in self._tails.items():
            tail.read(ends[topic])

    def has_changed(self, ends: Mapping[str, Position] | None = None) -> bool:
        """Whether there is something new to `read`. `ends`: the ends of the topics' logs."""
        current_ends = ends or self._kafka.log_ends(self.topics)
        registered_topic = self._pipeline.registered_topic
        renewed = current_ends[registered_topic] != self._ends_read.get(registered_topic)
        return renewed or any(tail.has_changed(current_ends) for tail in self._tails.values())

    def _start(self, topic: str) -> int:
        """The first offset with a record of the current server. LSNs of different servers can't be
        compared.
        """
        end = self._ends_read.get(topic)
        return sum(self.registration.start(topic, end.topic_id)) if end else 0

    def _settled_ends(self) -> dict[str, Position]:
        """The ends of the topics, once every record is committed or aborted. The broker writes a
        transaction's markers into one topic after another.
        """
        deadline = self._clock.monotonic() + WAIT_S
        log_ends = self._kafka.log_ends(self.topics)
        while (ends := self._kafka.ends(self.topics)) != log_ends:
            if self._clock.monotonic() > deadline:
                raise KafkaUnavailable(
                    f"A transaction in {' or '.join(self.topics)} has been open for {WAIT_S:.0f} s.",
                    hint="is the connector's worker alive? it is tried again",
                )
            self._clock.sleep(POLL_S)
            log_ends = self._kafka.log_ends(self.topics)
        return ends

    def _take(self, record: Record) -> None:
        if row := record.change.get("after"):
            self._lsns[row["table_name"]] = record.offset, lsn_number(row["lsn"])


class Control(Truncations):
    """Floors, and the definitions in the order of the journal."""

    def __init__(self, pipeline: Pipeline, kafka: Topics, clock: Clock | None = None) -> None:
        super().__init__(pipeline, kafka, clock)
        self._ddl = pipeline.topic("cdc.ddl")
        self._definitions: list[tuple[int, Definition]] = []
        self._tails[self._ddl] = Tail(
            kafka,
            self._ddl,
            begin=self._definitions.clear,
            take=self._journal,
            now=self._clock.time,
        )

    @property
    def definitions(self) -> tuple[Definition, ...]:
        """The definitions of the current server, in the order of the journal."""
        start = self._start(self._ddl)
        return tuple(definition for offset, definition in self._definitions if offset >= start)

    def _journal(self, record: Record) -> None:
        if record.offset >= self._start(self._ddl) and (definition := parse(record.value or b"")):
            self._definitions.append((record.offset, definition))
