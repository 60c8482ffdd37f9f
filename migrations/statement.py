"""Statements that prepare a source: run one by one, or printed for an administrator.

Invariant: running a statement twice does no harm, or it has a check that leaves it out.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import psycopg
from psycopg import sql

Actor = Literal["owner", "administrator"]
NOT_GRANTED = "01007"
"""SQLSTATE of a warning that stands for an error: a role without the grant option has granted
nothing.
"""
PASSWORD = "replication_password"  # noqa: S105  # the name of a psql variable


@dataclass(frozen=True)
class Statement:
    """A statement, and the messages to report once it has run: `lines`, empty where there is
    nothing to report.

    `actor`: the role that has to run it, the owner of the tables or an administrator.
    """

    run: sql.SQL | sql.Composed
    lines: tuple[str, ...] = ()
    actor: Actor = "owner"
    done_check: sql.Composable | None = None
    """A query of one boolean: whether the change has been made already."""
    secret: sql.Composable | None = None
    """The text that is printed in place of `run`, where that contains a secret."""
    skip_note: str | None = None
    """The note to report when the role may not run it; None where the pipeline can't work without
    it.
    """
    file: str | None = None
    """The migration file that the statement comes from."""

    def text(self, conn: psycopg.Connection) -> str:
        """The SQL as text, without secrets and without the last semicolon."""
        return (self.secret or self.run).as_string(conn).strip().removesuffix(";")


@dataclass
class Outcome:
    """The outcome of statements: messages of those that ran, those that were refused, notes on
    optional ones.
    """

    messages: list[str] = field(default_factory=list)
    refused: list[Statement] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def carry_out(conn: psycopg.Connection, statements: Iterable[Statement]) -> Outcome:
    """Run the statements that the role may run, inside the caller's transaction.

    Each statement is taken from the iterator only after the previous one has run.
    """
    outcome = Outcome()
    warnings = set[str | None]()

    def keep(notice: psycopg.errors.Diagnostic) -> None:
        warnings.add(notice.sqlstate)

    conn.add_notice_handler(keep)
    try:
        for statement in statements:
            warnings.clear()
            if (
                not _execute(conn, statement, repeated=bool(outcome.refused))
                or NOT_GRANTED in warnings
            ):
                if statement.skip_note is None:
                    outcome.refused.append(statement)
                elif statement.skip_note not in outcome.notes:
                    outcome.notes.append(statement.skip_note)
            else:
                outcome.messages += statement.lines
    finally:
        conn.remove_notice_handler(keep)
    return outcome


def _execute(conn: psycopg.Connection, statement: Statement, *, repeated: bool) -> bool:
    """Run a statement; false when the role may not run it.

    `repeated`: an earlier statement was refused, so this one may be about a role that doesn't exist
    yet.
    """
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
