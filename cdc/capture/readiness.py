"""Checks of Postgres before the connector is registered. They only read, and each refusal names the
repair.
"""

import time
from collections.abc import Sequence

from cdc.config.settings import CONTROL_TABLES, Pipeline
from cdc.errors import SourceError
from cdc.model.table import Table
from cdc.postgres import row_identity
from cdc.postgres.incremental_snapshot import require_visible
from cdc.postgres.replication_slot import Slot, slot
from cdc.postgres.source import Connection

RELEASE_S = 10.0
"""Seconds until Postgres notices that a deleted connector is gone."""

# to_jsonb: before 15 a publication has neither row filters nor column lists, and before 18 no
# generated columns.
PUBLICATION = """
SELECT pg_get_userbyid(p.pubowner), pg_has_role(p.pubowner, 'USAGE'),
       p.pubinsert AND p.pubupdate AND p.pubdelete AND p.pubviaroot
           AND coalesce(to_jsonb(p) ->> 'pubgencols', 's') = 's',
       ARRAY(SELECT schemaname || '.' || tablename FROM pg_publication_tables t WHERE t.pubname = p.pubname),
       ARRAY(SELECT r.prrelid::regclass::text FROM pg_publication_rel r
             WHERE r.prpubid = p.oid AND (to_jsonb(r) ->> 'prqual' IS NOT NULL
                                          OR to_jsonb(r) ->> 'prattrs' IS NOT NULL))
FROM pg_publication p
WHERE p.pubname = %s
"""
UNREADABLE = """
SELECT name FROM unnest(%(schemas)s::text[], %(tables)s::text[]) WITH ORDINALITY AS wanted (nsp, rel, at)
JOIN pg_namespace n ON n.nspname = nsp
JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = rel
CROSS JOIN LATERAL (SELECT nsp || '.' || rel AS name) AS named
WHERE NOT (has_schema_privilege(%(role)s, n.oid, 'USAGE') AND has_table_privilege(%(role)s, c.oid, 'SELECT'))
   OR nsp = 'cdc' AND rel = 'heartbeat' AND NOT has_table_privilege(%(role)s, c.oid, 'UPDATE')
ORDER BY at
"""
# On Amazon RDS membership of a role replaces the attribute REPLICATION.
ROLE = """
SELECT rolcanlogin AND (rolreplication OR rolsuper OR EXISTS (
    SELECT FROM pg_roles s WHERE s.rolname = 'rds_replication' AND pg_has_role(r.oid, s.oid, 'MEMBER')))
FROM pg_roles r WHERE rolname = %s
"""
MIGRATE = "cdc -p FILE migrate"


def require_ready(
    conn: Connection, pipeline: Pipeline, tables: Sequence[Table], *, ours: bool
) -> Slot | None:
    """Check slot, publication, identities, role and heartbeat. Returns the slot if it exists.

    `ours`: Connect has a connector with the pipeline's name.

    Raises:
        SourceError: the first check that fails, with its repair.
    """
    replication_slot = _require_slot(conn, pipeline.pipeline, ours)
    _require_publication(conn, pipeline.pipeline, [table.qualified for table in tables])
    for error in row_identity.unidentified(conn, tables).values():
        raise error
    _require_role(conn, pipeline, tables)
    _require_heartbeat(conn, pipeline.pipeline)
    return replication_slot


def _require_slot(conn: Connection, name: str, ours: bool) -> Slot | None:
    existing = slot(conn, name)
    deadline = time.monotonic() + RELEASE_S
    while existing and existing.active and not ours and time.monotonic() < deadline:
        time.sleep(0.25)
        existing = slot(conn, name)
    if existing is None:
        return None
    if existing.plugin != "pgoutput" or existing.database != conn.info.dbname:
        raise SourceError(
            f"Slot {name} belongs to something else: plugin {existing.plugin}, database {existing.database}.",
            finding_key="slot-foreign",
            hint="give the pipeline another name: it names slot, publication and topics",
            slot=name,
        )
    if existing.active and not ours:
        raise SourceError(
            f"Slot {name} is in use by process {existing.active_pid} of Postgres, yet this Connect has no"
            f" connector {name}: a second pipeline of that name runs elsewhere.",
            finding_key="slot-foreign/in-use",
            hint="stop the other one, or give this pipeline another name; who it is:"
            f" SELECT * FROM pg_stat_activity WHERE pid = {existing.active_pid}",
            slot=name,
            pid=existing.active_pid,
        )
    if existing.wal_status == "lost":
        raise SourceError(
            f"Slot {name} is lost: Postgres has removed log that the connector still needed.",
            finding_key="slot-lost",
            hint="cdc -p FILE register --new-snapshot",
            slot=name,
        )
    return existing


def _require_publication(conn: Connection, name: str, tables: Sequence[str]) -> None:
    row = conn.execute(PUBLICATION, [name]).fetchone()
    if row is None:
        raise SourceError(
            f"There is no publication {name} in {conn.info.dbname}.",
            finding_key="publication-differs/missing",
            hint=MIGRATE,
            publication=name,
        )
    owner, owned, complete, published, partial = row
    if not owned:
        raise SourceError(
            f"Publication {name} belongs to {owner}, and source.dsn logs in as {conn.info.user}.",
            finding_key="publication-foreign",
            hint=f"use {owner} in source.dsn, or give the pipeline another name",
            publication=name,
        )
    if missing := [table for table in (*tables, *CONTROL_TABLES) if table not in published]:
        raise SourceError(
            f"Publication {name} lacks {', '.join(missing)}.",
            finding_key="publication-differs",
            hint=MIGRATE,
            publication=name,
        )
    if not complete or partial:
        problem = (
            f"leaves out rows or columns of {', '.join(partial)}"
            if partial
            else "leaves out operations, roots or generated columns"
        )
        raise SourceError(
            f"Publication {name} {problem}.",
            finding_key="publication-differs/partial",
            hint=MIGRATE,
            publication=name,
        )


def _require_role(conn: Connection, pipeline: Pipeline, tables: Sequence[Table]) -> None:
    role = pipeline.replication_user
    row = conn.execute(ROLE, [role]).fetchone()
    if row is None:
        raise SourceError(
            f"There is no role {role} for the connector.",
            finding_key="role-unfit/missing",
            hint=MIGRATE,
            role=role,
        )
    if row != (True,):
        raise SourceError(
            f"Role {role} lacks LOGIN or REPLICATION.",
            finding_key="role-unfit",
            hint=MIGRATE,
            role=role,
        )
    for table in tables:
        require_visible(conn, table, role)
    names = [(table.schema, table.name) for table in tables]
    names += [("cdc", table.removeprefix("cdc.")) for table in CONTROL_TABLES]
    schemas, relations = (list(part) for part in zip(*names, strict=True))
    unreadable = conn.execute(
        UNREADABLE, {"schemas": schemas, "tables": relations, "role": role}
    ).fetchall()
    if unreadable:
        listed = ", ".join(name for (name,) in unreadable)
        raise SourceError(
            f"Role {role} may not read (or beat) {listed}.",
            finding_key="role-unfit/unreadable",
            hint=MIGRATE,
            role=role,
        )


def _require_heartbeat(conn: Connection, name: str) -> None:
    if conn.execute("SELECT FROM cdc.heartbeat WHERE pipeline = %s", [name]).fetchone() is None:
        raise SourceError(
            f"cdc.heartbeat has no row of {name}.", finding_key="control-missing", hint=MIGRATE
        )
