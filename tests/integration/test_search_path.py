"""A database whose `search_path` leads to somebody else's objects before Postgres' own.

Orafce, for example, advises such a path for its functions and its type `date`. Each function and
operator of Postgres gets a twin there that fails, each type one that is another, each table of the
catalog an empty one.
"""

import json
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg import sql

from cdc.control import definitions
from cdc.migrations import heartbeat_query, migrate, prepare_source
from cdc.migrations.plan import plan, script
from cdc.migrations.removal import remove_from_source
from cdc.observe.collection import collect
from cdc.postgres import source, table_survey
from cdc.postgres.row_query import (
    id_condition,
    row_query,
    sample_condition,
    snapshot_query,
    text_condition,
)
from cdc.postgres.snapshot_request import request, resend
from cdc.postgres.table_survey import read_source
from cdc.readiness.checks import check_source
from cdc.readiness.facts import SourceRequirements
from tests.support.all_types import EXTENSIONS, SETUP, TABLES, create, insert
from tests.support.pipelines import pipeline
from tests.support.postgres import run_psql

TWINS = r"""
CREATE SCHEMA hostile;
DO $do$
DECLARE
    twin text;
BEGIN
    FOR twin IN
        SELECT format('CREATE FUNCTION hostile.%I(%s) RETURNS %s%s LANGUAGE plpgsql AS $f$ BEGIN RAISE ''%s''; END $f$',
                      proname, pg_get_function_identity_arguments(oid), CASE WHEN proretset THEN 'SETOF ' ELSE '' END,
                      format_type(prorettype, NULL), proname)
        FROM pg_proc WHERE pronamespace = 'pg_catalog'::regnamespace AND proname ~ '^[a-z][a-z0-9_]*$'
        UNION ALL
        SELECT format('CREATE OPERATOR hostile.%s (FUNCTION = hostile.%I%s, RIGHTARG = %s)', oprname, proname,
                      CASE WHEN oprleft <> 0 THEN ', LEFTARG = ' || format_type(oprleft, NULL) ELSE '' END,
                      format_type(oprright, NULL))
        FROM pg_operator o JOIN pg_proc p ON p.oid = o.oprcode WHERE o.oprnamespace = 'pg_catalog'::regnamespace
        UNION ALL
        SELECT format('CREATE DOMAIN hostile.%I AS xml', typname)
        FROM pg_type WHERE typnamespace = 'pg_catalog'::regnamespace AND typtype IN ('b', 'r') AND typname !~ '^_'
        UNION ALL
        SELECT format('CREATE TABLE hostile.%I ()', relname)
        FROM pg_class WHERE relnamespace = 'pg_catalog'::regnamespace AND relkind IN ('r', 'v')
    LOOP
        BEGIN
            EXECUTE twin;
        EXCEPTION WHEN OTHERS THEN
            NULL;  -- Not every signature can be had in PL/pgSQL.
        END;
    END LOOP;
    EXECUTE format('ALTER DATABASE %I SET search_path = hostile, pg_catalog, public', current_database());
END
$do$;
"""

Connection = psycopg.Connection[tuple[Any, ...]]
TABLE_NAMES = [f"public.{name}" for name in TABLES]
PARTS = """
CREATE TABLE parts (id int PRIMARY KEY, note text) PARTITION BY RANGE (id);
CREATE TABLE part PARTITION OF parts FOR VALUES FROM (0) TO (10);
INSERT INTO parts VALUES (1, 'a');
"""


MET = (
    "SELECT now()",
    "SELECT 1 + 1",
    "SELECT '1'::int4",
    "SELECT oid FROM pg_class",
    "SELECT to_json('a'::pg_catalog.text)",
)
"""Statements without pins, which meet the twins."""


@pytest.fixture
def hostile(postgres_dsn: str) -> Iterator[Connection]:
    """An administrator's session that began before the path was set."""
    with psycopg.connect(postgres_dsn, autocommit=True) as admin:
        for extension in EXTENSIONS:
            admin.execute(f"CREATE EXTENSION {extension}")
        for statement in (*SETUP, *create(), PARTS, *insert(0), TWINS):
            admin.execute(statement)
        with psycopg.connect(postgres_dsn, autocommit=True) as session:
            for statement in MET:
                with pytest.raises(psycopg.Error):
                    session.execute(statement)
        yield admin


def test_no_statement_of_ours_meets_them(
    hostile: Connection, postgres_dsn: str, unique: str
) -> None:
    names = [*TABLE_NAMES, "public.parts"]
    role = f"{unique}_replication"
    pairs = [("public", name.removeprefix("public.")) for name in names]
    wanted = SourceRequirements(unique, pairs, role)
    shop = pipeline(unique, postgres_dsn, *names)
    with source.connect(postgres_dsn) as conn:
        migrate(conn)
        prepare_source(conn, wanted)
        assert prepare_source(conn, wanted) == []
        assert script(conn, wanted, plan(conn, wanted)).endswith("-- Nothing is missing.\n")
        assert definitions.compare(conn) == 0
        hostile.execute("ALTER TABLE public.parts ADD more int DEFAULT 7")
        hostile.execute("ALTER TYPE one.mood RENAME VALUE 'sad' TO 'sadder'")
        assert definitions.compare(conn) == 0
        survey = table_survey.survey(conn, shop)
        assert survey.refused == {}
        for table in survey.tables:
            sample = row_query(table, sample_condition(table, ("0000", "ffff")))
            for rows in (snapshot_query(table), sample):
                with conn.cursor().copy(sql.SQL("COPY ({}) TO STDOUT").format(rows)) as copy:
                    assert list(copy)
            for condition in (id_condition(table, ["1"]), text_condition(table, ["1"])):
                (row,) = conn.execute(row_query(table, condition)).fetchall()
                assert row[0] == "1"
            assert resend(conn, table, reader=role, id=f"r-{table.name}", reset_floor=True)
        conn.execute(heartbeat_query(unique).encode())
        codes = {
            fault.key
            for fault in check_source(read_source(conn, shop, connected=False))
            if fault.key.startswith(("role", "publication", "table", "identity", "trigger"))
        }
        assert codes == set()
    assert collect(shop, positions={}).definitions == "event triggers"
    application(postgres_dsn)
    with source.connect(postgres_dsn) as conn:
        remove_from_source(conn, unique, role)


def test_no_statement_of_the_script_meets_them(
    hostile: Connection, postgres_dsn: str, unique: str
) -> None:
    """An administrator's psql has the path of the database."""
    pairs = [("public", name) for name in ("parts", *TABLES)]
    wanted = SourceRequirements(unique, pairs, f"{unique}_replication")
    with source.connect(postgres_dsn) as conn:
        text = script(conn, wanted, plan(conn, wanted))
        for _ in range(2):
            run_psql(postgres_dsn, text)
        assert plan(conn, wanted) == []
        application(postgres_dsn)
        remove_from_source(conn, unique, wanted.role)


def application(dsn: str) -> None:
    """Statements whose triggers write for the pipelines, in a session with the hostile path."""
    with psycopg.connect(dsn, autocommit=True) as session:
        session.execute("TRUNCATE public.w0, public.parts")
        session.execute("TRUNCATE public.part")
        session.execute("ALTER TABLE public.w1 ADD plain pg_catalog.text")
        session.execute("DROP TABLE public.part")
    with source.connect(dsn) as conn:
        floors = conn.execute("SELECT table_name FROM cdc.truncation ORDER BY 1").fetchall()
        assert ("public.w0",) in floors
        entries = conn.execute("SELECT command, table_name FROM cdc.ddl").fetchall()
        assert ("ALTER TABLE", "public.w1") in entries
        assert ("DROP TABLE", "public.parts") in entries


@pytest.mark.parametrize(("path", "kind"), [("''", "blocking"), ("public, extra", "incremental")])
def test_a_key_whose_operators_the_path_misses_is_read_with_the_log_held_up(
    postgres_dsn: str, unique: str, path: str, kind: str
) -> None:
    """The connector compares a chunk's bounds as text then, or not at all, and orders rows as the type does."""
    with psycopg.connect(postgres_dsn, autocommit=True) as admin:
        admin.execute("CREATE SCHEMA extra; CREATE EXTENSION citext SCHEMA extra")
        admin.execute("CREATE EXTENSION ltree SCHEMA extra")
        admin.execute("CREATE DOMAIN extra.email AS extra.citext")
        admin.execute("CREATE TYPE extra.mood AS ENUM ('good', 'bad')")
        kinds = ("citext", "ltree", "email", "mood")
        for name in kinds:
            admin.execute(f"CREATE TABLE public.by_{name} (k extra.{name} PRIMARY KEY)".encode())
        admin.execute("INSERT INTO public.by_citext VALUES ('a'), ('B')")
        admin.execute(f"ALTER DATABASE db_{unique} SET search_path = {path}".encode())
    shop = pipeline(unique, postgres_dsn, *(f"public.by_{name}" for name in kinds))
    with source.connect(postgres_dsn) as conn:
        chunk = conn.execute("SELECT k FROM public.by_citext WHERE k > 'a' ORDER BY k").fetchall()
        assert chunk == ([] if kind == "blocking" else [("B",)])
        requests = {
            table.name.removeprefix("by_"): json.loads(request(conn, table, "r"))["type"]
            for table in table_survey.survey(conn, shop).tables
        }
    assert requests == {**dict.fromkeys(kinds, kind), "mood": "incremental"}
