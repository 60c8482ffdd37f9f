"""Read your own writes: wait until a view holds everything that was committed before a token.

    connection.commit()
    token = client.token(connection)
    cache = client.view("shop.yaml", "cache", "public.orders")     # once per process; threads may
                                                                   share it
    client.wait_for(cache, token, timeout_s=2)

The token's message, or a later one, in the log proves that the caller's changes are in the log
before it (`cdc.client.tokens`): the view's position has to reach the end that the table's topic has
then.

The view's position is stored with its data, so the answer is right whichever process applies the
changes, and after any restart. Nobody waits for a heartbeat. The topic's end is the end of all
records, committed in Kafka or not: transaction markers reach partitions one by one.

A view's position passes a row in quarantine: `cdc status` says which views are degraded.
"""

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol, runtime_checkable

from cdc.client.tokens import Token, TokenEnds, parse_message
from cdc.config.settings import Pipeline
from cdc.control.control_topics import Truncations
from cdc.errors import (
    KafkaUnavailable,
    ReadTimeout,
    SettingsError,
    SinkUnavailable,
)
from cdc.generations.pause import read_pauses
from cdc.generations.registry import Pause
from cdc.kafka.log_refusals import refuse_incomparable
from cdc.kafka.topics import Topics
from cdc.model.position import Position, distance
from cdc.model.table import Table
from cdc.postgres import table_survey
from cdc.runtime.context import Context
from cdc.sink.contract import Sink
from cdc.sink.factory import late_topics, open_documents, state_reader

POLL_S = 0.01


@runtime_checkable
class Searchable(Protocol):
    """A sink whose searches see changes later than its reads by id."""

    def refresh(self, table: Table) -> None:
        """Make all writes visible to searches. Called by `wait_for`, in the caller's thread."""


class View:
    """A view that readers wait for: of one table, or of several, in one sink. Threads may share it.

    A document has two hops: a token is in its topic once the view's documents are current in all
    topics that they are made of.
    """

    def __init__(self, pipeline: Pipeline, sink: Sink, table: Table) -> None:
        self.sink = sink
        self.table = table
        self._pipeline = pipeline
        self._kafka = Topics(pipeline.kafka)
        self._control = Truncations(pipeline, self._kafka)
        self._control.read()
        self._message_topic = pipeline.message_topic
        self._read_offset = 0
        self._lock = threading.Lock()
        self._token_ends = TokenEnds()
        self._source_topics = (
            [topic for _, topic in table.derivation.tables] if table.derivation else [table.topic]
        )
        self._read_documents = open_documents(pipeline) if table.derivation else None
        self._read_waiting: Callable[[], Mapping[str, list[str]]] = (
            state_reader(pipeline, lambda state: state.waiting()) if table.derivation else dict
        )
        self._start_at_newest()

    def close(self) -> None:
        """Close the connections to Kafka and the sink."""
        self._kafka.close()
        self.sink.close()

    def barrier(self, token: Token) -> tuple[Position, int] | None:
        """Return the position and the floor that the view has to pass.

        None: the token isn't in the log yet. Raises SettingsError for a view that waits, since it
        doesn't fit its tables any more.
        """
        with self._lock:
            if self._token_ends.lacks(token):
                self._read_messages()
            ends = self._token_ends.ends(token)
            if not ends:
                return None
            floor = self._control.floors.number(self.table.qualified)
            if self._read_documents is None:
                return ends[self.table.topic], floor
            notes = self._read_documents()
            topic = self.table.topic
            if late_topics(notes, self.table, ends, self._control.floors.number):
                self._refuse_waiting()
                return None
            return self._kafka.log_ends([topic])[topic], floor

    def has_passed(self, barrier: Position, floor: int) -> bool:
        """Whether the view has passed a barrier.

        Raises ConnectorError when it never will, since its topic was recreated.
        """
        lag = distance(self.sink.position(self.table), barrier, floor)
        refuse_incomparable(self.sink.name, self.table, lag)
        return lag.reached

    def _refuse_waiting(self) -> None:
        name = self.table.qualified
        if name in (waiting := self._read_waiting()):
            reason, hint = waiting[name]
            raise SettingsError(f"{name} waits, so it will not show them: {reason}", hint=hint)

    def read_pause(self) -> Pause | None:
        """Read whether the sink is paused; None also while Kafka is away."""
        with self._lock, suppress(KafkaUnavailable):
            return read_pauses(self._pipeline, self._kafka).get(self.sink.name)
        return None

    def _start_at_newest(self) -> None:
        """Start at the newest message in the topic: it proves all earlier tokens."""
        if newest := self._kafka.last_record(self._message_topic):
            self._read_offset = newest.offset
            self._read_messages()

    def _read_messages(self) -> None:
        end = self._kafka.ends([self._message_topic])[self._message_topic].offsets[0]
        if end == self._read_offset:
            return
        newest: dict[str, Token] = {}
        messages = self._kafka.read_range(self._message_topic, self._read_offset, end)
        for token in filter(None, map(parse_message, messages)):
            if self._token_ends.lacks(token) and token.lsn >= newest.get(token.server, token).lsn:
                newest[token.server] = token
        if not newest:
            self._read_offset = end
            return
        # Floors are read after the message: a truncation before the message is in its topic by now.
        if self._control.has_changed():
            self._control.read()
        ends = self._kafka.log_ends(self._source_topics)
        for token in newest.values():
            self._token_ends.add(token, ends)
        # Last: a message whose ends can't be asked for now is read again.
        self._read_offset = end


def view(path: str | Path, sink: str, table: str) -> View:
    """Open the view of a table (schema.table), or of several (view.NAME), in a sink of a pipeline file.

    Environment references are filled in.

    Raises:
        SettingsError: the file has no such sink or table. ConnectorError: Kafka can't be reached.
    """
    context = Context(Path(path), None)
    (destination,) = context.sinks([sink])
    pipeline = context.pipeline
    everything = [
        *table_survey.tables_by_name_only(pipeline),
        *table_survey.views_by_name_only(pipeline),
    ]
    in_sink = [candidate for candidate in everything if candidate.is_in(sink)]
    return View(pipeline, destination, table_survey.table_named(in_sink, table))


def wait_for(view: View, token: str, timeout_s: float, *, search: bool = False) -> None:
    """Wait until the view holds everything committed before the token.

    With `search`, wait until a search finds it, too.

    A server that can't be reached is polled again until timeout_s is over.

    Raises:
        ReadTimeout: not within timeout_s. ConnectorError: it never will. SettingsError: the view
        waits, since it doesn't fit its tables any more.
    """
    parsed = Token.parse(token)
    deadline = time.monotonic() + timeout_s
    reached: tuple[Position, int] | None = None
    while True:
        try:
            reached = reached or view.barrier(parsed)
            if reached and view.has_passed(*reached):
                if search and isinstance(view.sink, Searchable):
                    view.sink.refresh(view.table)
                return
        except (KafkaUnavailable, SinkUnavailable):
            if time.monotonic() > deadline:
                raise
        if time.monotonic() > deadline:
            subject = f"{view.sink.name} has not applied" if reached else "the log has not brought"
            pause = view.read_pause()
            reason = f" {view.sink.name} is paused by {pause.by}." if pause else ""
            command = (
                f"cdc resume {view.sink.name} ends that"
                if pause
                else "cdc status names the slow hop"
            )
            raise ReadTimeout(
                f"{subject} all changes of {view.table.qualified} that the token stands for within"
                f" {timeout_s:g} s.{reason}",
                hint=f"read from Postgres this time; {command}",
            )
        time.sleep(POLL_S)
