"""What preparing a source consists of: statements, which are run one by one or printed for somebody else to run.

Invariant: run twice a statement does no harm, or it has a condition under which it is left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import psycopg
from psycopg import sql

Actor = Literal["owner", "administrator"]
NOT_GRANTED = "01007"
"""A warning in the place of an error: who may use something, but not hand it on, has granted nothing."""
PASSWORD = "replication_password"  # noqa: S105  # the name of a psql variable


@dataclass(frozen=True)
class Statement:
    """`lines` are messages once it has run; empty where there is nothing to report.

    `actor`: the owner of the tables, or somebody who may do what owners may not.
    """

    run: sql.SQL | sql.Composed
    lines: tuple[str, ...] = ()
    actor: Actor = "owner"
    done_check: sql.Composable | None = None
    """A query of one boolean: whether it has been done."""
    secret: sql.Composable | None = None
    """What is printed in the place of `run`, where that holds something secret."""
    skip_note: str | None = None
    """The note that is reported when the role may not run it; None where nothing works without it."""
    file: str | None = None
    """The migration that it is."""

    def text(self, conn: psycopg.Connection) -> str:
        return (self.secret or self.run).as_string(conn).strip().removesuffix(";")


@dataclass
class Outcome:
    """What has been done, in lines; the statements that the role may not run; what is missing because of that."""

    messages: list[str] = field(default_factory=list)
    refused: list[Statement] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def record_refusal(self, statement: Statement) -> None:
        if statement.skip_note is None:
            self.refused.append(statement)
        elif statement.skip_note not in self.notes:
            self.notes.append(statement.skip_note)


def carry_out(conn: psycopg.Connection, statements: Iterable[Statement]) -> Outcome:
    """Run what the role may run, inside the caller's transaction; a statement is made after the one before it ran."""
    outcome, warnings = Outcome(), set[str | None]()

    def keep(notice: psycopg.errors.Diagnostic) -> None:
        warnings.add(notice.sqlstate)

    conn.add_notice_handler(keep)
    try:
        for statement in statements:
            warnings.clear()
            if not _execute(conn, statement, repeated=bool(outcome.refused)) or NOT_GRANTED in warnings:
                outcome.record_refusal(statement)
            else:
                outcome.messages += statement.lines
    finally:
        conn.remove_notice_handler(keep)
    return outcome


def _execute(conn: psycopg.Connection, statement: Statement, *, repeated: bool) -> bool:
    """Whether the role may run it; `repeated`: it could be about a role that the one before was to make."""
    try:
        with conn.transaction():
            conn.execute(statement.run)
    except psycopg.errors.InsufficientPrivilege:
        return False
    except psycopg.errors.UndefinedObject:
        if not repeated:
            raise
        return False
    return True
