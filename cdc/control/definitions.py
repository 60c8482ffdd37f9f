"""Definitions of captured tables, compared with the journal where no event triggers write it.

In:  a connection of the tables' owner. Out: entries of `cdc.ddl`, which come through the log as an event trigger's do.
Invariant: whatever fails here is told and tried again; nothing waits for it but who asked.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import psycopg
import structlog

from cdc.config.settings import Pipeline
from cdc.errors import SourceError
from cdc.postgres import source
from cdc.postgres.source import Connection
from cdc.sink.remedy import classify

LOOK_S = 5.0
PATIENCE_S = 60.0
"""How long one comparison may take."""
Watch = Literal["event triggers", "comparison", "nothing"]
WATCH = """
SELECT CASE WHEN (SELECT count(*) = 4 FROM pg_event_trigger WHERE evtenabled IN ('O', 'A')
                  AND evtname IN ('cdc_ddl', 'cdc_ddl_around', 'cdc_drop', 'cdc_rewrite')) THEN 'event triggers'
            WHEN to_regprocedure('cdc.compare_definitions()') IS NULL THEN 'nothing'
            ELSE 'comparison' END
"""
PARTITIONED = """
SELECT t.tgrelid FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid
WHERE t.tgfoid = 'cdc.begin_truncation()'::regprocedure AND pg_has_role(c.relowner, 'USAGE') ORDER BY t.tgrelid
"""
"""Another owner's are for that owner's run to take in."""
log = structlog.get_logger()


def watch(conn: Connection) -> Watch:
    """What notes it when a definition changes; "nothing" before `cdc migrate`."""
    row: tuple[Watch] | None = conn.execute(WATCH).fetchone()
    return row[0] if row else "nothing"


def compare(conn: Connection) -> int:
    """Note what isn't as the journal has it, and take new partitions in; how many entries that took.

    Raises:
        SourceError: `cdc migrate` has to run first. psycopg.Error: among others while a table is locked.
    """
    kind = watch(conn)
    if kind == "event triggers":
        return 0
    if kind == "nothing":
        raise SourceError("Nothing notes how the captured tables change.", hint="cdc -p FILE migrate")
    row: tuple[int] | None = conn.execute("SELECT cdc.compare_definitions()").fetchone()
    # By itself: it locks tables, and what has been noted must not depend on that.
    _adopt(conn)
    return row[0] if row else 0


def _adopt(conn: Connection) -> None:
    failure: psycopg.Error | None = None
    for (root,) in conn.execute(PARTITIONED).fetchall():
        try:
            conn.execute("SELECT cdc.adopt_later_partitions(%s)", [root])
        except (psycopg.errors.LockNotAvailable, psycopg.errors.InsufficientPrivilege) as error:
            failure = failure or error
    if failure:
        raise failure


@contextmanager
def compare_periodically(load: Callable[[], Pipeline]) -> Iterator[Callable[[], float]]:
    """Compare every few seconds in a thread of its own: a table that is locked keeps nobody else waiting.

    Yields what tells for how many seconds now nothing has been compared, whatever the reason.
    """
    looks = _Looks(load)
    threading.Thread(target=looks.go_on, name="definitions", daemon=True).start()
    try:
        yield lambda: time.monotonic() - looks.compared
    finally:
        looks.ending.set()


class _Looks:
    def __init__(self, load: Callable[[], Pipeline]) -> None:
        self.ending, self.compared = threading.Event(), time.monotonic()
        self._load = load

    def go_on(self) -> None:
        reported: str | None = None
        while not self.ending.wait(LOOK_S):
            try:
                with source.connect(self._load().source.dsn) as connection, source.within(connection, PATIENCE_S):
                    compare(connection)
                self.compared, reported = time.monotonic(), None
            # Whatever it is: this thread has to go on, and `cdc status` says when nothing was compared for long.
            except Exception as error:
                failure = classify(error, "the comparison of definitions")
                if failure.message != reported:
                    log.warning("definitions_not_compared", error=failure.message, hint=failure.hint)
                reported = failure.message
