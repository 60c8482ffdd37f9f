"""Connect to the source, and check whether the server can be captured from.

In:  a libpq DSN and the pipeline file.
Out: a connection; SourceError with what repairs it.
Invariant: no function here writes or leaves a setting behind, and no message holds a password.
"""

import os
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from cdc.config.source_settings import Source
from cdc.errors import SecretUnreadable, SettingsError, SourceError, SourceUnavailable
from cdc.model import secrets
from cdc.model.causes import UNKNOWN, cause
from cdc.model.position import Server
from cdc.model.session_settings import CATALOG_FIRST, session_options, settings_since
from cdc.readiness.checks import OLDEST_VERSION

Connection = psycopg.Connection[tuple[Any, ...]]
CONNECT_TIMEOUT_S = 5
PASSWORDS = ("password", "sslpassword")
OWNER = "source.dsn"
READER = "source.reader"
POOLER = "source.dsn leads to a pooler that refuses session settings: write the address of the server itself"
# libpq gives no SQLSTATE for a refused login, only the server's text; a server that speaks another
# language falls through to the general hint.
REFUSALS = (
    ("password authentication failed", "check the user and the password of source.dsn"),
    ("no password supplied", "source.dsn names no password, and the server asks for one"),
    ("role ", "source.dsn names a user that the server lacks: check it, or CREATE ROLE ... LOGIN"),
    ("database ", "source.dsn names a database that the server lacks: check it, or createdb"),
    ("no pg_hba.conf entry", "allow this client in the server's pg_hba.conf"),
    ("unsupported startup parameter", POOLER),
    # Amazon's RDS Proxy.
    ("command-line options", POOLER),
    ("too many clients", "raise max_connections, or close idle clients"),
)
UNTRUSTED = {
    "trust": "append sslrootcert=/path/of/its/ca.pem (or sslrootcert=system) to source.dsn",
    "certificate": "write the host name of its certificate in source.dsn, or renew the certificate",
    "client": "append sslcert=... and sslkey=... to source.dsn",
    "lapsed": "renew the certificate that sslcert= in source.dsn names; it is tried again",
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
# The timeline that is written to now: the control file has the last checkpoint's.
SERVER = """
SELECT system_identifier::text,
       CASE WHEN NOT pg_is_in_recovery()
            THEN ('x' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::int END
FROM pg_control_system()
"""
# A pooler that ignores the parameter `options` lets us in without our settings.
MARK = "-c cdc.session=on"
MARKED = "SELECT current_setting('cdc.session', true)"
STORED_UNITS = "SELECT ('x' || encode(cash_send(1::money), 'hex'))::bit(64)::bigint"


def connect(dsn: str, setting: str = OWNER) -> Connection:
    """Open a connection in autocommit mode, with the settings of `cdc.model.session_settings`.
    `setting`: where the DSN is from, for messages.

    Raises:
        SettingsError: the DSN can't be read. SourceUnavailable: the file of a secret can't.
        SourceError: the server is down or refuses.
    """
    try:
        parameters = parse_dsn(dsn, setting)
        return open_session(dsn)
    except SecretUnreadable as error:
        # As with a server that is away: those who can do without it go on.
        raise SourceUnavailable(error.message, hint=error.hint, **error.details) from None
    except psycopg.OperationalError as error:
        raise _connection_error(str(error), parameters, setting) from None


def connect_to_read(settings: Source, *, as_owner: bool = False) -> Connection:
    """Like `connect`, as the role for everything that doesn't change the source; `as_owner` for a
    command that goes on to change it.
    """
    if as_owner:
        return connect(settings.dsn)
    return connect(settings.reader_dsn, setting_to_read(settings))


def setting_to_read(settings: Source) -> str:
    """The setting that has `reader_dsn`."""
    return READER if settings.reader else OWNER


def user_of(dsn: str, setting: str = OWNER) -> str:
    """The role that logs in with a DSN, which is libpq's own choice where it names none.

    Raises:
        SettingsError: a service may name it, or the DSN can't be read.
    """
    defaults = {option.keyword: option.val for option in psycopg.pq.Conninfo.get_defaults()}
    parameters = parse_dsn(dsn, setting, with_passwords=False)
    user = parameters.get("user")
    if not user and (parameters.get("service") or os.environ.get("PGSERVICE")):
        raise SettingsError(
            f"{setting} names a service and no user.",
            hint=f"write user=... in {setting}: `migrate` grants it rights before it logs in",
        )
    return str(user or (defaults[b"user"] or b"").decode())


def open_session(dsn: str) -> Connection:
    """Like `connect`, but raise psycopg.OperationalError if the server is down or refuses."""
    parameters = parse_dsn(dsn)
    # The last value of an option counts, so ours override those in the DSN.
    options = f"{parameters.get('options', '')} {session_options(OLDEST_VERSION)} {MARK}"
    defaults = {"connect_timeout": str(CONNECT_TIMEOUT_S), "application_name": "cdc"}
    fixed = {"options": options, "client_encoding": "UTF8"}
    settings = {**defaults, **parameters, **fixed}
    limit_s = float(settings["connect_timeout"] or 0)
    conn = psycopg.connect(make_conninfo("", **settings), autocommit=True)
    try:
        with within(conn, limit_s if limit_s > 0 else CONNECT_TIMEOUT_S):
            conn.execute(CATALOG_FIRST)
            if conn.execute(MARKED).fetchone() != ("on",):
                raise SourceError(
                    f"Postgres at {_address(parameters)} takes no session settings: a pooler leaves them out.",
                    hint="write the address of the server itself in source.dsn and source.reader",
                )
            # Older servers refuse these in `options`, and the version is known only now.
            for name, value in settings_since(OLDEST_VERSION, conn.info.server_version).items():
                conn.execute("SELECT set_config(%s, %s, false)", [name, value])
    except BaseException:
        conn.close()
        raise
    return conn


def stored_units(conn: Connection) -> int:
    """Read how many units the database's `lc_monetary` stores for an amount of money of 1: 100 for a
    currency with two decimals. Opens another session, without pinned settings.
    """
    own = make_conninfo(conn.info.dsn, password=conn.info.password, options="")
    with psycopg.connect(own) as unpinned:
        unpinned.execute(CATALOG_FIRST)
        row = unpinned.execute(STORED_UNITS).fetchone()
    assert row is not None
    return int(row[0])


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


def parse_dsn(dsn: str, setting: str = OWNER, *, with_passwords: bool = True) -> dict[str, Any]:
    """The parameters of a DSN, with what the files of its references hold now. The files of passwords
    that are left out may be unreadable.

    The SettingsError doesn't quote it, since it may hold a password.
    """
    try:
        is_whole = secrets.REFERENCE.fullmatch(dsn) is not None
        if is_whole:
            dsn = secrets.read(dsn)
        elif dsn.startswith(("postgresql://", "postgres://")):
            dsn = secrets.escaped(dsn)
        return {
            name: value if is_whole or not isinstance(value, str) else secrets.read(value)
            for name, value in conninfo_to_dict(dsn).items()
            if with_passwords or name not in PASSWORDS
        }
    except psycopg.ProgrammingError:
        raise SettingsError(
            f"{setting} isn't a Postgres connection string.",
            hint="write postgresql://user:password@host:port/database, with %XX for special characters",
        ) from None


def _address(parameters: Mapping[str, Any]) -> str | None:
    """Host and port to show. None: libpq takes a part of a password with `@` or `/` for the host,
    port or database.
    """
    host = str(parameters.get("host") or parameters.get("hostaddr") or "localhost")
    port = str(parameters.get("port") or 5432)
    database = str(parameters.get("dbname") or "")
    if "@" in host + database or not port.replace(",", "").isdigit():
        return None
    return f"{host}:{port}"


def _connection_error(text: str, parameters: dict[str, Any], setting: str) -> SourceError:
    address = _address(parameters)
    server = address or f"the address in {setting}"
    # Without a password to send, libpq gives up by itself, before the server answers.
    _, refusal, reason = text.partition("FATAL:" if "FATAL:" in text else "fe_sendauth:")
    if not refusal:
        why = cause(text) if address else UNKNOWN
        hint = UNTRUSTED.get(
            why.kind,
            "check host and port of source.dsn; the local stack is started by: cdc -p FILE up",
        ).replace(OWNER, setting)
        kind = SourceUnavailable if why.is_transient else SourceError
        return kind(f"Postgres at {server} can't be reached{why}.", hint=hint, server=server)
    first = reason.strip().splitlines()[0]
    hint = next((hint for words, hint in REFUSALS if words in first), "the server's log says more")
    hint = hint.replace(OWNER, setting)
    if not address:
        first = "the login"
        hint = f"write special characters of the user and the password in {setting} as %XX"
    kind = SourceUnavailable if any(words in first for words in TRANSIENT_REFUSALS) else SourceError
    return kind(f"Postgres at {server} refuses: {first}.", hint=hint, server=server)


def server(conn: Connection) -> Server | None:
    """The identity of this server; None for a standby, and if the role may not read it."""
    try:
        system, timeline = conn.execute(SERVER).fetchone() or (None, None)
    except psycopg.errors.InsufficientPrivilege:
        return None
    return Server(system, timeline) if timeline is not None else None
