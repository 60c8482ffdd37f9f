"""Definitions of captured tables, compared with the journal where no event triggers write it.

In:  a connection of the tables' owner. Out: entries of `cdc.ddl`, which come through the log as an event trigger's do.
Invariant: whatever fails here is told and tried again; nothing waits for it but who asked.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import psycopg
import structlog

from cdc import source
from cdc.errors import CdcError, SourceError
from cdc.failures import classify
from cdc.settings import Pipeline
from cdc.source import Connection

LOOK_S = 5.0
Watch = Literal["event triggers", "comparison", "nothing"]
WATCH = """
SELECT CASE WHEN (SELECT count(*) = 4 FROM pg_event_trigger WHERE evtenabled IN ('O', 'A')
                  AND evtname IN ('cdc_ddl', 'cdc_ddl_around', 'cdc_drop', 'cdc_rewrite')) THEN 'event triggers'
            WHEN to_regprocedure('cdc.compare_definitions()') IS NULL THEN 'nothing'
            ELSE 'comparison' END
"""
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
    conn.execute("SELECT cdc.adopt_all_partitions()")
    return row[0] if row else 0


@contextmanager
def comparing(load: Callable[[], Pipeline]) -> Iterator[None]:
    """Compare every few seconds in a thread of its own: a table that is locked keeps nobody else waiting."""
    ending = threading.Event()
    thread = threading.Thread(target=_compare_often, args=(load, ending), name="definitions", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ending.set()


def _compare_often(load: Callable[[], Pipeline], ending: threading.Event) -> None:
    told: str | None = None
    while not ending.wait(LOOK_S):
        try:
            with source.connect(load().source.dsn) as connection:
                compare(connection)
            told = None
        except (CdcError, psycopg.Error) as error:
            failure = classify(error, "postgres")
            if failure.message != told:
                log.warning("definitions_not_compared", error=failure.message, hint=failure.hint)
            told = failure.message
