"""Read from Postgres: the captured tables, the slot, and whether the server can be captured from.

In:  a libpq DSN and the pipeline file.
Out: `Table`s in the order of the file, `Slot`; SourceError with what repairs it.
Invariant: no function here writes or leaves a setting behind, and no message holds a password.
"""

import difflib
import os
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import class_row

from cdc.config.settings import Pipeline
from cdc.config.source_settings import TableSettings
from cdc.config.view_settings import SCHEMA, tables_of
from cdc.errors import SettingsError, SourceError, SourceUnavailable
from cdc.model import column_names, pg_types
from cdc.model.causes import UNKNOWN, cause
from cdc.model.position import Server
from cdc.model.table import Column, Derivation, IndexOptions, Table
from cdc.postgres import catalog, row_identity

Connection = row_identity.Connection

OLDEST_VERSION = 140000
CONNECT_TIMEOUT_S = 5

# libpq gives no SQLSTATE for a refused login, only the server's text; a server that speaks another
# language falls through to the general hint.
REFUSALS = (
    ("password authentication failed", "check the user and the password of source.dsn"),
    ("no password supplied", "source.dsn names no password, and the server asks for one"),
    ("role ", "source.dsn names a user that the server lacks: check it, or CREATE ROLE ... LOGIN"),
    ("database ", "source.dsn names a database that the server lacks: check it, or createdb"),
    ("no pg_hba.conf entry", "allow this client in the server's pg_hba.conf"),
    ("too many clients", "raise max_connections, or close idle clients"),
)

UNTRUSTED = {
    "trust": "append sslrootcert=/path/of/its/ca.pem (or sslrootcert=system) to source.dsn",
    "certificate": "write the host name of its certificate in source.dsn, or renew the certificate",
    "client": "append sslcert=... and sslkey=... to source.dsn",
    "plain": "enable TLS at the server, or take sslmode out of source.dsn",
}
"""Hints by the kind of a `Cause`."""
TRANSIENT_REFUSALS = (
    "starting up",
    "shutting down",
    "recovery mode",
    "too many clients",
    "remaining connection slots",
)
"""Refusals of a server that will accept connections again by itself."""

TABLES = """
SELECT c.oid, c.relkind::text FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = %s AND c.relname = %s
"""
# All columns: the connector also checks those that are excluded.
NAMES = "SELECT attname::text FROM pg_attribute WHERE attrelid = %s AND attnum > 0 AND NOT attisdropped ORDER BY attnum"
# A domain is captured as what it is made of. A type that the connector doesn't know comes as its
# text.
COLUMNS = """
WITH RECURSIVE bare (at, name, nullable, type, mod) AS (
    SELECT attnum, attname::text, NOT attnotnull, atttypid, atttypmod FROM pg_attribute
    WHERE attrelid = %s AND attnum > 0 AND NOT attisdropped AND attgenerated::text = ANY (%s)
    UNION ALL
    SELECT at, name, nullable, typbasetype, CASE mod WHEN -1 THEN typtypmod ELSE mod END
    FROM bare JOIN pg_type d ON d.oid = type WHERE typtype = 'd'
)
SELECT name, CASE WHEN e.typtype IN ('c', 'd') OR e.typtype <> 'e' AND e.typname <> ALL (%s)
                       AND e.typnamespace <> 'pg_catalog'::regnamespace
                  THEN CASE e.oid WHEN t.oid THEN 'unknown' ELSE 'unknown[]' END
                  ELSE format_type(type, mod) END, nullable
FROM bare JOIN pg_type t ON t.oid = type
JOIN pg_type e ON e.oid = CASE t.typcategory WHEN 'A' THEN t.typelem ELSE t.oid END
WHERE t.typtype <> 'd'
ORDER BY at
"""
GENERATED = """
SELECT n.nspname || '.' || c.relname, array_agg(a.attname::text ORDER BY a.attnum)
FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname || '.' || c.relname = ANY (%s) AND NOT a.attisdropped AND a.attgenerated <> ''
      AND a.attgenerated::text <> ALL (%s)
GROUP BY 1
"""
# Only a transaction that has written holds the slot back; to_jsonb reads what older servers lack.
SLOT = """
SELECT s.active, s.active_pid, s.restart_lsn::text, s.confirmed_flush_lsn::text, s.wal_status,
       pg_wal_lsn_diff(pg_current_wal_lsn(), s.confirmed_flush_lsn)::bigint AS lag_bytes,
       pg_wal_lsn_diff(pg_current_wal_lsn(), s.restart_lsn)::bigint AS retained_bytes,
       s.safe_wal_size, s.plugin::text, s.database::text,
       to_jsonb(s) ->> 'invalidation_reason' AS lost_because,
       (SELECT extract(epoch FROM clock_timestamp() - min(started))::float8 FROM (
            SELECT xact_start AS started FROM pg_stat_activity WHERE backend_xid IS NOT NULL
            UNION ALL SELECT prepared FROM pg_prepared_xacts) AS writing) AS oldest_transaction_s
FROM pg_replication_slots s
WHERE s.slot_name = %s
"""


# The timeline that is written to now: the one in the control file is that of the last checkpoint.
SERVER = """
SELECT system_identifier::text,
       CASE WHEN NOT pg_is_in_recovery()
            THEN ('x' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::int END
FROM pg_control_system()
"""


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


def connect(dsn: str) -> Connection:
    """Open a connection in autocommit mode.

    Raises:
        SettingsError: the DSN can't be read. SourceError: the server is down or refuses.
    """
    parameters = parse_dsn(dsn)
    # Without client_encoding psycopg returns texts of a database in SQL_ASCII as bytes.
    defaults = {
        "connect_timeout": str(CONNECT_TIMEOUT_S),
        "application_name": "cdc",
        "client_encoding": "UTF8",
    }
    settings = {**defaults, **parameters}
    try:
        return psycopg.connect(make_conninfo("", **settings), autocommit=True)
    except psycopg.OperationalError as error:
        raise _connection_error(str(error), parameters) from None


@contextmanager
def within(conn: Connection, seconds: float) -> Iterator[None]:
    """Shut a connection after so many seconds: psycopg would wait for a silent server for ever.

    The waiting thread then gets psycopg's error for a lost connection.
    """
    timer = threading.Timer(seconds, _shut, [conn])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        # A shutdown that has begun must end before another connection can get the same file
        # descriptor.
        timer.join()


def _shut(conn: Connection) -> None:
    with suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(conn.fileno())) as wire:
        wire.shutdown(socket.SHUT_RDWR)


def parse_dsn(dsn: str) -> dict[str, Any]:
    """The parameters of a DSN. The SettingsError doesn't quote it, since it may hold a password."""
    try:
        return dict(conninfo_to_dict(dsn))
    except psycopg.ProgrammingError:
        raise SettingsError(
            "source.dsn isn't a Postgres connection string.",
            hint="write postgresql://user:password@host:port/database, with %XX for special characters",
        ) from None


UNREADABLE = "the address in source.dsn"


def _address(parameters: Mapping[str, Any]) -> str:
    """Host and port to show. libpq takes a part of a password with `@` or `/` for the host, port or
    database.
    """
    host = str(parameters.get("host") or parameters.get("hostaddr") or "localhost")
    port, database = str(parameters.get("port") or 5432), str(parameters.get("dbname") or "")
    if "@" in host + database or not port.replace(",", "").isdigit():
        return UNREADABLE
    return f"{host}:{port}"


def _connection_error(text: str, parameters: dict[str, Any]) -> SourceError:
    server = _address(parameters)
    # Without a password to send, libpq gives up by itself, before the server answers.
    _, refusal, reason = text.partition("FATAL:" if "FATAL:" in text else "fe_sendauth:")
    if not refusal:
        why = cause(text) if server != UNREADABLE else UNKNOWN
        hint = UNTRUSTED.get(
            why.kind,
            "check host and port of source.dsn; the local stack is started by: cdc -p FILE up",
        )
        kind = SourceUnavailable if why.is_transient else SourceError
        return kind(f"Postgres at {server} can't be reached{why}.", hint=hint, server=server)
    first = reason.strip().splitlines()[0]
    hint = next((hint for words, hint in REFUSALS if words in first), "the server's log says more")
    if server == UNREADABLE:
        first, hint = (
            "the login",
            "write special characters of the user and the password in source.dsn as %XX",
        )
    kind = SourceUnavailable if any(words in first for words in TRANSIENT_REFUSALS) else SourceError
    return kind(f"Postgres at {server} refuses: {first}.", hint=hint, server=server)


def server(conn: Connection) -> Server | None:
    """The identity of this server; None for a standby, and if the role may not read it."""
    try:
        system, timeline = conn.execute(SERVER).fetchone() or (None, None)
    except psycopg.errors.InsufficientPrivilege:
        return None
    return Server(system, timeline) if timeline is not None else None


def preflight(conn: Connection, pipeline: Pipeline) -> None:
    """Raise SourceError for a server that can't be captured from."""
    level = conn.execute("SHOW wal_level").fetchone()
    assert level is not None
    check_server(level[0], conn.info.server_version, pipeline.pipeline)


def check_server(wal_level: str, version: int, pipeline: str) -> None:
    """The rule of `preflight`. `version` is `server_version_num`: 140000."""
    if version < OLDEST_VERSION:
        raise SourceError(
            f"Postgres {version // 10000} is too old for pipeline {pipeline}.",
            hint="upgrade the server to 14 or later",
        )
    if wal_level != "logical":
        raise SourceError(
            f"The server has wal_level = {wal_level}; pipeline {pipeline} takes logical.",
            hint="ALTER SYSTEM SET wal_level = 'logical', restart the server, then run the command again",
        )


def describe(
    conn: Connection, pipeline: Pipeline, refusals: column_names.Refusals = column_names.refusals
) -> tuple[Table, ...]:
    """The captured tables, in the order of the pipeline file.

    `refusals` may be stricter than the default, which holds for all views.

    Raises:
        SourceError: tables don't exist or can't be captured; the hint repairs them.
    """
    result = survey(conn, pipeline, refusals)
    if result.refused:
        raise column_names.combined_error(list(result.refused.values()))
    return result.tables


class UnknownExclude(SourceError):
    """The pipeline file excludes a column that doesn't exist. The table can still be captured
    exactly.
    """


@dataclass(frozen=True)
class Survey:
    """The tables that can be captured, in the order of the pipeline file, and the errors for the
    others, by table.
    """

    tables: tuple[Table, ...]
    refused: Mapping[str, SourceError]


def survey(
    conn: Connection, pipeline: Pipeline, refusals: column_names.Refusals = column_names.refusals
) -> Survey:
    """Describe each captured table on its own, so that one that can't be captured doesn't stop the
    others.
    """
    tables, refused = [], {}
    # format_type leaves the schema out when the search path reaches the type; the rollback restores
    # the path.
    with conn.transaction(force_rollback=True):
        conn.execute("SET LOCAL search_path = ''")
        kinds = _published_kinds(conn, pipeline.pipeline)
        for entry in pipeline.source.tables:
            try:
                tables.append(_describe(conn, entry, pipeline, kinds, refusals))
            except SourceError as error:
                refused[entry.table] = error
        refused |= catalog.listed_partitions(conn, [table.qualified for table in tables])
    return Survey(tuple(table for table in tables if table.qualified not in refused), refused)


def unreplicated_columns(conn: Connection, pipeline: Pipeline) -> dict[str, tuple[str, ...]]:
    """Generated columns that the log doesn't carry, by table. A snapshot would read them: exclude
    them.
    """
    kinds = _published_kinds(conn, pipeline.pipeline)
    tables = [entry.table for entry in pipeline.source.tables]
    return {table: tuple(columns) for table, columns in conn.execute(GENERATED, [tables, kinds])}


def _published_kinds(conn: Connection, publication: str) -> list[str]:
    """Values of `attgenerated` that the log carries: before 18 no generated columns, from 18 on
    perhaps stored ones.
    """
    if conn.info.server_version < 180000:
        return [""]
    row = conn.execute(
        "SELECT pubgencols FROM pg_publication WHERE pubname = %s", [publication]
    ).fetchone()
    # `cdc migrate`, which comes before `cdc register`, makes the publication with stored ones.
    return ["", "s"] if row is None or row[0] == "s" else [""]


def table_named(tables: Sequence[Table], name: str) -> Table:
    """The table of that name, schema.table. Raises SettingsError."""
    for table in tables:
        if table.qualified == name:
            return table
    names = ", ".join(table.qualified for table in tables)
    raise SettingsError(f"The pipeline doesn't capture {name}.", hint=f"one of: {names}")


def tables_by_name_only(pipeline: Pipeline) -> tuple[Table, ...]:
    """The captured tables without columns and key, which are unknown while Postgres is down."""
    return tuple(
        Table(schema, name, (), (), pipeline.topic(entry.table))
        for entry in pipeline.source.tables
        for schema, name in [entry.table.split(".")]
    )


def views_by_name_only(pipeline: Pipeline) -> tuple[Table, ...]:
    """The views of several tables, also without columns and key."""
    return tuple(
        Table(
            SCHEMA,
            name,
            (),
            (),
            pipeline.view_topic(name),
            derivation=Derivation(
                "",
                tuple((table, pipeline.topic(table)) for table in tables_of(view)),
                tuple(sink for sink in view.to if sink in pipeline.sinks),
            ),
        )
        for name, view in pipeline.views.items()
    )


def _describe(
    conn: Connection,
    entry: TableSettings,
    pipeline: Pipeline,
    kinds: list[str],
    refusals: column_names.Refusals,
) -> Table:
    schema, name = entry.table.split(".")
    relation = conn.execute(TABLES, [schema, name]).fetchone()
    if relation is None:
        raise _no_such_table(conn, entry.table)
    oid, kind = relation
    _check_kind(entry.table, kind)
    unique = row_identity.key_index(conn, oid, entry.table, entry.key)
    key = entry.key or tuple(unique.columns)
    columns = [
        Column(*row) for row in conn.execute(COLUMNS, [oid, kinds, list(pg_types.CONNECTOR_TYPES)])
    ]
    _check_exclude(entry, [column.name for column in columns], key)
    captured = tuple(column for column in columns if column.name not in entry.exclude)
    index = IndexOptions(entry.index.fields, entry.index.settings)
    table = Table(schema, name, captured, key, pipeline.topic(entry.table), index=index)
    collisions = column_names.case_collisions(name for (name,) in conn.execute(NAMES, [oid]))
    if error := column_names.refusal_error(table, lambda table: [*collisions, *refusals(table)]):
        raise error
    return table


def _no_such_table(conn: Connection, table: str) -> SourceError:
    rows = conn.execute(
        "SELECT n.nspname || '.' || c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
        " WHERE c.relkind IN ('r', 'p') AND n.nspname !~ '^(pg_|information_schema$|cdc$)' ORDER BY 1"
    )
    folded = {name.lower(): name for (name,) in rows}
    near = difflib.get_close_matches(table.lower(), folded, n=1)
    hint = f"did you mean {folded[near[0]]}?" if near else "create it, or correct source.tables"
    return SourceError(
        f"There is no table {table} in database {conn.info.dbname}.", hint=hint, table=table
    )


def _check_kind(table: str, kind: str) -> None:
    if kind not in ("r", "p"):
        raise SourceError(
            f"{table} isn't a table; the replication log has rows of tables only.",
            hint="list the tables that it is made from under source.tables",
            table=table,
        )


def _check_exclude(entry: TableSettings, columns: list[str], key: Sequence[str]) -> None:
    for column in entry.exclude:
        if column in key:
            raise SourceError(
                f"{entry.table} excludes {column}, which is part of its key.",
                hint=f"take {column} out of exclude: without it rows can't be told apart",
                table=entry.table,
            )
        if column not in columns:
            near = difflib.get_close_matches(column, columns, n=1)
            raise UnknownExclude(
                f"{entry.table} excludes {column}, but has no such column.",
                hint=f"did you mean {near[0]}?" if near else f"its columns: {', '.join(columns)}",
                table=entry.table,
            )


def slot(conn: Connection, name: str) -> Slot | None:
    """The slot of that name, in any database; None if there is none."""
    with conn.cursor(row_factory=class_row(Slot)) as cursor:
        return cursor.execute(SLOT, [name]).fetchone()
