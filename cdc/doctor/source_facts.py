"""Facts about the source that checks judge: read from Postgres' catalog in one pass.

In:  a connection of the source's owner, the pipeline file. Out: `SourceFacts`.
Invariant: reads only, and any owner of the tables may run it.
"""

import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import psycopg

from cdc.capture.readiness import PUBLICATION, ROLE, UNREADABLE
from cdc.config.settings import CONTROL_TABLES, Pipeline
from cdc.doctor.machine import is_loopback
from cdc.errors import SourceError
from cdc.model.row_security import HIDDEN_BY
from cdc.postgres import row_identity, table_survey
from cdc.postgres.source import Connection, parse_dsn

LOCK_TIMEOUT = "5s"
SETTINGS = """
SELECT name, setting FROM pg_settings WHERE name IN (
    'wal_level', 'server_encoding', 'max_replication_slots', 'max_wal_senders', 'max_slot_wal_keep_size',
    'idle_replication_slot_timeout')
"""
# to_jsonb reads what older servers lack.
SLOTS = """
SELECT slot_name::text AS name, slot_type AS type, active, plugin::text, database::text, wal_status,
       pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn)::bigint AS retained_bytes, safe_wal_size AS safe_bytes,
       (to_jsonb(s) ->> 'failover')::bool AS failover
FROM pg_replication_slots s
"""
SENDERS = """
SELECT count(*), count(*) FILTER (WHERE NOT EXISTS (
    SELECT FROM pg_replication_slots s WHERE s.active_pid = r.pid AND s.slot_type = 'logical'))
FROM pg_stat_replication r
"""
TRANSACTIONS = """
SELECT (SELECT extract(epoch FROM clock_timestamp() - min(xact_start))::float8 FROM pg_stat_activity
        WHERE backend_xid IS NOT NULL AND pid <> pg_backend_pid()),
       (SELECT extract(epoch FROM clock_timestamp() - min(prepared))::float8 FROM pg_prepared_xacts)
"""
# The replica identity is the partition's, not its partitioned table's. Only the
# policies of the table that is queried apply.
TABLES = f"""
WITH RECURSIVE captured (oid, root, top) AS (
    SELECT c.oid, n.nspname || '.' || c.relname, true FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname || '.' || c.relname = ANY (%(tables)s)
    UNION ALL
    SELECT i.inhrelid, captured.root, false FROM pg_inherits i JOIN captured ON i.inhparent = captured.oid
    JOIN pg_class p ON p.oid = i.inhrelid WHERE p.relispartition
)
SELECT root,
       CASE WHEN c.relpersistence::text = 'u' THEN c.relnamespace::regnamespace::text || '.' || quote_ident(c.relname)
            ELSE '' END AS unlogged,
       c.relkind = 'r' AND c.relreplident::text <> 'f'
           AND EXISTS (SELECT FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
                       WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped AND t.typstorage <> 'p')
           AS partial,
       CASE WHEN top THEN {HIDDEN_BY} ELSE '' END AS hidden,
       root <> ALL (%(events)s) AND NOT EXISTS (
                   SELECT FROM pg_trigger g JOIN pg_proc f ON f.oid = g.tgfoid
                   JOIN pg_namespace o ON o.oid = f.pronamespace
                   WHERE g.tgrelid = c.oid AND o.nspname = 'cdc' AND f.proname IN (
                       'record_truncation', 'begin_truncation', 'record_partition_truncation')
                         AND g.tgenabled IN ('O', 'A')) AS unwatched,
       root = ANY (%(events)s) AND NOT EXISTS (
           SELECT FROM pg_trigger g JOIN pg_proc f ON f.oid = g.tgfoid JOIN pg_namespace o ON o.oid = f.pronamespace
           WHERE g.tgrelid = c.oid AND o.nspname = 'cdc' AND f.proname = 'refuse_update'
             AND g.tgenabled IN ('O', 'A')) AS unguarded,
       ARRAY(SELECT a.attname::text FROM pg_attribute a
             WHERE c.relkind = 'r' AND c.relreplident::text = 'f' AND a.attrelid = c.oid
               AND a.attgenerated::text = 'v' AND NOT a.attisdropped ORDER BY a.attnum) AS virtual
FROM captured JOIN pg_class c ON c.oid = captured.oid
"""


@dataclass(frozen=True)
class SlotFacts:
    """A replication slot of the server. Bytes are of WAL."""

    name: str
    type: str = "logical"
    active: bool = True
    plugin: str | None = "pgoutput"
    database: str | None = None
    wal_status: str | None = "reserved"
    retained_bytes: int | None = 0
    safe_bytes: int | None = None
    failover: bool | None = False


@dataclass(frozen=True)
class TableFacts:
    """A captured table: what would keep changes of it out of the log. A part of it counts, too."""

    unlogged: str = ""
    """The table, or the part of it, that isn't logged, as a statement takes its name."""
    partial: bool = False
    """Whether an update leaves large values out of the log."""
    hidden_by: str = ""
    """The kind of policies that hide rows from the connector's role."""
    unwatched: bool = False
    """Whether no trigger notes a TRUNCATE."""
    unguarded: bool = False
    """Whether its rows are events, and no trigger refuses an UPDATE."""
    virtual: tuple[str, ...] = ()
    """Virtual generated columns, if Postgres refuses updates because of them: the log never has such
    a column, and the replica identity is FULL.
    """


@dataclass(frozen=True)
class RoleFacts:
    """The connector's role."""

    can_replicate: bool = True
    superuser: bool = False
    unreadable: tuple[str, ...] = ()
    """Tables that it may not read, or not beat."""


@dataclass(frozen=True)
class PublicationFacts:
    """The publication of the pipeline's name."""

    owner: str
    owned: bool
    complete: bool
    """Whether it has inserts, updates and deletes, of a partitioned table under the table's
    name.
    """
    tables: tuple[str, ...]
    partial: tuple[str, ...] = ()
    """Tables of which it leaves out rows or columns."""


@dataclass(frozen=True)
class SourceFacts:
    """What was read of the source. A part that doesn't exist is None."""

    pipeline: str
    version: int
    """As `server_version_num`: 180006."""
    database: str
    in_recovery: bool
    settings: Mapping[str, str]
    slots: tuple[SlotFacts, ...]
    senders: int
    standbys: int
    transaction_s: float | None
    prepared_s: float | None
    control: bool
    """Whether the schema `cdc` is there."""
    beats: bool
    """Whether `cdc.heartbeat` has a row of the pipeline."""
    role_name: str
    role: RoleFacts | None
    publication: PublicationFacts | None
    tables: Mapping[str, TableFacts]
    refused: Mapping[str, tuple[str, str]]
    """The message and the hint for tables that can't be captured."""
    unidentified: Mapping[str, tuple[str, str]]
    """The same for tables whose replica identity lacks the key."""
    encrypted: bool = True
    """Whether the connection is encrypted, or doesn't leave this machine."""
    clock_off_s: float = 0.0
    disk_free_share: float | None = None
    """Of the disk with the server's data; None where that is another machine's."""
    connected: bool = True
    """Whether Connect has a connector of the pipeline's name."""

    @property
    def slot(self) -> SlotFacts | None:
        """The pipeline's own slot."""
        return next((slot for slot in self.slots if slot.name == self.pipeline), None)


def read_source(conn: Connection, pipeline: Pipeline, *, connected: bool) -> SourceFacts:
    """Read the facts. `connected`: Connect has a connector of the pipeline's name.

    Raises:
        SourceError: Postgres refuses or is away, or a table stays locked. psycopg.Error likewise.
    """
    conn.execute("SELECT set_config('lock_timeout', %s, false)", [LOCK_TIMEOUT])
    try:
        return _read_source(conn, pipeline, connected=connected)
    except psycopg.errors.LockNotAvailable as error:
        raise SourceError(
            f"A captured table, or one of the schema cdc, stayed locked for {LOCK_TIMEOUT} by an open transaction.",
            hint="end it (see xact_start in pg_stat_activity), then run the command again",
        ) from error


def _read_source(conn: Connection, pipeline: Pipeline, *, connected: bool) -> SourceFacts:
    name, role = pipeline.pipeline, pipeline.replication_user
    names = [entry.table for entry in pipeline.source.tables]
    (in_recovery,) = _row(conn, "SELECT pg_is_in_recovery()")
    (control,) = _row(conn, "SELECT to_regclass('cdc.heartbeat') IS NOT NULL")
    beats = control and _exists(conn, "SELECT FROM cdc.heartbeat WHERE pipeline = %s", [name])
    senders, standbys = _row(conn, SENDERS)
    transaction_s, prepared_s = _row(conn, TRANSACTIONS)
    survey = table_survey.survey(conn, pipeline)
    unidentified = row_identity.unidentified(conn, survey.tables)
    return SourceFacts(
        name,
        conn.info.server_version,
        conn.info.dbname,
        in_recovery,
        dict(conn.execute(SETTINGS).fetchall()),
        () if in_recovery else _slots(conn),
        senders,
        standbys,
        transaction_s,
        prepared_s,
        control,
        beats,
        role,
        _role(conn, role, names),
        _publication(conn, name),
        _tables(conn, pipeline, role),
        {table: (error.message, error.hint) for table, error in survey.refused.items()},
        {table: (error.message, error.hint) for table, error in unidentified.items()},
        _encrypted(conn),
        _clock_off(conn),
        _disk_free_share(conn),
        connected,
    )


def _row(conn: Connection, query: Any, parameters: Any = None) -> Any:
    row = conn.execute(query, parameters).fetchone()
    assert row is not None, "an aggregate has a row"
    return row


def _exists(conn: Connection, query: Any, parameters: Any) -> bool:
    return conn.execute(query, parameters).fetchone() is not None


def _slots(conn: Connection) -> tuple[SlotFacts, ...]:
    return tuple(SlotFacts(*row) for row in conn.execute(SLOTS).fetchall())


def _role(conn: Connection, role: str, tables: list[str]) -> RoleFacts | None:
    row = conn.execute(ROLE, [role]).fetchone()
    if row is None:
        return None
    (superuser,) = _row(conn, "SELECT rolsuper FROM pg_roles WHERE rolname = %s", [role])
    pairs = [name.split(".", 1) for name in (*tables, *CONTROL_TABLES)]
    schemas, relations = (list(part) for part in zip(*pairs, strict=True))
    unreadable = conn.execute(
        UNREADABLE, {"schemas": schemas, "tables": relations, "role": role}
    ).fetchall()
    return RoleFacts(row == (True,), superuser, tuple(name for (name,) in unreadable))


def _publication(conn: Connection, name: str) -> PublicationFacts | None:
    row = conn.execute(PUBLICATION, [name]).fetchone()
    if row is None:
        return None
    owner, owned, complete, tables, partial = row
    return PublicationFacts(owner, owned, complete, tuple(tables), tuple(partial))


def _tables(conn: Connection, pipeline: Pipeline, role: str) -> dict[str, TableFacts]:
    facts: dict[str, TableFacts] = {}
    entries = pipeline.source.tables
    names = [entry.table for entry in entries]
    events = [entry.table for entry in entries if entry.events]
    rows = conn.execute(TABLES, {"tables": names, "events": events, "role": role}).fetchall()
    for root, unlogged, partial, hidden_by, unwatched, unguarded, virtual in rows:
        earlier = facts.get(root, TableFacts())
        facts[root] = TableFacts(
            earlier.unlogged or unlogged,
            earlier.partial or partial,
            earlier.hidden_by or hidden_by,
            earlier.unwatched or unwatched,
            earlier.unguarded or unguarded,
            earlier.virtual or tuple(virtual),
        )
    return facts


def _encrypted(conn: Connection) -> bool:
    parameters = parse_dsn(conn.info.dsn)
    host = str(parameters.get("host") or parameters.get("hostaddr") or "localhost")
    if is_loopback(host):
        return True
    return _exists(conn, "SELECT FROM pg_stat_ssl WHERE pid = pg_backend_pid() AND ssl", None)


def _clock_off(conn: Connection) -> float:
    """Return by how many seconds the server's clock is ahead of this machine's."""
    began = time.time()
    (moment,) = _row(conn, "SELECT extract(epoch FROM clock_timestamp())::float8")
    return float(moment) - (began + time.time()) / 2


def _disk_free_share(conn: Connection) -> float | None:
    """Return the share of its disk that is free, where the server runs on this machine."""
    folder = conn.execute(
        "SELECT current_setting('data_directory', true)"
        " WHERE pg_has_role(current_user, 'pg_read_all_settings', 'USAGE')"
    ).fetchone()
    parameters = parse_dsn(conn.info.dsn)
    if not folder or not folder[0] or not is_loopback(str(parameters.get("host") or "localhost")):
        return None
    try:
        usage = shutil.disk_usage(folder[0])
    except OSError:
        return None
    return usage.free / usage.total
