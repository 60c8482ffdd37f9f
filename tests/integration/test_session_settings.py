"""Settings that somebody else has set change no value and end no session of a pipeline.

Every setting of a real server that a session can have is turned to other values for the whole
database. Sessions as ours and as the connector's then read a table of every type, as a snapshot
does and as the log is written.
"""

import hashlib
import os
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.errors import InvalidAuthorizationSpecification

from cdc.errors import SourceError
from cdc.migrations import migrate
from cdc.migrations.runner import require_capturable
from cdc.model.session_settings import PINNED, ZONE_GUARD, session_options
from cdc.postgres import source, table_survey
from tests.support.all_types import EXTENSIONS, SETUP, TABLES, create, insert
from tests.support.pipelines import pipeline
from tests.support.postgres import strict_postgres

OTHERS: Mapping[str, tuple[str, ...]] = {
    "datestyle": ("German, DMY", "SQL, MDY", "Postgres"),
    "timezone": ("Asia/Kolkata",),
    "client_encoding": ("LATIN1",),
    "default_transaction_isolation": ("serializable",),
    "extra_float_digits": ("0", "-15"),
    "default_text_search_config": ("pg_catalog.english",),
    "restrict_nonsystem_relation_kind": ("view",),
    "role": ("pg_monitor",),
    # A server may be slower than 1 ms with the statement that pins it: older ones refuse it at the
    # start of a session.
    "transaction_timeout": ("10s",),
    "vacuum_buffer_usage_limit": ("128",),
    "wal_sender_timeout": ("1ms",),
}
"""Values of settings that are texts, or whose smallest number does nothing yet or too much."""
LIMITS = (
    "statement_timeout", "transaction_timeout", "idle_in_transaction_session_timeout", "idle_session_timeout",
    "lock_timeout", "wal_sender_timeout", "default_transaction_isolation", "row_security",
)  # fmt: skip
"""What ends or refuses work that takes long, or that only some sessions do."""
UNTURNED = {
    "search_path": "operators and types of extensions are where the owner has put them",
    "application_name": "a name",
    "backtrace_functions": "of the log",
    "createrole_self_grant": "of CREATE ROLE",
    "debug_io_direct": "of the server",
    "default_table_access_method": "there is one",
    "default_tablespace": "of new tables",
    "dynamic_library_path": "where C code is",
    "extension_control_path": "where extensions are",
    "event_source": "of Windows",
    "lc_monetary": "its own test makes locales",
    "lc_messages": "the language of messages",
    "lc_numeric": "of to_char()",
    "lc_time": "of to_char()",
    "local_preload_libraries": "C code of the server's owner",
    "output_plugin_libraries": "without pgoutput the connector's session fails, and says why",
    "session_preload_libraries": "C code of the server's owner",
    "log_statement_sample_rate": "of the log",
    "temp_tablespaces": "of temporary tables",
    "timezone_abbreviations": "of texts that are read",
    "transaction_deferrable": "of one transaction",
    "transaction_isolation": "of one transaction",
    "transaction_read_only": "of one transaction",
    "unix_socket_group": "of the server",
    "wal_consistency_checking": "of the log's pages",
}
"""Settings that stay as they are, and why."""
TOGETHER = 8
"""The number of settings that are turned at once."""
WRITTEN = ("CREATE TABLE written AS SELECT 1 AS n", "CREATE VIEW seen AS SELECT n FROM written")
DEFAULTS = r"""
CREATE TABLE defaults (
    a interval DEFAULT '1-2',
    b bytea DEFAULT '\xff',
    c timestamptz DEFAULT '2013-01-02 10:00+02',
    d date DEFAULT '2013-01-02'
)"""


@dataclass
class Database:
    """A database with all types, and a slot that holds its changes."""

    dsn: str
    admin: psycopg.Connection[Any]

    def digest(self, session: psycopg.Connection[Any]) -> dict[str, str]:
        """Hash what a session reads: each table's rows as text, and the changes in the log."""
        digests = {}
        for table in TABLES:
            with session.cursor().copy(
                f"COPY (SELECT * FROM {table} ORDER BY id) TO STDOUT"
            ) as rows:
                digests[table] = hashlib.md5(b"".join(bytes(part) for part in rows)).hexdigest()
        changes = session.execute(
            "SELECT data FROM pg_logical_slot_peek_binary_changes('settings', NULL, NULL,"
            " 'proto_version', '1', 'publication_names', 'settings')"
        ).fetchall()
        digests["log"] = hashlib.md5(b"".join(data for (data,) in changes)).hexdigest()
        names = session.execute(
            "SELECT string_agg(format_type(atttypid, atttypmod), ',' ORDER BY attrelid, attnum)"
            " FROM pg_attribute WHERE attrelid = ANY (%s::regclass[]) AND attnum > 0",
            [list(TABLES)],
        ).fetchone()
        digests["types"] = str(names)
        digests["limits"] = str(
            session.execute(
                "SELECT name, setting FROM pg_settings WHERE name = ANY (%s) ORDER BY 1",
                [list(LIMITS)],
            ).fetchall()
        )
        digests["statements"] = str(
            session.execute(
                r"SELECT 'a\b', %s::text[], 1 = NULL IS NULL, current_user, n FROM seen", [[None]]
            ).fetchall()
        )
        with pytest.raises(psycopg.errors.DivisionByZero):
            session.execute("SELECT 1 / 0")
        session.execute("UPDATE written SET n = n")
        return digests

    def turned(self, *values: tuple[str, str]) -> "dict[str, str] | str":
        """What sessions read with these settings of the database; the error, if one of them fails."""
        target = sql.SQL("ALTER DATABASE {} SET {} TO {}")
        database = sql.Identifier(self.admin.info.dbname)
        try:
            for name, value in values:
                self.admin.execute(
                    target.format(database, sql.Identifier(name), sql.Literal(value))
                )
        except psycopg.Error as error:
            self.admin.execute(sql.SQL("ALTER DATABASE {} RESET ALL").format(database))
            return f"refused: {error}"
        try:
            with source.open_session(self.dsn) as own, self.connector() as connector:
                digests = self.digest(own)
                return digests if self.digest(connector) == digests else "the two sessions differ"
        except psycopg.Error as error:
            return str(error)
        finally:
            self.admin.execute(sql.SQL("ALTER DATABASE {} RESET ALL").format(database))

    def connector(self) -> psycopg.Connection[Any]:
        """A session with what the connector's driver sends at its start."""
        options = session_options(self.admin.info.server_version)
        return psycopg.connect(self.dsn, options=options, client_encoding="UTF8", autocommit=True)


@pytest.fixture(scope="module")
def database() -> Iterator[Database]:
    with strict_postgres("logical") as dsn, psycopg.connect(dsn, autocommit=True) as admin:
        for extension in EXTENSIONS:
            admin.execute(f"CREATE EXTENSION {extension}")
        for statement in (*SETUP, *create(), *WRITTEN, DEFAULTS):
            admin.execute(statement)
        admin.execute(f"CREATE PUBLICATION settings FOR TABLE {', '.join(TABLES)}")
        admin.execute("SELECT pg_create_logical_replication_slot('settings', 'pgoutput')")
        for statement in insert(0):
            admin.execute(statement)
        yield Database(dsn, admin)


@pytest.fixture(scope="module")
def expected(database: Database) -> dict[str, str]:
    """What sessions read while no setting differs from the server's own."""
    with source.open_session(database.dsn) as session:
        return database.digest(session)


def other_values(admin: psycopg.Connection[Any]) -> Iterator[tuple[str, str]]:
    """Every setting that a session can have, with its other values; of numbers the smallest and a middle one."""
    for name, kind, value, least, most, values in admin.execute(
        "SELECT lower(name), vartype, setting, min_val, max_val, enumvals FROM pg_settings"
        " WHERE context IN ('user', 'superuser') AND name !~ '[.]'"
        # Which isn't listed.
        " UNION ALL SELECT 'role', 'string', 'none', NULL, NULL, NULL ORDER BY 1"
    ):
        if name in OTHERS:
            yield from ((name, other) for other in OTHERS[name])
        elif kind == "bool":
            yield name, "off" if value == "on" else "on"
        elif kind == "enum":
            yield from ((name, other) for other in values if other != value)
        elif kind in ("integer", "real"):
            lowest = float(least)
            highest = float(most)
            number = lowest if lowest > 0 or kind == "real" else min(1.0, highest)
            yield name, f"{number:g}" if kind == "real" else str(int(number))
        elif name not in UNTURNED:
            pytest.fail(f"{name} is a text: give it another value in OTHERS, or a reason")


def together(values: Iterable[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    """Groups of a few settings; one that has several values is in as many groups."""
    groups: list[dict[str, str]] = []
    for name, value in values:
        group = next((one for one in groups if name not in one and len(one) < TOGETHER), None)
        if group is None:
            groups.append(group := {})
        group[name] = value
    return (list(group.items()) for group in groups)


def test_no_setting_of_the_database_changes_what_is_read(
    database: Database, expected: dict[str, str]
) -> None:
    """A few are turned at once; each of them by itself where something differs, to name it."""
    values = [pair for pair in other_values(database.admin) if pair[0] not in UNTURNED]
    differing = [group for group in together(values) if database.turned(*group) != expected]
    results = {pair: database.turned(pair) for group in differing for pair in group}
    assert {pair: result for pair, result in results.items() if result != expected} == {}
    assert differing == []
    assert {name for name, _ in values} >= PINNED.keys() - {"lc_monetary"}


def test_a_database_without_an_encoding_is_refused(database: Database) -> None:
    database.admin.execute("CREATE DATABASE bytes ENCODING 'SQL_ASCII' TEMPLATE template0")
    dsn = database.dsn.rsplit("/", 1)[0] + "/bytes"
    with source.connect(dsn) as conn:
        with pytest.raises(SourceError, match="SQL_ASCII") as refusal:
            migrate(conn)
        assert conn.execute("SELECT to_regnamespace('cdc')").fetchone() == (None,)
        with pytest.raises(SourceError, match="SQL_ASCII"):
            require_capturable(conn)
    assert refusal.value.finding_key == "source-unfit/encoding"


def test_the_journal_reads_the_same_in_every_session(database: Database) -> None:
    """An application's session writes it, and a comparison reads it again in one of ours."""
    migrate(database.admin)
    query = (
        "SELECT string_agg(cdc.described(name::regclass)::text, '') FROM unnest(%s::text[]) AS name"
    )
    with (
        source.connect(database.dsn) as own,
        psycopg.connect(database.dsn, autocommit=True) as application,
    ):
        application.execute("SET quote_all_identifiers = on")
        application.execute("SET intervalstyle = 'sql_standard'")
        application.execute("SET bytea_output = 'escape'")
        application.execute("SET datestyle = 'German, DMY'")
        application.execute("SET timezone = 'Asia/Kolkata'")
        own_text = own.execute(query, [[*TABLES, "defaults"]]).fetchone()
        assert application.execute(query, [[*TABLES, "defaults"]]).fetchone() == own_text
        # Without the settings of the function it would differ.
        database.admin.execute("ALTER FUNCTION cdc.descriptions(oid[]) RESET ALL")
        assert application.execute(query, [[*TABLES, "defaults"]]).fetchone() != own_text


@pytest.fixture(scope="module")
def locales(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Dutch and Japanese, for the server that is started next; this machine keeps nothing of them."""
    folder = tmp_path_factory.mktemp("locales")
    for name in ("nl_NL", "ja_JP"):
        command = ["localedef", "-i", name, "-f", "UTF-8", folder / f"{name}.UTF-8"]
        if subprocess.run(command, check=False, capture_output=True).returncode:
            assert "CI" not in os.environ, "apt-get install locales"
            pytest.skip("needs the package locales")
    for path in (folder, *folder.parents):
        if path.stat().st_uid == os.getuid() and path != Path("/"):
            path.chmod(path.stat().st_mode | 0o055)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("LOCPATH", str(folder))
        yield


@pytest.mark.usefixtures("locales")
def test_money_is_read_in_every_currency_with_two_decimals_and_refused_in_others() -> None:
    with strict_postgres("logical") as dsn, psycopg.connect(dsn, autocommit=True) as admin:
        admin.execute("CREATE TABLE paid (id int PRIMARY KEY, amount money)")
        results = {}
        for locale in ("C", "nl_NL.UTF-8", "ja_JP.UTF-8"):
            admin.execute(f"ALTER DATABASE postgres SET lc_monetary = '{locale}'")
            with psycopg.connect(dsn) as application:
                application.execute("TRUNCATE paid")
                application.execute("INSERT INTO paid VALUES (1, 1234.56::money)")
            with source.connect(dsn) as conn:
                (amount,) = conn.execute("SELECT amount::text FROM paid").fetchone() or ("",)
                survey = table_survey.survey(conn, pipeline("shop", dsn, "public.paid"))
            results[locale] = [amount, *(error.message for error in survey.refused.values())]
    assert results.pop("C") == results.pop("nl_NL.UTF-8") == ["$1,234.56"]
    (_, refusal) = results["ja_JP.UTF-8"]
    assert "public.paid.amount has the type money" in refusal


def test_a_worker_in_another_zone_than_utc_is_refused(postgres_dsn: str) -> None:
    """Also one that has UTC's time today. Of class 28, or Debezium would try again for ever."""
    set_zone = "SELECT set_config('timezone', %s, false)"
    with psycopg.connect(postgres_dsn, autocommit=True) as session:
        for zone in ("UTC", "Etc/UTC", "GMT", "Zulu", "Etc/GMT0"):
            session.execute(set_zone, [zone])
            session.execute(ZONE_GUARD)
        for zone in ("Europe/London", "Africa/Abidjan", "Asia/Kolkata", "-00:30"):
            session.execute(set_zone, [zone])
            with pytest.raises(InvalidAuthorizationSpecification, match=f"zone is .*{zone}"):
                session.execute(ZONE_GUARD)


@pytest.mark.parametrize("name", ["datestyle", "intervalstyle", "bytea_output", "row_security"])
def test_every_pin_is_needed(database: Database, expected: dict[str, str], name: str) -> None:
    """Without it some value of the setting is noticed, so the test above finds one that is missing."""
    values = [value for turned, value in other_values(database.admin) if turned == name]
    pinned = dict(PINNED)
    del PINNED[name]
    try:
        results = [database.turned((name, value)) for value in values]
    finally:
        # In their order: the connector's configuration has them as a text.
        PINNED.clear()
        PINNED.update(pinned)
    assert any(result != expected for result in results), values
