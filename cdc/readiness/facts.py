"""Facts about a source, read from Postgres' catalog.

In:  a connection, the requirements of a pipeline. Out: `SourceFacts`, which `cdc.readiness.checks`
judges.
Invariant: reads only. Any role may run it; what it may not see counts as there.
"""

import shutil
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg import sql
from psycopg.rows import class_row

from cdc.errors import SourceError
from cdc.model.address import is_loopback
from cdc.readiness.key_index import Index

Connection = psycopg.Connection[Any]

CONTROL_PRIVILEGES = {
    "heartbeat": ("SELECT", "INSERT", "UPDATE"),
    "truncation": ("SELECT",),
    "ddl": ("SELECT",),
    "signal": ("SELECT", "INSERT"),
}
"""What the connector's role may do with the control tables."""
READER_PRIVILEGES = {
    **dict.fromkeys(("heartbeat", "truncation", "ddl", "migration", "storage"), ("SELECT",)),
    "published": ("SELECT",),
    # A run asks for rows again, and clears away what the connector left.
    "signal": ("SELECT", "INSERT", "DELETE"),
}
"""What the role of `source.reader` may do with the control tables."""
READER_FUNCTIONS = (
    "cdc.compare_as_owner()",
    "cdc.adopt_as_owner(oid)",
    "cdc.raise_floor_as_owner(text[])",
)
LOCK_TIMEOUT = "5s"
SERVER = """
SELECT current_setting('server_version_num')::int,
       coalesce(current_setting('effective_wal_level', true), current_setting('wal_level')),
       current_setting('server_encoding')
"""
SETTINGS = """
SELECT name, setting FROM pg_settings WHERE name IN (
    'max_replication_slots', 'max_wal_senders', 'max_slot_wal_keep_size', 'idle_replication_slot_timeout')
"""
SENDERS = """
SELECT pg_is_in_recovery(), count(*), count(*) FILTER (WHERE NOT EXISTS (
    SELECT FROM pg_replication_slots s WHERE s.active_pid = r.pid AND s.slot_type = 'logical'))
FROM pg_stat_replication r
"""
# Only a transaction that has written holds the slot back; to_jsonb reads what older servers lack.
SLOTS = """
SELECT s.active, s.active_pid, s.restart_lsn::text, s.confirmed_flush_lsn::text, s.wal_status,
       pg_wal_lsn_diff(pg_current_wal_lsn(), s.confirmed_flush_lsn)::bigint AS lag_bytes,
       pg_wal_lsn_diff(pg_current_wal_lsn(), s.restart_lsn)::bigint AS retained_bytes,
       s.safe_wal_size, s.plugin::text, s.database::text,
       to_jsonb(s) ->> 'invalidation_reason' AS lost_because,
       (SELECT extract(epoch FROM clock_timestamp() - min(started))::float8 FROM (
            SELECT xact_start AS started FROM pg_stat_activity WHERE backend_xid IS NOT NULL
            UNION ALL SELECT prepared FROM pg_prepared_xacts) AS writing) AS oldest_transaction_s,
       s.slot_name::text AS name, (to_jsonb(s) ->> 'failover')::bool AS failover
FROM pg_replication_slots s
WHERE %(name)s::text IS NULL OR s.slot_name = %(name)s
"""
TRANSACTIONS = """
SELECT (SELECT extract(epoch FROM clock_timestamp() - min(xact_start))::float8 FROM pg_stat_activity
        WHERE backend_xid IS NOT NULL AND pid <> pg_backend_pid()),
       (SELECT extract(epoch FROM clock_timestamp() - min(prepared))::float8 FROM pg_prepared_xacts)
"""
READABLE = """
SELECT has_schema_privilege(n.oid, 'USAGE') AND has_table_privilege(c.oid, 'SELECT')
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = 'cdc' AND c.relname = 'heartbeat'
"""
# to_jsonb: before 15 a publication has neither row filters nor column lists, and before 18 no
# generated columns.
PUBLICATION = """
SELECT pg_get_userbyid(p.pubowner) AS owner,
       coalesce(pg_has_role(to_regrole(quote_ident(%(owner)s))::oid, p.pubowner, 'USAGE'), false) AS owned,
       puballtables AS everything,
       p.pubinsert AND p.pubupdate AND p.pubdelete AND p.pubviaroot
           AND coalesce(to_jsonb(p) ->> 'pubgencols', 's') = 's' AS complete,
       ARRAY(SELECT schemaname || '.' || tablename FROM pg_publication_tables t WHERE t.pubname = p.pubname) AS tables,
       ARRAY(SELECT r.prrelid::regclass::text FROM pg_publication_rel r
             WHERE r.prpubid = p.oid AND (to_jsonb(r) ->> 'prqual' IS NOT NULL
                                          OR to_jsonb(r) ->> 'prattrs' IS NOT NULL)) AS partial,
       {schemas} AS schemas, p.pubtruncate AS truncates
FROM pg_publication p
WHERE p.pubname = %(name)s
"""
SCHEMAS = "EXISTS (SELECT FROM pg_publication_namespace s WHERE s.pnpubid = p.oid)"
UNREADABLE = """
SELECT nsp || '.' || rel
FROM unnest(%(schemas)s::text[], %(tables)s::text[], %(words)s::text[]) WITH ORDINALITY AS wanted (nsp, rel, word, at)
JOIN pg_namespace n ON n.nspname = nsp
JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = rel
WHERE NOT (has_schema_privilege(%(role)s, n.oid, 'USAGE') AND has_table_privilege(%(role)s, c.oid, word))
GROUP BY 1 ORDER BY min(at)
"""
# On Amazon RDS membership of a role replaces the attribute REPLICATION.
ROLE = """
SELECT rolcanlogin AND (rolreplication OR rolsuper OR EXISTS (
    SELECT FROM pg_roles s WHERE s.rolname = 'rds_replication' AND pg_has_role(r.oid, s.oid, 'MEMBER'))),
    rolsuper, r.oid = 10
FROM pg_roles r WHERE rolname = %s
"""
RESTRICTIVE = "restrictive"
HIDDEN_BY = f"""
CASE WHEN c.relrowsecurity
 AND NOT EXISTS (SELECT FROM pg_roles r WHERE r.rolname = %(role)s AND NOT r.rolsuper
                 AND pg_has_role(r.oid, c.relowner, 'USAGE') AND NOT c.relforcerowsecurity)
THEN coalesce((
     SELECT CASE WHEN bool_or(NOT p.polpermissive) THEN '{RESTRICTIVE}'
                 WHEN bool_or(pg_get_expr(p.polqual, p.polrelid) = 'true') THEN ''
                 ELSE 'permissive' END
     FROM pg_policy p
     WHERE p.polrelid = c.oid AND p.polcmd IN ('r', '*') AND EXISTS (
         SELECT FROM unnest(p.polroles) AS holder
         WHERE holder = 0 OR pg_has_role(to_regrole(quote_ident(%(role)s))::oid, holder, 'USAGE'))
     HAVING count(*) > 0
 ), 'permissive')
ELSE '' END
"""
"""Which kind of policies hides rows of a row `c` of pg_class from the parameter `role`; empty for
none. Only a policy whose condition is `true` counts as one that shows every row, and a restrictive
one never does. SUPERUSER and BYPASSRLS don't count, as `migrate` takes them away.
The log has all rows: only a snapshot, and whatever is sent again, lacks some.
"""
# The kind of policies that hide rows of tables from a role, by table. Only that role's own comparison
# would miss them, so the rights that the connector's role may not have count.
HIDDEN = f"""
SELECT label, hidden_by FROM (
    SELECT n.nspname || '.' || c.relname AS label, {HIDDEN_BY} AS hidden_by
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname || '.' || c.relname = ANY (%(tables)s)
      AND NOT EXISTS (SELECT FROM pg_roles WHERE rolname = %(role)s AND (rolsuper OR rolbypassrls))
) AS judged WHERE hidden_by <> ''
"""
# What the reader's role lacks, as statements, and whether the owner may run them. The role, and what
# is in the schema cdc, may be made by the statements before these.
MISSING_GRANTS = """
WITH reader AS (SELECT to_regrole(quote_ident(%(reader)s))::oid AS oid),
     owner AS (SELECT to_regrole(quote_ident(%(owner)s))::oid AS oid)
SELECT format('GRANT CONNECT ON DATABASE %%I TO %%I', datname, %(reader)s),
       pg_has_role(owner.oid, datdba, 'USAGE')
FROM pg_database, reader, owner
WHERE datname = current_database() AND has_database_privilege(reader.oid, pg_database.oid, 'CONNECT') IS NOT TRUE
UNION ALL
SELECT format('GRANT USAGE ON SCHEMA %%I TO %%I', name, %(reader)s),
       n.oid IS NULL OR pg_has_role(owner.oid, n.nspowner, 'USAGE')
FROM unnest(%(schemas)s::text[]) AS name LEFT JOIN pg_namespace n ON n.nspname = name, reader, owner
WHERE has_schema_privilege(reader.oid, n.oid, 'USAGE') IS NOT TRUE AND (n.oid IS NOT NULL OR name = 'cdc')
UNION ALL
SELECT format('GRANT %%s ON %%I.%%I TO %%I', string_agg(word, ', ' ORDER BY at), nsp, rel, %(reader)s), true
FROM reader,
     unnest(%(names)s::text[], %(tables)s::text[], %(words)s::text[]) WITH ORDINALITY AS wanted (nsp, rel, word, at)
LEFT JOIN (pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace) ON n.nspname = nsp AND c.relname = rel
WHERE has_table_privilege(reader.oid, c.oid, word) IS NOT TRUE AND (c.oid IS NOT NULL OR nsp = 'cdc')
GROUP BY nsp, rel
UNION ALL
SELECT format('GRANT EXECUTE ON FUNCTION %%s TO %%I', name, %(reader)s), true
FROM unnest(%(functions)s::text[]) AS name, reader
WHERE has_function_privilege(reader.oid, to_regprocedure(name)::oid, 'EXECUTE') IS NOT TRUE
"""
TRIGGER = """
EXISTS (SELECT FROM pg_trigger g JOIN pg_proc f ON f.oid = g.tgfoid JOIN pg_namespace o ON o.oid = f.pronamespace
        WHERE g.tgrelid = m.oid AND g.tgenabled IN ('O', 'A') AND o.nspname = 'cdc' AND f.proname IN ({}))
"""
WATCHED = TRIGGER.format("'record_truncation', 'begin_truncation', 'record_partition_truncation'")
GUARDED = TRIGGER.format("'refuse_update'")
# The replica identity is the partition's, not its partitioned table's. Only the policies of the table
# that is queried apply.
TABLES = f"""
SELECT c.oid, n.nspname::text AS schema, c.relname::text AS name, c.relkind::text AS kind,
       pg_get_userbyid(c.relowner) AS owner,
       coalesce(pg_has_role(to_regrole(quote_ident(%(owner)s))::oid, c.relowner, 'USAGE'), false) AS owned,
       {HIDDEN_BY} AS hidden_by,
       EXISTS (SELECT FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
               WHERE a.attrelid = c.oid AND a.attnum > 0 AND t.typstorage <> 'p') AS toastable,
       ARRAY(SELECT a.attname::text FROM pg_attribute a
             WHERE a.attrelid = c.oid AND a.attgenerated::text = 'v' AND NOT a.attisdropped
             ORDER BY a.attnum) AS virtual,
       ARRAY(SELECT kn.nspname || '.' || k.relname FROM pg_inherits i JOIN pg_class k ON k.oid = i.inhrelid
             JOIN pg_namespace kn ON kn.oid = k.relnamespace
             WHERE i.inhparent = c.oid AND c.relkind = 'r' ORDER BY 1) AS children,
       parts.*
FROM unnest(%(schemas)s::text[], %(names)s::text[]) WITH ORDINALITY AS wanted (nspname, relname, position)
JOIN pg_namespace n USING (nspname)
JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = wanted.relname
CROSS JOIN LATERAL (
    SELECT array_agg(m.oid) AS members,
           coalesce(min(CASE m.relpersistence WHEN 'u' THEN
               m.relnamespace::regnamespace::text || '.' || quote_ident(m.relname) END), '') AS unlogged,
           bool_or(m.relkind = 'r' AND m.relreplident = 'f') AS "full",
           bool_or(m.relkind = 'r' AND m.relreplident <> 'f') AS lean,
           n.nspname || '.' || c.relname <> ALL (%(events)s) AND NOT bool_and({WATCHED}) AS unwatched,
           n.nspname || '.' || c.relname = ANY (%(events)s) AND NOT bool_and({GUARDED}) AS unguarded
    FROM (SELECT c.oid UNION SELECT relid FROM pg_partition_tree(c.oid)) AS tree (oid) JOIN pg_class m USING (oid)
    WHERE m.relkind IN ('r', 'p') HAVING count(*) > 0
) AS parts
ORDER BY position
"""


@dataclass(frozen=True)
class SourceRequirements:
    """Requirements of a pipeline for its source database. `tables` are (schema, table).

    `keys` names, by schema.table, columns of a unique index that serve as the primary key. `events`:
    the tables, by the same name, whose rows are events.

    `password`: the role's, with its references to files.

    `owner`: the role that owns the tables; None: the connection's role. `reader`: the role of
    `source.reader`, if it is another one.
    """

    pipeline: str
    tables: Sequence[tuple[str, str]]
    role: str
    password: str | None = field(default=None, repr=False)
    keys: Mapping[str, Sequence[str]] = field(default_factory=dict)
    events: Collection[str] = ()
    owner: str | None = None
    reader: str | None = None

    @property
    def privileges(self) -> list[tuple[str, str, str]]:
        """What the role may do: schema, table, word."""
        control = CONTROL_PRIVILEGES.items()
        return [
            *((schema, name, "SELECT") for schema, name in self.tables),
            *(("cdc", name, word) for name, words in control for word in words),
        ]


@dataclass(frozen=True)
class TableFacts:
    """A captured table: where it is, and what would keep changes of it out of the log. A part of it
    counts, too.
    """

    oid: int = 0
    schema: str = ""
    name: str = ""
    kind: str = "r"
    owner: str = ""
    owned: bool = True
    """Whether our role may do what its owner may."""
    hidden_by: str = ""
    """The kind of policies that hide rows from the connector's role."""
    toastable: bool = False
    virtual: Sequence[str] = ()
    """Virtual generated columns: the log never has such a column."""
    children: Sequence[str] = ()
    """Tables that inherit from it and aren't its partitions."""
    members: Sequence[int] = ()
    """Its oid and its partitions' oids."""
    unlogged: str = ""
    """The table, or the part of it, that isn't logged, as a statement takes its name."""
    full: bool = False
    """Whether its replica identity, or a part's, is FULL."""
    lean: bool = False
    """Whether it is another one."""
    unwatched: bool = False
    """Whether no trigger notes a TRUNCATE."""
    unguarded: bool = False
    """Whether its rows are events, and no trigger refuses an UPDATE."""
    key_index: Index | None = None
    """The unique index of the key that the pipeline file names; None where the primary key
    serves.
    """

    @property
    def label(self) -> str:
        """The name for people: schema.table, without quotes."""
        return f"{self.schema}.{self.name}"

    @property
    def identifier(self) -> sql.Identifier:
        """The name for statements, quoted."""
        return sql.Identifier(self.schema, self.name)


@dataclass(frozen=True)
class RoleFacts:
    can_replicate: bool = True
    superuser: bool = False
    bootstrap: bool = False
    """Whether the server was made by it."""
    unreadable: tuple[str, ...] = ()
    """Tables that it may not read, or not write."""


@dataclass(frozen=True)
class PublicationFacts:
    owner: str
    owned: bool
    everything: bool
    """Whether it is for all tables of the database, other owners' included."""
    complete: bool
    """Whether it has inserts, updates and deletes, of a partitioned table under the table's
    name.
    """
    tables: Sequence[str]
    partial: Sequence[str] = ()
    """Tables of which it leaves out rows or columns."""
    schemas: bool = False
    """Whether it is for whole schemas."""
    truncates: bool = True


@dataclass(frozen=True)
class Slot:
    """A replication slot as the server reports it; bytes are of WAL, None where it gives none."""

    active: bool
    active_pid: int | None
    restart_lsn: str | None
    confirmed_flush_lsn: str | None
    wal_status: str | None
    lag_bytes: int | None
    """Written by the server, not yet confirmed by the connector."""
    retained_bytes: int | None
    safe_wal_size: int | None
    """Bytes that may still be written before the slot is lost; None without
    max_slot_wal_keep_size.
    """
    plugin: str | None
    database: str | None
    lost_because: str | None
    oldest_transaction_s: float | None
    """Age of the oldest open transaction that has written: the connector can't get past it."""
    name: str = ""
    failover: bool | None = None
    """Whether it is copied to standbys; None before Postgres 17."""


@dataclass(frozen=True)
class SourceFacts:
    """What was read of the source. A part that doesn't exist is None."""

    pipeline: str
    version: int
    """As `server_version_num`: 180006."""
    wal_level: str
    encoding: str
    database: str
    user: str
    in_recovery: bool
    settings: Mapping[str, str]
    slots: tuple[Slot, ...]
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
    refused: Mapping[str, SourceError]
    """Why tables can't be captured."""
    unidentified: Mapping[str, SourceError]
    """The same for tables whose replica identity lacks the key."""
    encrypted: bool = True
    """Whether the connection is encrypted, or doesn't leave this machine."""
    clock_off_s: float = 0.0
    disk_free_share: float | None = None
    """Of the disk with the server's data; None where that is another machine's."""
    connected: bool = True
    """Whether Connect has a connector of the pipeline's name."""
    reader_name: str | None = None
    """The role of `source.reader`, if that is another one than the user's."""
    missing_grants: tuple[str, ...] = ()
    """Statements that grant it what it lacks."""
    hidden_from_reader: Mapping[str, str] = field(default_factory=dict)
    """The kind of policies that hide rows from it, by table."""

    @property
    def slot(self) -> Slot | None:
        """The pipeline's own slot."""
        return next((slot for slot in self.slots if slot.name == self.pipeline), None)


@contextmanager
def bounded_locks(
    conn: Connection,
    timeout: str = LOCK_TIMEOUT,
    tables: str = "A captured table, or one of the schema cdc,",
) -> Iterator[None]:
    """A transaction that waits for no lock longer than that. Raises SourceError, which says which
    `tables` may be locked.
    """
    try:
        with conn.transaction():
            conn.execute("SELECT set_config('lock_timeout', %s, true)", [timeout])
            yield
    except (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected) as error:
        raise SourceError(
            f"{tables} stayed locked for {timeout} by an open transaction.",
            hint="end it (see xact_start in pg_stat_activity), then run the command again",
        ) from error


def read_source(
    conn: Connection,
    requirements: SourceRequirements,
    *,
    refused: Mapping[str, SourceError],
    unidentified: Mapping[str, SourceError],
    connected: bool,
) -> SourceFacts:
    """Read the facts. `connected`: Connect has a connector of the pipeline's name.

    Raises:
        psycopg.Error: Postgres refuses or is away, or a table stays locked.
    """
    name = requirements.pipeline
    role = requirements.role
    version, wal_level, encoding = read_server(conn)
    in_recovery, senders, standbys = _row(conn, SENDERS)
    control, beats = read_control(conn, name)
    transaction_s, prepared_s = _row(conn, TRANSACTIONS)
    return SourceFacts(
        name,
        version,
        wal_level,
        encoding,
        conn.info.dbname,
        owner_of(conn, requirements),
        in_recovery,
        dict(conn.execute(SETTINGS).fetchall()),
        () if in_recovery else read_slots(conn),
        senders,
        standbys,
        transaction_s,
        prepared_s,
        control,
        beats,
        role,
        read_role(conn, requirements),
        read_publication(conn, name, requirements.owner),
        {table.label: table for table in read_tables(conn, requirements)},
        refused,
        unidentified,
        _is_local(conn)
        or _exists(conn, "SELECT FROM pg_stat_ssl WHERE pid = pg_backend_pid() AND ssl"),
        _clock_off(conn),
        _disk_free_share(conn),
        connected,
        requirements.reader,
        tuple(statement for statement, _ in read_missing_grants(conn, requirements)),
        read_hidden(
            conn, requirements.reader, [f"{schema}.{name}" for schema, name in requirements.tables]
        )
        if requirements.reader
        else {},
    )


def owner_of(conn: Connection, requirements: SourceRequirements) -> str:
    """The role that owns the tables, as far as the pipeline file knows."""
    return requirements.owner or conn.info.user


def read_server(conn: Connection) -> tuple[int, str, str]:
    """Read `server_version_num`, `wal_level` and `server_encoding`."""
    version, wal_level, encoding = _row(conn, SERVER)
    return version, wal_level, encoding


def read_slots(conn: Connection, name: str | None = None) -> tuple[Slot, ...]:
    """Read all slots of the server, of any database, or only the slot of a name."""
    with conn.cursor(row_factory=class_row(Slot)) as cursor:
        return tuple(cursor.execute(SLOTS, {"name": name}).fetchall())


def read_slot(conn: Connection, name: str) -> Slot | None:
    """Read the slot of that name, in any database; None if there is none."""
    return next(iter(read_slots(conn, name)), None)


def read_control(conn: Connection, name: str) -> tuple[bool, bool]:
    """Read whether the schema `cdc` is there, and whether a pipeline has a heartbeat in it."""
    row = conn.execute(READABLE).fetchone()
    if row != (True,):
        return row is not None, row is not None
    return True, _exists(conn, "SELECT FROM cdc.heartbeat WHERE pipeline = %s", [name])


def read_publication(
    conn: Connection, name: str, owner: str | None = None
) -> PublicationFacts | None:
    """Read the publication of a name; None if there is none. `owner`: whose it should be, if that
    isn't the role of the connection.
    """
    schemas = SCHEMAS if conn.info.server_version >= 150000 else "false"
    with conn.cursor(row_factory=class_row(PublicationFacts)) as cursor:
        query = PUBLICATION.format(schemas=schemas).encode()
        return cursor.execute(query, {"name": name, "owner": owner or conn.info.user}).fetchone()


def read_tables(conn: Connection, requirements: SourceRequirements) -> list[TableFacts]:
    """Read the captured tables that exist, in the order given."""
    parameters = {
        "role": requirements.role,
        "owner": owner_of(conn, requirements),
        "schemas": [schema for schema, _ in requirements.tables],
        "names": [name for _, name in requirements.tables],
        "events": list(requirements.events),
    }
    with conn.cursor(row_factory=class_row(TableFacts)) as cursor:
        return cursor.execute(TABLES, parameters).fetchall()


def _row(conn: Connection, query: Any) -> Any:
    row = conn.execute(query).fetchone()
    assert row is not None, "an aggregate has a row"
    return row


def _exists(conn: Connection, query: Any, parameters: Any = None) -> bool:
    return conn.execute(query, parameters).fetchone() is not None


def read_role(conn: Connection, requirements: SourceRequirements) -> RoleFacts | None:
    """Read the connector's role; None if there is none."""
    row = conn.execute(ROLE, [requirements.role]).fetchone()
    if row is None:
        return None
    privileges = requirements.privileges
    parameters = {
        "schemas": [schema for schema, _, _ in privileges],
        "tables": [table for _, table, _ in privileges],
        "words": [word for _, _, word in privileges],
        "role": requirements.role,
    }
    unreadable = conn.execute(UNREADABLE, parameters).fetchall()
    can_replicate, superuser, bootstrap = row
    names = tuple(name for (name,) in unreadable)
    return RoleFacts(can_replicate, superuser, bootstrap, names)


def read_missing_grants(
    conn: Connection, requirements: SourceRequirements
) -> list[tuple[str, bool]]:
    """Read what the role of `source.reader` lacks, as statements, and whether the owner may run
    each. Nothing without such a role.
    """
    if requirements.reader is None:
        return []
    control = READER_PRIVILEGES.items()
    wanted = [
        *((schema, table, "SELECT") for schema, table in requirements.tables),
        *(("cdc", table, word) for table, words in control for word in words),
    ]
    parameters = {
        "reader": requirements.reader,
        "owner": owner_of(conn, requirements),
        "schemas": sorted({schema for schema, _, _ in wanted}),
        "names": [schema for schema, _, _ in wanted],
        "tables": [table for _, table, _ in wanted],
        "words": [word for _, _, word in wanted],
        "functions": list(READER_FUNCTIONS),
    }
    return conn.execute(MISSING_GRANTS, parameters).fetchall()


def read_hidden(conn: Connection, role: str, tables: Sequence[str]) -> dict[str, str]:
    """Read which tables, named schema.table, have policies that hide rows from a role: their kind."""
    return dict(conn.execute(HIDDEN, {"role": role, "tables": list(tables)}).fetchall())


def _is_local(conn: Connection) -> bool:
    parameters = conn.info.get_parameters()
    host = parameters.get("host") or parameters.get("hostaddr") or "localhost"
    return is_loopback(host)


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
    if not folder or not folder[0] or not _is_local(conn):
        return None
    try:
        usage = shutil.disk_usage(folder[0])
    except OSError:
        return None
    return usage.free / usage.total
