"""Runner of migrations: applies numbered SQL files in order, each once and in a transaction of its
own.

In:  a folder of `NNNN_what.sql`, numbered from 0001 without gaps; a connection that may create a
schema. Out: rows of `cdc.migration`; a file's name there is `<folder kind>/<file>`, so folders
don't clash.
Invariant: the recorded checksum is computed from the bytes that were run; files are append-only.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg
from psycopg.pq import TransactionStatus

from cdc.errors import SourceError
from cdc.readiness.checks import check_server, refuse
from cdc.readiness.facts import read_server

CONTROL = Path(__file__).parent
SAMPLE = CONTROL / "sample"

LOCK = "cdc.migrate"
RECORD = """
CREATE SCHEMA IF NOT EXISTS cdc;
CREATE TABLE IF NOT EXISTS cdc.migration (
    name text PRIMARY KEY, checksum text NOT NULL, applied_at timestamptz NOT NULL DEFAULT clock_timestamp()
)
"""


@dataclass(frozen=True)
class Migration:
    """A migration file: `<folder kind>/<file>` and its bytes."""

    name: str
    sql: bytes

    @property
    def checksum(self) -> str:
        """SHA-256 of the file, in hex."""
        return hashlib.sha256(self.sql).hexdigest()


def migrate(conn: psycopg.Connection, folder: Path = CONTROL) -> dict[str, bool]:
    """Apply the files of `folder` that haven't been applied. Returns the names of all, in order, and
    whether this run has applied them.

    The connection must not be inside a transaction. Waits for another migrator, then applies the
    files that remain. Raises SourceError: wrong wal_level, missing privilege, an edited, missing or
    failing file.
    """
    require_idle(conn)
    files = migrations(folder)
    require_capturable(conn)
    try:
        with migration_lock(conn):
            _create_record(conn)
            checksums = recorded(conn, folder_kind(folder))
            _refuse_rewritten(files, checksums)
            for file in files:
                if file.name not in checksums:
                    _apply(conn, file)
            return {file.name: file.name not in checksums for file in files}
    except psycopg.Error as error:
        raise SourceError(
            f"migrations can't be recorded: {error.diag.message_primary or 'the connection was lost'}",
            hint="repair the cause and run cdc migrate again",
        ) from error


def folder_kind(folder: Path) -> str:
    """Name the kind of a folder: control, or the folder's own name."""
    return "control" if folder == CONTROL else folder.name


def migrations(folder: Path) -> list[Migration]:
    names = sorted(path.name for path in folder.glob("*.sql"))
    numbers = [name.partition("_")[0] for name in names]
    if not names or numbers != [f"{number:04}" for number in range(1, len(names) + 1)]:
        raise SourceError(
            f"The files of {folder} aren't numbered from 0001 without gaps.",
            hint="install cdc again",
        )
    return [
        Migration(f"{folder_kind(folder)}/{name}", (folder / name).read_bytes()) for name in names
    ]


def require_idle(conn: psycopg.Connection) -> None:
    """Check that no transaction is open: it would make every commit below a savepoint. Raises
    ValueError.
    """
    if conn.info.transaction_status != TransactionStatus.IDLE:
        raise ValueError("the connection is inside a transaction; commit it first")


def require_capturable(conn: psycopg.Connection) -> None:
    """Check that changes can be captured from the server. Raises SourceError."""
    with conn.transaction():
        refuse(check_server(*read_server(conn)))


@contextmanager
def migration_lock(conn: psycopg.Connection) -> Iterator[None]:
    """Hold the database's lock for changes of the control schema; others wait for it."""
    with conn.transaction():
        conn.execute("SELECT pg_advisory_lock(hashtextextended(%s, 0))", [LOCK])
    try:
        yield
    finally:
        if not conn.closed:
            with conn.transaction():
                conn.execute("SELECT pg_advisory_unlock(hashtextextended(%s, 0))", [LOCK])


def _create_record(conn: psycopg.Connection) -> None:
    try:
        with conn.transaction():
            if conn.execute("SELECT to_regclass('cdc.migration')").fetchone() != (None,):
                return
            conn.execute(RECORD)
    except psycopg.errors.InsufficientPrivilege as error:
        raise no_privilege(conn, error, f"GRANT CREATE ON DATABASE {conn.info.dbname}") from error


def no_privilege(conn: psycopg.Connection, error: psycopg.Error, grant: str) -> SourceError:
    """Make the error of a role that lacks a privilege, with the grant as its hint."""
    role = conn.info.user
    return SourceError(
        f"role {role} lacks a privilege: {error.diag.message_primary}",
        hint=f"run {grant} TO {role}; all that an administrator has to run is printed by: cdc -p FILE migrate --sql",
        role=role,
    )


def recorded(conn: psycopg.Connection, folder: str) -> dict[str, str]:
    """Read the checksums of the applied files of a kind, by name; empty before the first."""
    try:
        with conn.transaction():
            if conn.execute("SELECT to_regclass('cdc.migration')").fetchone() == (None,):
                return {}
            rows = conn.execute(
                "SELECT name, checksum FROM cdc.migration WHERE starts_with(name, %s)",
                [f"{folder}/"],
            )
            return dict(rows.fetchall())
    except psycopg.errors.InsufficientPrivilege as error:
        grant = "GRANT USAGE ON SCHEMA cdc, and SELECT and INSERT ON cdc.migration,"
        raise no_privilege(conn, error, grant) from error


def pending(conn: psycopg.Connection) -> list[Migration]:
    """List the files of the control schema that haven't been applied. Raises SourceError for an
    applied file that was changed since.
    """
    files = migrations(CONTROL)
    checksums = recorded(conn, folder_kind(CONTROL))
    _refuse_rewritten(files, checksums)
    return [file for file in files if file.name not in checksums]


def _refuse_rewritten(files: Sequence[Migration], checksums: dict[str, str]) -> None:
    """Refuse changed history: an applied file must still exist, unchanged."""
    present = {file.name for file in files}
    for name in sorted(checksums.keys() - present):
        raise SourceError(
            f"{name} was applied to this database but isn't here",
            hint="use the version of cdc that applied it, or a newer one",
            file=name,
        )
    for file in files:
        if checksums.get(file.name, file.checksum) != file.checksum:
            raise SourceError(
                f"{file.name} was changed after it had been applied",
                hint="restore the file as it was (git checkout) and put the change into a new one",
                file=file.name,
            )


def _apply(conn: psycopg.Connection, file: Migration) -> None:
    try:
        with conn.transaction():
            conn.execute(file.sql)
            conn.execute(
                "INSERT INTO cdc.migration (name, checksum) VALUES (%s, %s)",
                [file.name, file.checksum],
            )
    except psycopg.Error as error:
        raise SourceError(
            f"{file.name}{_line(file, error)}: {error.diag.message_primary or 'the connection was lost'}",
            hint="nothing of this file was kept; repair the cause and run cdc migrate again",
            file=file.name,
        ) from error


def _line(file: Migration, error: psycopg.Error) -> str:
    if error.diag.statement_position is None:
        return ""
    preceding = file.sql.decode(errors="replace")[: int(error.diag.statement_position) - 1]
    return f" line {preceding.count(chr(10)) + 1}"
