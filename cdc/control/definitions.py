"""Compare the definitions of captured tables with the journal, with or without event triggers.

Event triggers record a change at once, but they miss some: changes that a command makes to a table
that it doesn't name, and every change while they are disabled.

In:  a connection of the tables' owner, or of `source.reader`. Out: entries of `cdc.ddl`, which
arrive through the log like an event trigger's.
Invariant: a failure is logged and retried. Nothing but the caller waits.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import psycopg
import structlog

from cdc.config.settings import Pipeline
from cdc.control.repetition import repeating
from cdc.postgres import source
from cdc.postgres.source import Connection

COMPARE_S = 5.0
PATIENCE_S = 60.0
"""How long one comparison may take."""
Watch = Literal["event triggers", "comparison"]
WATCH = """
SELECT CASE WHEN (SELECT count(*) = 4 FROM pg_event_trigger WHERE evtenabled IN ('O', 'A')
                  AND evtname IN ('cdc_ddl', 'cdc_ddl_around', 'cdc_drop', 'cdc_rewrite')) THEN 'event triggers'
            ELSE 'comparison' END
"""
IS_OWNER = "SELECT has_function_privilege('cdc.compare_definitions()', 'EXECUTE')"
COMPARE = "SELECT cdc.compare_definitions() + cdc.compare_publications()"
COMPARE_AS_OWNER = "SELECT cdc.compare_as_owner()"
PARTITIONED = """
SELECT t.tgrelid FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid JOIN pg_namespace n ON n.nspname = 'cdc'
WHERE t.tgfoid = 'cdc.begin_truncation()'::regprocedure
  AND CASE WHEN %s THEN pg_has_role(c.relowner, 'USAGE') ELSE pg_has_role(n.nspowner, c.relowner, 'USAGE') END
ORDER BY t.tgrelid
"""
"""Only tables that this role owns, or with a reader's role the owner of the control schema. The run
of another owner adopts partitions of that owner's tables.
"""
ADOPT = "SELECT cdc.adopt_later_partitions(%s)"
ADOPT_AS_OWNER = "SELECT cdc.adopt_as_owner(%s)"
log = structlog.get_logger()


def watch(conn: Connection) -> Watch:
    """The mechanism that records a changed definition."""
    row: tuple[Watch] | None = conn.execute(WATCH).fetchone()
    assert row is not None
    return row[0]


def compare(conn: Connection) -> int:
    """Write an entry for each definition that differs from the journal, and for each table of which
    a publication left out changes for a while. Adopt new partitions. Returns the number of entries.

    Raises:
        psycopg.Error: for example while a table is locked.
    """
    is_owner = conn.execute(IS_OWNER).fetchone() == (True,)
    query = COMPARE if is_owner else COMPARE_AS_OWNER
    row: tuple[int] | None = conn.execute(query).fetchone()
    # Each in its own transaction: these lock tables, and the entries must not wait for the locks.
    _adopt(conn, is_owner=is_owner)
    return row[0] if row else 0


def _adopt(conn: Connection, *, is_owner: bool) -> None:
    failure: psycopg.Error | None = None
    for (root,) in conn.execute(PARTITIONED, [is_owner]).fetchall():
        try:
            conn.execute(ADOPT if is_owner else ADOPT_AS_OWNER, [root])
        except (psycopg.errors.LockNotAvailable, psycopg.errors.InsufficientPrivilege) as error:
            failure = failure or error
    if failure:
        raise failure


@contextmanager
def compare_periodically(load: Callable[[], Pipeline]) -> Iterator[Callable[[], float]]:
    """Compare every few seconds in a separate thread, so that nothing else waits for a locked
    table.

    Yields a function that returns the seconds since the last comparison.
    """
    compared = time.monotonic()

    def compare_once() -> None:
        nonlocal compared
        with (
            source.connect_to_read(load().source) as connection,
            source.within(connection, PATIENCE_S),
        ):
            compare(connection)
        compared = time.monotonic()

    # `cdc status` reports it if nothing has been compared for a minute.
    with repeating(
        compare_once,
        COMPARE_S,
        subject="the comparison of definitions",
        report=lambda failure: log.warning(
            "definitions_not_compared", error=failure.message, hint=failure.hint
        ),
    ):
        yield lambda: time.monotonic() - compared
