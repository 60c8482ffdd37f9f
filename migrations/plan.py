"""Plan of `cdc migrate`: the statements it would run, and a script of them for an administrator.

In:  what a pipeline needs, the catalogue. Out: statements in their order; a script for psql.
Invariant: the transaction is read-only; no password is in a script; running a script twice does no
harm.
"""

import textwrap
from collections.abc import Iterator, Sequence
from itertools import takewhile

import psycopg
from psycopg import sql

from cdc.migrations.runner import RECORD, Migration, pending, require_capturable, require_idle
from cdc.migrations.source import (
    LOCK_TIMEOUT,
    check_source,
    required_statements,
)
from cdc.migrations.statement import PASSWORD, Actor, Statement
from cdc.readiness.facts import SourceRequirements

HEAD = """\
-- What pipeline {pipeline} still needs in database {database}, as cdc migrate would do it.
--   psql -v ON_ERROR_STOP=1 -d {database} -f FILE
-- What belongs to {owner} is made as {owner}: run it as a superuser or as a member of {owner}. Twice does no harm.
"""
HEAD_OF_SECRETS = f"""\
-- The password of {{role}} is not in here: add -v {PASSWORD}=... to the command,
-- or set it afterwards, unseen by any log: \\password {{role}}
"""


def plan(conn: psycopg.Connection, requirements: SourceRequirements) -> list[Statement]:
    """List the statements that are missing. Raises SourceError for a table that can't be
    captured.
    """
    require_idle(conn)
    require_capturable(conn)
    with conn.transaction():
        conn.execute("SET TRANSACTION READ ONLY")
        missing = list(required_statements(conn, requirements, check_source(conn, requirements)))
        first = list(takewhile(lambda statement: statement.actor == "administrator", missing))
        return [*first, *_control(pending(conn)), *missing[len(first) :]]


def _control(files: Sequence[Migration]) -> Iterator[Statement]:
    if files:
        yield Statement(sql.SQL(RECORD))
    for file in files:
        name = sql.Literal(file.name)
        checksum = sql.Literal(file.checksum)
        record = sql.SQL("INSERT INTO cdc.migration (name, checksum) VALUES ({}, {})").format(
            name, checksum
        )
        recorded = sql.SQL("SELECT EXISTS (SELECT FROM cdc.migration WHERE name = {})").format(name)
        text = sql.SQL(file.sql.decode())
        yield Statement(
            sql.Composed([text, record]),
            (f"applied {file.name}",),
            done_check=recorded,
            file=file.name,
        )


def script(
    conn: psycopg.Connection, requirements: SourceRequirements, missing: Sequence[Statement]
) -> str:
    """Write the statements as a script for psql: a transaction for each run of statements of one
    actor.
    """
    (owner,) = conn.execute("SELECT current_user").fetchone() or ("",)
    names = {
        "pipeline": requirements.pipeline,
        "database": conn.info.dbname,
        "owner": owner,
        "role": requirements.role,
    }
    head = HEAD + (HEAD_OF_SECRETS if any(statement.secret for statement in missing) else "")
    plain = {name: " ".join(text.split()) for name, text in names.items()}
    lines = [head.format(**plain), "\\set ON_ERROR_STOP on"]
    actor: Actor | None = None
    for statement in missing:
        if statement.actor != actor:
            lines += ["COMMIT;"] if actor else []
            actor = statement.actor
            lines += ["", "BEGIN;", f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}';"]
            # The administrator's path may lead to other functions and tables of the same names.
            lines += ["SET LOCAL search_path = pg_catalog, pg_temp;"]
            lines += (
                [f"SET LOCAL ROLE {sql.Identifier(owner).as_string(conn)};"]
                if actor == "owner"
                else []
            )
        # A name may contain the end of a line.
        lines += [
            "",
            *(f"-- {' '.join(line.split())}" for line in statement.lines),
            *_guarded(conn, statement),
        ]
    lines += ["COMMIT;"] if actor else ["-- Nothing is missing."]
    return "\n".join(lines) + "\n"


def _guarded(conn: psycopg.Connection, statement: Statement) -> Iterator[str]:
    text = f"{statement.text(conn)};"
    condition = statement.done_check.as_string(conn) if statement.done_check else "SELECT false"
    if statement.skip_note is not None:
        # Safe: no name from outside is in this text, so nothing in it can end the dollar quotes.
        yield f"DO $cdc$ BEGIN\nIF NOT ({condition}) THEN\n{text}\nEND IF;"
        yield f"EXCEPTION WHEN insufficient_privilege THEN RAISE WARNING '{statement.skip_note}';\nEND $cdc$;"
        return
    if statement.secret is not None:
        # Only psql knows whether the variable was given.
        yield f"\\if :{{?{PASSWORD}}}"
    elif statement.done_check is not None:
        yield f"SELECT NOT ({condition}) AS cdc_missing \\gset"
        yield "\\if :cdc_missing"
    else:
        yield text
        return
    yield f"{text}\n\\endif"


def describe_statement(conn: psycopg.Connection, statement: Statement) -> Iterator[str]:
    """Describe a statement that hasn't been run: its messages, then its SQL, wrapped at 80 columns."""
    yield from statement.lines
    text = (
        "(its statements are in the file)"
        if statement.file
        else " ".join(statement.text(conn).split())
    )
    yield from textwrap.wrap(
        text,
        width=80,
        initial_indent="    ",
        subsequent_indent="      ",
        break_long_words=False,
        break_on_hyphens=False,
    )
