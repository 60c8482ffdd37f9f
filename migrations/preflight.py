"""Checks of `migrate` alone: what it needs itself, beside what `cdc.readiness.checks` judges. They read
the catalogue and change nothing.
"""

from __future__ import annotations

from dataclasses import replace

import psycopg

from cdc.errors import SourceError, TableRefused
from cdc.migrations.runner import CONTROL, migrations, recorded
from cdc.readiness.facts import CONTROL_PRIVILEGES, SourceRequirements, TableFacts, read_tables
from cdc.readiness.key_index import find_table, key_index


def read_captured(conn: psycopg.Connection, requirements: SourceRequirements) -> list[TableFacts]:
    """Read the captured tables, in the order given. Raises SourceError for the first that isn't
    there or has no key.
    """
    if not requirements.tables:
        raise SourceError(
            "no tables to capture", hint="list them under source.tables of the pipeline file"
        )
    for schema, name in requirements.tables:
        find_table(conn, schema, name)
    captured = []
    for table in read_tables(conn, requirements):
        index = key_index(conn, table.oid, table.label, requirements.keys.get(table.label, ()))
        captured.append(replace(table, key_index=None if index.primary else index))
    return captured


def require_owner(conn: psycopg.Connection, table: TableFacts) -> None:
    """Check that this role owns a table. Raises SourceError."""
    if not table.owned:
        raise TableRefused(
            f"{table.label} belongs to {table.owner}, and only its owner may publish it",
            hint=f"connect as {table.owner}, or run GRANT {table.owner} TO {conn.info.user}",
            table=table.label,
        )


def require_complete(conn: psycopg.Connection) -> None:
    """Check that the control schema is up to date. Raises SourceError."""
    names = [file.name for file in migrations(CONTROL)]
    if missing := sorted(set(names) - recorded(conn, "control").keys()):
        raise SourceError(
            f"{missing[0]} hasn't been applied",
            finding_key="control-missing",
            hint="run cdc migrate first",
        )


def require_control(conn: psycopg.Connection) -> None:
    """Check that the control tables belong to this role. Raises SourceError."""
    foreign = conn.execute(
        "SELECT c.oid::regclass::text, pg_get_userbyid(c.relowner) FROM pg_class c"
        " WHERE c.relnamespace = to_regnamespace('cdc') AND c.relname = ANY (%s)"
        " AND NOT pg_has_role(c.relowner, 'USAGE') ORDER BY c.oid",
        [list(CONTROL_PRIVILEGES)],
    ).fetchone()
    if foreign:
        table, owner = foreign
        raise SourceError(
            f"{table} belongs to {owner}, and only its owner may publish it",
            hint=f"connect as {owner}, or run GRANT {owner} TO {conn.info.user}",
            table=table,
        )
