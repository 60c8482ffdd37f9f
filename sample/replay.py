"""Run days of operation against the sample schema, at a steady rate, as an application would.

In:  a plan (sample.plan). Out: its transactions, committed; how many, how fast. Invariants: open
loop: a transaction is due at its place in the plan whatever happened to those before it. Each lane
runs in order on one connection, so the outcome depends on the seed alone, not on how many
connections there are.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from functools import cache
from typing import Any
from zoneinfo import ZoneInfo

import psycopg
from psycopg import sql

from cdc.errors import SourceError
from cdc.sample import nyc2013
from cdc.sample.load import failed
from cdc.sample.plan import KEYS, Change, Transaction, plan

OnCommit = Callable[[Change, datetime], None]
# How long a worker that waits for its next transaction may overlook that it should stop.
NOTICE_S = 0.2


@dataclass(frozen=True)
class Replayed:
    """The result of a replay; `rate` is the rate achieved."""

    transactions: int
    by_kind: dict[str, int]
    seconds: float
    rate: float


@dataclass
class _Run:
    """The state that the workers of one replay share."""

    rate: float
    began: float
    stop: threading.Event
    on_commit: OnCommit | None
    failed: threading.Event = field(default_factory=threading.Event)

    def wait_for(self, place: int) -> bool:
        """Wait until the transaction at that place of the plan is due; False when the replay stops
        before.
        """
        deadline = self.began + place / self.rate
        while not (self.stop.is_set() or self.failed.is_set()):
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return True
            self.stop.wait(min(remaining, NOTICE_S))
        return False

    def work(self, conn: psycopg.Connection, share: list[tuple[int, Transaction]]) -> Counter[str]:
        """Commit one connection's share; returns how many of each kind."""
        kinds: Counter[str] = Counter()
        try:
            for place, step in share:
                if not self.wait_for(place):
                    break
                changed = _commit(conn, step)
                committed_at = datetime.now(UTC)
                kinds[step.kind] += 1
                if self.on_commit is not None:
                    for change in changed:
                        self.on_commit(change, committed_at)
        except BaseException:
            self.failed.set()
            raise
        return kinds


def replay(
    dsn: str,
    start: date,
    end: date,
    *,
    rate: float = 300.0,
    seed: int = 1,
    connections: int = 4,
    on_commit: OnCommit | None = None,
    stop: threading.Event | None = None,
    limit: int | None = None,
) -> Replayed:
    """Commit the live transactions of those days at `rate` per second; `limit` takes the first so
    many.

    `on_commit(change, committed_at)` is called after each commit for each row that it changed, in
    the thread that committed. `stop` ends the replay early. Raises SourceError: the days are there
    already, or Postgres refuses; SettingsError: days.
    """
    steps = plan(start, end, seed)[:limit]
    shares = _shares(steps, connections)
    try:
        _require_absent(dsn, start, end)
        with (
            ExitStack() as opened,
            ThreadPoolExecutor(connections, thread_name_prefix="replay") as pool,
        ):
            conns = [opened.enter_context(psycopg.connect(dsn, autocommit=True)) for _ in shares]
            run = _Run(rate, time.monotonic(), stop or threading.Event(), on_commit)
            by_kind = sum(pool.map(run.work, conns, shares), Counter[str]())
            seconds = time.monotonic() - run.began
    except psycopg.Error as error:
        raise failed(error) from error
    return Replayed(by_kind.total(), dict(by_kind), seconds, by_kind.total() / seconds)


def _shares(steps: Sequence[Transaction], connections: int) -> list[list[tuple[int, Transaction]]]:
    """Deal whole lanes to connections; each transaction keeps its place in the plan."""
    shares: list[list[tuple[int, Transaction]]] = [[] for _ in range(connections)]
    for place, step in enumerate(steps):
        shares[zlib.crc32(step.lane.encode()) % connections].append((place, step))
    return shares


def _require_absent(dsn: str, start: date, end: date) -> None:
    with psycopg.connect(dsn) as conn:
        row = conn.execute(
            "SELECT EXISTS (SELECT FROM public.flights WHERE sched_dep >= %(first)s AND sched_dep < %(next)s)"
            " OR EXISTS (SELECT FROM public.weather WHERE time_hour >= %(first)s AND time_hour < %(next)s)",
            {"first": _midnight(start), "next": _midnight(end + timedelta(days=1))},
        ).fetchone()
    if row != (False,):
        raise SourceError(
            f"some days from {start} to {end} are in the database already",
            hint="replay days that come after them",
        )


def _midnight(day: date) -> datetime:
    return datetime(day.year, day.month, day.day, tzinfo=ZoneInfo(nyc2013.ZONE))


def _commit(conn: psycopg.Connection, step: Transaction) -> list[Change]:
    """Run one transaction; returns the changes that met a row (a plane may not be there)."""
    changed = []
    with conn.transaction() if len(step.changes) > 1 else nullcontext():
        for change in step.changes:
            statement, parameters = _statement(change)
            if conn.execute(statement, parameters).rowcount:
                changed.append(change)
    return changed


def _statement(change: Change) -> tuple[sql.Composed, list[Any]]:
    text = _text(change.table, change.op, tuple(change.values))
    if change.op == "insert":
        return text, list(change.values.values())
    return text, [*change.values.values(), *change.key]


@cache
def _text(table: str, op: str, columns: tuple[str, ...]) -> sql.Composed:
    target = sql.Identifier("public", table)
    condition = sql.SQL(" AND ").join(
        sql.SQL("{} = %s").format(sql.Identifier(column)) for column in KEYS[table]
    )
    names = [sql.Identifier(column) for column in columns]
    if op == "insert":
        places = sql.SQL(", ").join([sql.SQL("%s")] * len(names))
        return sql.SQL("INSERT INTO {} ({}, updated_at) VALUES ({}, clock_timestamp())").format(
            target, sql.SQL(", ").join(names), places
        )
    if op == "delete":
        return sql.SQL("DELETE FROM {} WHERE {}").format(target, condition)
    assigned = sql.SQL(", ").join(sql.SQL("{} = %s").format(name) for name in names)
    return sql.SQL("UPDATE {} SET {}, updated_at = clock_timestamp() WHERE {}").format(
        target, assigned, condition
    )
