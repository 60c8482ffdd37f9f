"""Read your own writes: wait until a view holds all that was committed before a token was taken.

    connection.commit()
    token = client.token(connection)
    cache = client.view("shop.yaml", "cache", "public.orders")     # once per process; threads may share it
    client.wait_for(cache, token, timeout_s=2)

A token is a place in Postgres' log after the caller's commit, and whose log it is: 0/1A2B3C@SYSTEM.TIMELINE. Taking it
also writes a logical message with the latter, which any role may do: the connector sends it, in commit order, to the
topic `<pipeline>.message`. So a message of that server there with an LSN of the token or later proves that the caller's
changes are in the log before it; where the table's topic then ends is what the view's position has to reach. Places of
a server that was replaced, or of one before a failover, prove nothing for the one after it.
That position is stored with the data, so the answer is right whichever process applies the changes, and after any
restart. It costs no waiting for a heartbeat.
The end is that of everything written, committed in Kafka or not: transaction markers reach partitions one by one.

A row in quarantine is passed by the position: `cdc status` tells which views are degraded.
"""

import json
import threading
import time
from base64 import b64decode
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from cdc.config.settings import Pipeline
from cdc.control.control_topics import Truncations
from cdc.errors import KafkaUnavailable, ReadTimeout, SinkUnavailable, SourceError
from cdc.kafka.log_continuity import refuse_other
from cdc.kafka.records import Record
from cdc.kafka.topics import Topics
from cdc.model.position import Position, distance
from cdc.model.table import Table
from cdc.postgres import source
from cdc.postgres.schema_changes import lsn_number
from cdc.runtime import Context
from cdc.sink.contract import Sink

POLL_S = 0.01
# The place is read before the message is written, so the message's own lies behind it.
MARK = """
SELECT pg_current_wal_insert_lsn()::text || '@' || server, pg_logical_emit_message(true, 'cdc.token', server)
FROM (SELECT system_identifier || '.'
             || ('x' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::int AS server
      FROM pg_control_system()) AS it
"""


def token(connection: "psycopg.Connection[Any]") -> str:
    """The place in Postgres' log that everything this connection has committed lies before, and which server's it is.

    Raises:
        SourceError: in a transaction, whose changes nobody can see yet; or Postgres refuses.
    """
    if connection.info.transaction_status != TransactionStatus.IDLE:
        raise SourceError("A token is taken after the commit, not within a transaction.", hint="call commit() first")
    try:
        with connection.transaction(), connection.cursor(row_factory=tuple_row) as cursor:
            row = cursor.execute(MARK).fetchone()
    except psycopg.Error as error:
        raise SourceError(
            f"Postgres gives no token: {type(error).__name__}.", hint="take it on the primary, as a role that may write"
        ) from error
    assert row is not None
    return str(row[0])


@dataclass(frozen=True)
class Token:
    """`server` is empty where nobody said: the place is then taken for one of the server that was heard last."""

    lsn: int
    server: str = ""

    @classmethod
    def parse(cls, text: str) -> "Token":
        place, _, server = text.partition("@")
        return cls(lsn_number(place), server)


class Heard:
    """How far each server's log has been heard of, and where a table's topic ended then."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, Position]] = {}
        self._last = ""

    def lacks(self, token: Token) -> bool:
        lsn, _ = self._known.get(token.server or self._last, (-1, None))
        return lsn < token.lsn

    def add(self, token: Token, end: Position) -> None:
        """Everything before the token is in its topic, which ends there."""
        self._known[token.server] = token.lsn, end
        self._last = token.server

    def end(self, token: Token) -> Position | None:
        """Where the topic ended once all before the token was in it; None: it isn't known to be."""
        return None if self.lacks(token) else self._known[token.server or self._last][1]


@runtime_checkable
class Searchable(Protocol):
    """A sink whose searches see changes later than its reads by id."""

    def refresh(self, table: Table) -> None:
        """Make all that is written visible to searches."""


class View:
    """One table in one sink, as a reader waits for it. Threads may share it."""

    def __init__(self, pipeline: Pipeline, sink: Sink, table: Table) -> None:
        self.sink, self.table = sink, table
        self._kafka = Topics(pipeline.kafka)
        self._control = Truncations(pipeline, self._kafka)
        self._control.read()
        self._topic, self._read = pipeline.message_topic, 0
        self._turn = threading.Lock()
        self._heard = Heard()
        self._look_back()

    def close(self) -> None:
        self._kafka.close()
        self.sink.close()

    def fence(self, token: Token) -> tuple[Position, int] | None:
        """Where the topic ended once all before the token was in it, and the table's floor then; None: it isn't yet."""
        with self._turn:
            if self._heard.lacks(token):
                self._look()
            end = self._heard.end(token)
            return (end, self._control.floors.number(self.table.qualified)) if end else None

    def holds(self, fence: Position, floor: int) -> bool:
        """Whether the view has got there. Raises ConnectorError when it never will: its offsets count other records."""
        there = distance(self.sink.position(self.table), fence, floor)
        refuse_other(self.sink.name, self.table, there)
        return there.reached

    def _look_back(self) -> None:
        """Begin at the newest message that is there: tokens of before are older than it."""
        if found := self._kafka.last(self._topic):
            self._read = found.offset
            self._look()

    def _look(self) -> None:
        end = self._kafka.ends([self._topic])[self._topic].offsets[0]
        if end == self._read:
            return
        news: dict[str, Token] = {}
        for token in filter(None, map(_token, self._kafka.between(self._topic, self._read, end))):
            if self._heard.lacks(token) and token.lsn >= news.get(token.server, token).lsn:
                news[token.server] = token
        self._read = end
        if not news:
            return
        # After the message is seen: a floor of before it is in its topic as well.
        if self._control.moved():
            self._control.read()
        until = self._kafka.ends([self.table.topic], decided=False)[self.table.topic]
        for token in news.values():
            self._heard.add(token, until)


def view(path: str | Path, sink: str, table: str) -> View:
    """The view of a table (schema.table) in a sink of a pipeline file, environment references filled in.

    Raises:
        SettingsError: for a name that the file doesn't have. ConnectorError: Kafka can't be reached.
    """
    context = Context(Path(path), None)
    (built,) = context.sinks([sink])
    return View(context.pipeline, built, source.named(source.undescribed(context.pipeline), table))


def wait_for(view: View, token: str, timeout_s: float, *, search: bool = False) -> None:
    """Return once the view holds everything committed before the token; with `search` a search finds it, too.

    A server that can't be reached is asked again until the time is over.

    Raises:
        ReadTimeout: not within timeout_s. ConnectorError: it never will.
    """
    place, deadline = Token.parse(token), time.monotonic() + timeout_s
    reached: tuple[Position, int] | None = None
    while True:
        try:
            reached = reached or view.fence(place)
            if reached and view.holds(*reached):
                if search and isinstance(view.sink, Searchable):
                    view.sink.refresh(view.table)
                return
        except (KafkaUnavailable, SinkUnavailable):
            if time.monotonic() > deadline:
                raise
        if time.monotonic() > deadline:
            what = f"{view.sink.name} has not applied" if reached else "the log has not brought"
            raise ReadTimeout(
                f"{what} all changes of {view.table.qualified} that the token stands for within {timeout_s:g} s.",
                hint="read from Postgres this time; cdc status names the slow hop",
            )
        time.sleep(POLL_S)


def _token(record: Record) -> Token | None:
    """What a message stands for; None for what has no place in the log."""
    told = json.loads(record.value) if record.value else {}
    lsn = (told.get("source") or {}).get("lsn")
    content = (told.get("message") or {}).get("content") or ""
    return Token(int(lsn), b64decode(content).decode()) if lsn else None
