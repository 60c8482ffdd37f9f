"""Tokens: a moment in a server's log, and what proves that everything before it is in the topics.

A token is an LSN after the caller's commit, and the server whose log it is:
0/1A2B3C@SYSTEM.TIMELINE. `token` also writes a logical message with the server's name, which any
role may do. The connector sends that message, in commit order, to the topic `<pipeline>.message`. A
message there of the same server with the token's LSN or a later one proves that the caller's
changes are in the log before it.

In:  a connection to the source; messages from the topic. Out: `Token`, the ends of topics behind it.
Invariant: LSNs of a server that was replaced, or of one before a failover, prove nothing for the one
after it.
"""

import json
from base64 import b64decode
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from cdc.errors import SourceError
from cdc.kafka.records import Record
from cdc.model.position import Position
from cdc.postgres.table_definition import lsn_number

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


class TokenEnds:
    """The newest token of each server, and the ends that topics had after it."""

    def __init__(self) -> None:
        self._ends: dict[str, tuple[int, Ends]] = {}

    def lacks(self, token: Token) -> bool:
        """Whether no message of the token's server has its LSN or a later one yet."""
        lsn, _ = self._ends.get(token.server, (-1, {}))
        return lsn < token.lsn

    def add(self, token: Token, ends: Ends) -> None:
        """Record that everything before the token is in the topics, whose ends are given."""
        self._ends[token.server] = token.lsn, ends

    def ends(self, token: Token) -> Ends | None:
        """Return ends of the topics that have everything before the token.

        None: no message proves them yet.
        """
        return None if self.lacks(token) else self._ends[token.server][1]


def parse_message(record: Record) -> Token | None:
    """Parse the token of a message. None: the message has no LSN."""
    message = json.loads(record.value) if record.value else {}
    lsn = (message.get("source") or {}).get("lsn")
    content = (message.get("message") or {}).get("content") or ""
    return Token(int(lsn), b64decode(content).decode()) if lsn else None
