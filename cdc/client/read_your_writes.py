"""Read your own writes: wait until a view holds everything that was committed before a token.

    connection.commit()
    token = client.token(connection)
    cache = client.view("shop.yaml", "cache", "public.orders")     # once per process; threads may
                                                                   share it
    client.wait_for(cache, token, timeout_s=2)

A token is an LSN after the caller's commit, and the server whose log it is:
0/1A2B3C@SYSTEM.TIMELINE. `token` also writes a logical message with the server's name, which any
role may do. The connector sends that message, in commit order, to the topic `<pipeline>.message`. A
message there of the same server with the token's LSN or a later one proves that the caller's
changes are in the log before it: the view's position has to reach the end that the table's topic has
then. LSNs of a server that was replaced, or of one before a failover, prove nothing for the one
after it.

The view's position is stored with its data, so the answer is right whichever process applies the
changes, and after any restart. Nobody waits for a heartbeat. The topic's end is the end of all
records, committed in Kafka or not: transaction markers reach partitions one by one.

A view's position passes a row in quarantine: `cdc status` says which views are degraded.
"""

import json
import threading
import time
from base64 import b64decode
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from cdc.config.settings import Pipeline
from cdc.control.control_topics import Truncations
from cdc.errors import KafkaUnavailable, ReadTimeout, SettingsError, SinkUnavailable, SourceError
from cdc.generations.pause import read_pauses
from cdc.generations.registry import Pause, Proof, Registry
from cdc.kafka.log_refusals import refuse_incomparable
from cdc.kafka.records import Record
from cdc.kafka.topics import Topics
from cdc.model.position import Position, distance
from cdc.model.table import Table
from cdc.postgres import table_survey
from cdc.postgres.table_definition import lsn_number
from cdc.runtime.context import Context
from cdc.sink.contract import Sink
from cdc.sink.factory import late_topics, open_documents, state_reader

POLL_S = 0.01
# The LSN is read before the message is written, so the message's own LSN is later.
WRITE_MESSAGE = """
SELECT pg_current_wal_insert_lsn()::text || '@' || server,
       pg_logical_emit_message(true, 'cdc.token', server)
FROM (SELECT system_identifier || '.'
             || ('x' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::int
             AS server
      FROM pg_control_system()) AS it
"""


def token(connection: "psycopg.Connection[Any]") -> str:
    """Take a token for everything that this connection has committed. Costs one query.

    Raises:
        SourceError: the connection is in a transaction, whose changes nobody can see yet; or
        Postgres refuses.
    """
    if connection.info.transaction_status != TransactionStatus.IDLE:
        raise SourceError(
            "A token is taken after the commit, not within a transaction.",
            hint="call commit() first",
        )
    try:
        with connection.transaction(), connection.cursor(row_factory=tuple_row) as cursor:
            row = cursor.execute(WRITE_MESSAGE).fetchone()
    except psycopg.Error as error:
        raise SourceError(
            f"Postgres gives no token: {type(error).__name__}.",
            hint="take it on the primary, as a role that may write",
        ) from error
    assert row is not None
    return str(row[0])


@dataclass(frozen=True)
class Token:
    """A token's parts."""

    lsn: int
    server: str

    @classmethod
    def parse(cls, text: str) -> "Token":
        """Parse the text that `token` returns."""
        place, server = text.split("@")
        return cls(lsn_number(place), server)


Ends = Mapping[str, Position]
"""By topic."""


def ends_after(token: Token, known: Mapping[str, tuple[int, Ends]]) -> Ends | None:
    """Return ends of the topics that have everything before the token. None: no message proves them
    yet.

    known: by server, the LSN of the newest message, and the ends that topics had after it.
    """
    lsn, ends = known.get(token.server, (-1, {}))
    return ends if token.lsn <= lsn else None


def parse_message(record: Record) -> Token | None:
    """Parse the token of a message. None: the message has no LSN."""
    message = json.loads(record.value) if record.value else {}
    lsn = (message.get("source") or {}).get("lsn")
    content = (message.get("message") or {}).get("content") or ""
    return Token(int(lsn), b64decode(content).decode()) if lsn else None


@runtime_checkable
class Searchable(Protocol):
    """A sink whose searches see changes later than its reads by id."""

    def refresh(self, table: Table) -> None:
        """Make all writes visible to searches. Called by `wait_for`, in the caller's thread."""


@runtime_checkable
class Keyed(Protocol):
    """A cache: each row has a key of its own."""

    def key_prefix(self, table: Table) -> str:
        """Return what the keys of a table's rows begin with now. Called by `key_prefix`, in the caller's thread."""


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
        self._known_ends: dict[str, tuple[int, Ends]] = {}
        self._source_topics = (
            [topic for _, topic in table.derivation.tables] if table.derivation else [table.topic]
        )
        self._read_documents = open_documents(pipeline) if table.derivation else None
        self._read_waiting: Callable[[], Mapping[str, list[str]]] = (
            state_reader(pipeline, lambda state: state.waiting()) if table.derivation else dict
        )
        # The newest message in the topic proves all earlier tokens.
        if newest := self._kafka.last_record(self._message_topic):
            self._read_offset = newest.offset
            self._read_messages()

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
            if ends_after(token, self._known_ends) is None:
                self._read_messages()
            ends = ends_after(token, self._known_ends)
            if ends is None:
                return None
            floor = self._control.floors.number(self.table.qualified)
            if self._read_documents is None:
                return ends[self.table.topic], floor
            notes = self._read_documents()
            topic = self.table.topic
            if late_topics(notes, self.table, ends, self._control.floors.number):
                waiting = self._read_waiting()
                if self.table.qualified in waiting:
                    reason, hint = waiting[self.table.qualified]
                    message = f"{self.table.qualified} waits, so it will not show them: {reason}"
                    raise SettingsError(message, hint=hint)
                return None
            return self._kafka.log_ends([topic])[topic], floor

    def has_passed(self, barrier: Position, floor: int) -> bool:
        """Whether the view has passed a barrier.

        Raises ConnectorError when it never will, since its topic was recreated.
        """
        lag = distance(self.sink.position(self.table), barrier, floor)
        refuse_incomparable(self.sink.name, self.table, lag)
        return lag.reached

    def read_pause(self) -> Pause | None:
        """Read whether the sink is paused; None also while Kafka is away."""
        with self._lock, suppress(KafkaUnavailable):
            return read_pauses(self._pipeline, self._kafka).get(self.sink.name)
        return None

    def read_proof(self) -> Proof | None:
        """Read how far the live generation is proved; None when it isn't. Raises ConnectorError,
        SinkError.
        """
        with self._lock:
            registry = Registry(self._pipeline, self._kafka).read()
        proof = registry.for_sink(self.sink.name).proofs.get(self.table.qualified)
        return proof if proof and proof.holds(self.sink.position(self.table)) else None

    def _read_messages(self) -> None:
        end = self._kafka.ends([self._message_topic])[self._message_topic].offsets[0]
        if end == self._read_offset:
            return
        newest: dict[str, Token] = {}
        messages = self._kafka.read_range(self._message_topic, self._read_offset, end)
        for token in filter(None, map(parse_message, messages)):
            is_new = ends_after(token, self._known_ends) is None
            if is_new and token.lsn >= newest.get(token.server, token).lsn:
                newest[token.server] = token
        if not newest:
            self._read_offset = end
            return
        # Floors are read after the message: a truncation before the message is in its topic by now.
        if self._control.has_changed():
            self._control.read()
        ends = self._kafka.log_ends(self._source_topics)
        for token in newest.values():
            self._known_ends[token.server] = token.lsn, ends
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
    named = table_survey.table_named(everything, table)
    return View(pipeline, destination, *table_survey.tables_in([sink], [named], table))


def proved_through(view: View) -> datetime | None:
    """Return the moment through which `cdc verify`, a rebuild or a run has proved the view equal to its
    source, in UTC; None when it isn't proved. It is the first time of the line that `cdc status` has.

    Raises:
        ConnectorError: Kafka can't be reached. SinkError: the sink can't.
    """
    proof = view.read_proof()
    return datetime.fromtimestamp(proof.through, UTC) if proof else None


def key_prefix(view: View) -> str:
    """Return what keys of a cache's rows begin with now: the rest of a key is the row's id.

    On a cluster a rebuild or a rollback changes it. Call it again whenever a row is missing: if the
    answer is the same as before, there is no such row.

    Raises:
        SettingsError: the view isn't in a cache. SinkError: the cache can't be reached.
    """
    if not isinstance(view.sink, Keyed):
        raise SettingsError(
            f"{view.sink.name} is no cache, so its rows have no keys.",
            hint="open the view in a sink of the type redis",
        )
    return view.sink.key_prefix(view.table)


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
