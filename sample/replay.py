"""Run days of operation against the sample schema, at a steady rate, as an application would.

In:  a plan (sample.plan). Out: its transactions, committed; how many, how fast. Invariants: open
loop: a transaction is due at its place in the plan whatever happened to those before it, and being
late shows in the result. Each lane runs in order on one connection, so the outcome depends on the
seed alone, not on how many connections there are.
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
from typing import Annotated, Any
from zoneinfo import ZoneInfo

import psycopg
import typer
from psycopg import sql

from cdc.errors import SettingsError, SourceError
from cdc.sample import nyc2013
from cdc.sample.load import Database, FirstDay, LastDay, explained, failed
from cdc.sample.plan import KEYS, Change, Transaction, plan

OnCommit = Callable[[Change, datetime], None]
# How long a worker that waits for its next transaction may overlook that it should stop.
NOTICE_S = 0.2

__all__ = ["Replayed", "Transaction", "plan", "replay"]


@dataclass(frozen=True)
class Replayed:
    """The result of a replay; `rate` is the rate achieved, `behind_s` the delay of the latest
    transaction's start.
    """

    transactions: int
    by_kind: dict[str, int]
    seconds: float
    rate: float
    behind_s: float


@dataclass
class _Run:
    """The state that the workers of one replay share."""

    rate: float
    began: float
    stop: threading.Event
    on_commit: OnCommit | None
    failed: threading.Event = field(default_factory=threading.Event)

    def wait_for(self, place: int) -> float | None:
        """Wait until the transaction at that place of the plan is due; how late it is, or None to
        stop.
        """
        deadline = self.began + place / self.rate
        while not (self.stop.is_set() or self.failed.is_set()):
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return -remaining
            self.stop.wait(min(remaining, NOTICE_S))
        return None

    def work(
        self, conn: psycopg.Connection, share: list[tuple[int, Transaction]]
    ) -> tuple[Counter[str], float]:
        """Commit one connection's share; returns how many of each kind, and the greatest
        lateness.
        """
        kinds: Counter[str] = Counter()
        latest = 0.0
        try:
            for place, step in share:
                late = self.wait_for(place)
                if late is None:
                    break
                changed = _commit(conn, step)
                committed_at = datetime.now(UTC)
                kinds[step.kind] += 1
                latest = max(latest, late)
                if self.on_commit is not None:
                    for change in changed:
                        self.on_commit(change, committed_at)
        except BaseException:
            self.failed.set()
            raise
        return kinds, latest


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
    the thread that committed. `stop` ends the replay
    early. Raises SourceError: the days are there already, or Postgres refuses; SettingsError: days,
    rate.
    """
    if not (rate > 0 and connections >= 1):
        raise SettingsError(
            f"can't replay {rate:g} transactions/s on {connections} connections",
            hint="use at least one of each",
        )
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
            outcomes = list(pool.map(run.work, conns, shares))
            seconds = time.monotonic() - run.began
    except psycopg.Error as error:
        raise failed(error) from error
    by_kind = sum((kinds for kinds, _ in outcomes), Counter[str]())
    behind_s = max(late for _, late in outcomes)
    return Replayed(by_kind.total(), dict(by_kind), seconds, by_kind.total() / seconds, behind_s)


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


def main(
    dsn: Database,
    start: FirstDay,
    end: LastDay,
    *,
    rate: Annotated[float, typer.Option(help="transactions per second")] = 300.0,
    seed: Annotated[int, typer.Option(help="another seed, other second thoughts")] = 1,
    connections: Annotated[int, typer.Option(help="how many write at the same time")] = 4,
    limit: Annotated[int | None, typer.Option(help="stop after so many transactions")] = None,
) -> None:
    """Replay days of New York's flights of 2013 as live transactions."""
    with explained():
        typer.echo(f"Replaying {start:%Y-%m-%d} to {end:%Y-%m-%d} at {rate:g} transactions/s")
        result = replay(
            dsn,
            start.date(),
            end.date(),
            rate=rate,
            seed=seed,
            connections=connections,
            limit=limit,
        )
        for kind, count in sorted(result.by_kind.items(), key=lambda entry: -entry[1]):
            typer.echo(f"  {kind:<10} {count:>8,}")
        typer.echo(
            f"Done: {result.transactions:,} transactions in {result.seconds:.1f} s, {result.rate:.0f}/s"
        )
        if result.behind_s > 1:
            typer.echo(
                f"Behind the asked rate by up to {result.behind_s:.1f} s: this machine can't keep it up"
            )


if __name__ == "__main__":
    typer.run(main)
