"""Prepare a source for one pipeline: role, publication, triggers, replica identities.

In:  the pipeline's name, its tables, the connector's role. Out: a line for each thing that was changed.
Invariant: everything is checked before anything is created, and all of it is one transaction. A second run
changes nothing; a run with another list of tables moves the source to that list.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import psycopg
from psycopg import sql

from cdc.errors import SourceError
from migrations.journal import ensure_journal, published
from migrations.preflight import (
    CONTROL_TABLES,
    Relation,
    relations,
    require_control,
    require_publication,
    require_role,
)
from migrations.role import ensure_heartbeat, ensure_privileges, ensure_role
from migrations.runner import no_privilege, one_at_a_time, require_idle, require_logical
from migrations.truncation import ensure_triggers, reset_floors

PUBLISH = "insert, update, delete, truncate"
# A trigger needs a lock that waits for open transactions, and meanwhile everybody waits behind it.
LOCK_TIMEOUT = "10s"


def prepare_source(
    conn: psycopg.Connection,
    *,
    pipeline: str,
    tables: Sequence[tuple[str, str]],
    role: str,
    password: str | None,
    keys: Mapping[str, Sequence[str]] | None = None,
) -> list[str]:
    """Make the source fit for the pipeline's connector; `tables` are (schema, table).

    `keys` names, by schema.table, columns of a unique index that stand for a primary key.

    The connection must not be inside a transaction, and its role must own the tables. Lines that start with
    `note:` say what could not be done and isn't needed.
    Raises SourceError, and then nothing has been changed.
    """
    require_idle(conn)
    require_logical(conn)
    try:
        with one_at_a_time(conn), conn.transaction():
            conn.execute("SELECT set_config('lock_timeout', %s, true)", [LOCK_TIMEOUT])
            captured = _checked(conn, pipeline, tables, role, keys)
            return list(_prepare(conn, pipeline, captured, role, password))
    except psycopg.errors.InsufficientPrivilege as error:
        raise no_privilege(conn, error, "what is missing") from error
    except (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected) as error:
        raise SourceError(
            f"a table stayed locked for {LOCK_TIMEOUT} by another transaction",
            hint="end it (see xact_start in pg_stat_activity), then run cdc migrate again",
        ) from error
    except psycopg.Error as error:
        raise SourceError(
            f"the source wasn't prepared: {error.diag.message_primary or 'the connection was lost'}",
            hint="nothing was changed; repair the cause and run cdc migrate again",
        ) from error


def heartbeat_query(pipeline: str) -> str:
    """The statement that the connector runs every few seconds."""
    return (
        sql.SQL("UPDATE cdc.heartbeat SET beat = beat + 1, at = clock_timestamp() WHERE pipeline = {}")
        .format(sql.Literal(pipeline))
        .as_string()
    )


def _checked(
    conn: psycopg.Connection,
    pipeline: str,
    tables: Sequence[tuple[str, str]],
    role: str,
    keys: Mapping[str, Sequence[str]] | None,
) -> list[Relation]:
    require_control(conn)
    captured = relations(conn, tables, role, keys)
    require_publication(conn, pipeline)
    require_role(conn, role, captured)
    return captured


def _prepare(
    conn: psycopg.Connection, pipeline: str, captured: Sequence[Relation], role: str, password: str | None
) -> Iterator[str]:
    yield from ensure_role(conn, role, password)
    # Before the publication: what it held until now tells which privileges are out of date.
    yield from ensure_privileges(conn, role, pipeline, captured)
    yield from ensure_heartbeat(conn, role, pipeline)
    for relation in captured:
        yield from _ensure_identity(conn, relation)
    before = published(conn, pipeline)
    yield from _ensure_publication(conn, pipeline, captured)
    yield from ensure_triggers(conn, pipeline, captured)
    yield from reset_floors(conn)
    yield from ensure_journal(conn, captured, before)


def _ensure_identity(conn: psycopg.Connection, relation: Relation) -> Iterator[str]:
    """FULL where a column can be TOASTed; elsewhere only an identity that lacks the key is changed.

    Without FULL an update that leaves a TOASTed column alone doesn't carry its value, so the log alone
    couldn't rebuild the row. NOTHING, or another index, would make updates fail or hide the key.
    """
    rows = conn.execute(
        "SELECT n.nspname, c.relname, c.relreplident = 'f',"
        " c.relreplident = 'd' AND %(index)s::oid IS NULL OR c.relreplident = 'i' AND EXISTS"
        " (SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indisreplident"
        "  AND CASE WHEN %(index)s::oid IS NULL THEN i.indisprimary ELSE i.indexrelid = %(index)s END)"
        " FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = ANY (%(members)s) ORDER BY 1, 2",
        {"members": relation.members, "index": relation.key_index and relation.key_index.oid},
    ).fetchall()
    for schema, name, full, keyed in rows:
        if full or (keyed and not relation.toastable):
            continue
        identity = _identity(relation)
        conn.execute(sql.SQL("ALTER TABLE {} REPLICA IDENTITY {}").format(sql.Identifier(schema, name), identity))
        yield f"set REPLICA IDENTITY {identity.as_string(conn)} on {schema}.{name}"


def _identity(relation: Relation) -> sql.Composable:
    if relation.key_index is None:
        return sql.SQL("FULL" if relation.toastable else "DEFAULT")
    # A partition has an index of its own in the place of its table's.
    if relation.toastable or relation.relkind == "p":
        return sql.SQL("FULL")
    return sql.SQL("USING INDEX {}").format(sql.Identifier(relation.key_index.name))


def _ensure_publication(conn: psycopg.Connection, pipeline: str, captured: Sequence[Relation]) -> Iterator[str]:
    name = sql.Identifier(pipeline)
    wanted = {(relation.schema, relation.name) for relation in captured}
    wanted |= {("cdc", table) for table in CONTROL_TABLES}
    tables = sql.SQL(", ").join(sql.Identifier(*table) for table in sorted(wanted))
    options = _options(conn)
    rows = conn.execute(
        "SELECT schemaname, tablename FROM pg_publication_tables WHERE pubname = %s", [pipeline]
    ).fetchall()
    if not conn.execute("SELECT 1 FROM pg_publication WHERE pubname = %s", [pipeline]).fetchone():
        conn.execute(sql.SQL("CREATE PUBLICATION {} FOR TABLE {} WITH ({})").format(name, tables, options))
        yield f"created publication {pipeline} of {len(wanted)} tables"
        return
    listed = set(rows)
    if listed != wanted or _is_partial(conn, pipeline):
        conn.execute(sql.SQL("ALTER PUBLICATION {} SET TABLE {}").format(name, tables))
        yield from (f"publishing {'.'.join(table)}" for table in sorted(wanted - listed))
        yield from (f"no longer publishing {'.'.join(table)}" for table in sorted(listed - wanted))
        if listed == wanted:
            yield f"made publication {pipeline} hold its tables whole"
    if not _has_options(conn, pipeline):
        conn.execute(sql.SQL("ALTER PUBLICATION {} SET ({})").format(name, options))
        yield f"set publication {pipeline} to {options.as_string(conn)}"


def _options(conn: psycopg.Connection) -> sql.Composable:
    options = sql.SQL("publish = {}, publish_via_partition_root = true").format(sql.Literal(PUBLISH))
    if conn.info.server_version >= 180000:
        # Otherwise a stored generated column is in the snapshot but never in the stream, and with
        # REPLICA IDENTITY FULL Postgres refuses every update of its table.
        options += sql.SQL(", publish_generated_columns = stored")
    return options


def _has_options(conn: psycopg.Connection, pipeline: str) -> bool:
    generated = " AND pubgencols = 's'" if conn.info.server_version >= 180000 else ""
    return conn.execute(
        "SELECT pubinsert AND pubupdate AND pubdelete AND pubtruncate AND pubviaroot"
        f"{generated} FROM pg_publication WHERE pubname = %s",
        [pipeline],
    ).fetchone() == (True,)


def _is_partial(conn: psycopg.Connection, pipeline: str) -> bool:
    """Whether rows or columns of a published table are left out, or a whole schema is published."""
    return conn.execute(
        "SELECT EXISTS (SELECT FROM pg_publication_rel r WHERE r.prpubid = p.oid"
        "               AND (r.prqual IS NOT NULL OR r.prattrs IS NOT NULL))"
        " OR EXISTS (SELECT FROM pg_publication_namespace s WHERE s.pnpubid = p.oid)"
        " FROM pg_publication p WHERE p.pubname = %s",
        [pipeline],
    ).fetchone() == (True,)
