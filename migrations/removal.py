"""Removal of one pipeline from its source: publication, triggers, rows, role; the control schema
goes with the last pipeline of the database.

In:  the name of the pipeline and of its role. It only reads: the caller runs each statement.
Out: a statement for each thing that is there; none when nothing is left.
Invariant: what another pipeline of the database uses stays.
"""

import time
from collections.abc import Iterator
from typing import LiteralString

import psycopg
from psycopg import sql

from cdc.errors import SourceError
from cdc.migrations.role import OF_OTHER_PIPELINES
from cdc.migrations.runner import migration_lock, require_idle
from cdc.migrations.statement import Statement, carry_out

FUNCTIONS = [
    "record_truncation",
    "begin_truncation",
    "record_partition_truncation",
    "refuse_update",
]
IS_SHARED = """
SELECT EXISTS (SELECT FROM pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid
               WHERE r.prrelid = to_regclass('cdc.heartbeat') AND p.pubname <> %(pipeline)s)
"""
"""Whether another pipeline is prepared in the database: its publication holds the heartbeat."""
TRIGGERS = f"""
SELECT n.nspname, c.relname, t.tgname
FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid JOIN pg_namespace n ON n.oid = c.relnamespace
JOIN pg_proc p ON p.oid = t.tgfoid AND p.pronamespace = to_regnamespace('cdc')
WHERE p.proname = ANY (%(functions)s) AND t.tgparentid = 0
  AND coalesce(pg_partition_root(t.tgrelid)::oid, t.tgrelid) NOT IN ({OF_OTHER_PIPELINES})
ORDER BY n.nspname, c.relname, t.tgname
"""
OWN_TABLES = f"""
WITH published AS (
    SELECT r.prrelid AS root FROM pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid
    WHERE p.pubname = %(pipeline)s AND r.prrelid NOT IN ({OF_OTHER_PIPELINES}))
SELECT DISTINCT n.nspname || '.' || c.relname
FROM published LEFT JOIN LATERAL pg_partition_tree(root) AS part ON true
JOIN pg_class c ON c.oid IN (root, part.relid) JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname <> 'cdc' ORDER BY 1
"""
"""Tables that no other pipeline publishes, with their partitions."""
CONTROLS: tuple[LiteralString, ...] = ("cdc.truncation", "cdc.ddl")
"""Control tables whose rows are of a table each."""
READER_S = 20.0
"""Seconds to wait until the process that reads the slot has ended."""
POLL_S = 0.2


def removals(conn: psycopg.Connection, pipeline: str) -> list[Statement]:
    """List the statements that remove the pipeline, but for its slot and its role."""
    return list(_removals(conn, pipeline))


def remove_from_source(conn: psycopg.Connection, pipeline: str, role: str) -> None:
    """Remove the pipeline from the database, in one transaction.

    Raises:
        SourceError: the role of this connection may not do it; nothing was changed then.
    """
    require_idle(conn)
    with migration_lock(conn):
        with conn.transaction():
            outcome = carry_out(conn, removals(conn, pipeline))
            if outcome.refused:
                statement = outcome.refused[0].text(conn)
                raise SourceError(
                    f"Role {conn.info.user} may not remove everything of {pipeline}: {statement}.",
                    hint="connect as the owner of the tables in source.dsn, then run the command again",
                )
        if has_role(conn, pipeline, role):
            _drop_role(conn, role)


def drop_slot(conn: psycopg.Connection, name: str) -> bool:
    """Drop the slot, and end the process that reads it; returns whether there was one.

    A slot of that name in another database isn't the pipeline's.

    Raises:
        SourceError: the role may not, or the reader doesn't end.
    """
    deadline = time.monotonic() + READER_S
    while slots := find_slots(conn, name):
        pid = slots[0]
        try:
            if pid is None:
                with conn.transaction():
                    conn.execute("SELECT pg_drop_replication_slot(%s)", [name])
                return True
            with conn.transaction():
                conn.execute("SELECT pg_terminate_backend(%s)", [pid])
        except psycopg.errors.InsufficientPrivilege:
            raise _slot_error(conn, name, "this role may not drop it") from None
        except psycopg.errors.ObjectInUse:
            pass  # Another process has begun to read it meanwhile.
        except psycopg.errors.UndefinedObject:
            return True
        if time.monotonic() > deadline:
            raise _slot_error(conn, name, f"process {pid} reads it and doesn't end")
        time.sleep(POLL_S)
    return False


def find_slots(conn: psycopg.Connection, name: str) -> list[int | None]:
    """Find the pipeline's slot in this database: the process that reads it, or None; empty when
    there is no slot.
    """
    with conn.transaction():
        return [
            pid
            for (pid,) in conn.execute(
                "SELECT active_pid FROM pg_replication_slots"
                " WHERE slot_name = %s AND database = current_database() AND plugin = 'pgoutput'",
                [name],
            ).fetchall()
        ]


def has_role(conn: psycopg.Connection, pipeline: str, role: str) -> bool:
    """Whether there is the role, and it is named after the pipeline, so that it goes with it."""
    with conn.transaction():
        exists = conn.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", [role]).fetchone()
    return role == f"{pipeline}_replication" and exists is not None


def _removals(conn: psycopg.Connection, pipeline: str) -> Iterator[Statement]:
    names = {"pipeline": pipeline, "functions": FUNCTIONS}
    if conn.execute("SELECT 1 FROM pg_publication WHERE pubname = %s", [pipeline]).fetchone():
        tables = [name for (name,) in conn.execute(OWN_TABLES, names).fetchall()]
        drop = sql.SQL("DROP PUBLICATION {}").format(sql.Identifier(pipeline))
        yield Statement(drop, (f"publication {pipeline}",))
    else:
        tables = []
    if conn.execute("SELECT to_regclass('cdc.heartbeat')").fetchone() == (None,):
        return
    for schema, table, trigger in conn.execute(TRIGGERS, names).fetchall():
        yield Statement(
            sql.SQL("DROP TRIGGER IF EXISTS {} ON {}").format(
                sql.Identifier(trigger), sql.Identifier(schema, table)
            ),
            (f"trigger {trigger} of {schema}.{table}",),
        )
    if conn.execute(IS_SHARED, names).fetchone() == (True,):
        yield from _own_rows(conn, pipeline, tables)
    else:
        # Functions go with the schema, and the event triggers with their functions.
        yield Statement(
            sql.SQL("DROP SCHEMA cdc CASCADE"), ("schema cdc, with its event triggers",)
        )


def _own_rows(conn: psycopg.Connection, pipeline: str, tables: list[str]) -> Iterator[Statement]:
    """Remove the rows of the pipeline and of its tables; other pipelines keep theirs."""
    if conn.execute(
        "SELECT 1 FROM pg_policy WHERE polrelid = 'cdc.heartbeat'::regclass AND polname = %s",
        [pipeline],
    ).fetchone():
        drop = sql.SQL("DROP POLICY {} ON cdc.heartbeat").format(sql.Identifier(pipeline))
        yield Statement(drop, (f"policy {pipeline} of cdc.heartbeat",))
    if conn.execute("SELECT 1 FROM cdc.heartbeat WHERE pipeline = %s", [pipeline]).fetchone():
        delete = sql.SQL("DELETE FROM cdc.heartbeat WHERE pipeline = {}")
        yield Statement(delete.format(sql.Literal(pipeline)), (f"heartbeat of {pipeline}",))
    if conn.execute("SELECT 1 FROM cdc.published WHERE publication = %s", [pipeline]).fetchone():
        delete = sql.SQL("DELETE FROM cdc.published WHERE publication = {}")
        yield Statement(
            delete.format(sql.Literal(pipeline)), (f"tables that {pipeline} has published",)
        )
    for control in CONTROLS:
        rows = sql.SQL("FROM {} WHERE table_name = ANY ({})").format(
            sql.SQL(control), sql.Literal(tables)
        )
        if conn.execute(sql.SQL("SELECT 1 {} LIMIT 1").format(rows)).fetchone():
            lines = (f"rows of {control} about {', '.join(tables)}",)
            yield Statement(sql.SQL("DELETE {}").format(rows), lines)


def _drop_role(conn: psycopg.Connection, role: str) -> None:
    """Drop the role and its privileges in this database; it stays where that isn't allowed, or
    another database needs it.
    """
    name = sql.Identifier(role)
    try:
        with conn.transaction():
            conn.execute(sql.SQL("DROP OWNED BY {}").format(name))
            conn.execute(sql.SQL("DROP ROLE {}").format(name))
    except (
        psycopg.errors.InsufficientPrivilege,
        psycopg.errors.DependentObjectsStillExist,
    ):
        return


def _slot_error(conn: psycopg.Connection, name: str, reason: str) -> SourceError:
    return SourceError(
        f"Slot {name} is still there: {reason}. It keeps the log of Postgres until its disk is full.",
        hint=f"as a superuser in {conn.info.dbname}: SELECT pg_drop_replication_slot('{name}');"
        " then run the command again",
        slot=name,
    )
