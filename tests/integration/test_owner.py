"""A source whose owner is no superuser: an administrator gets the rest as SQL, and no way out leads back in."""

import io
import json
import sys
from collections.abc import Iterator
from contextlib import closing, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from cdc.cli.verbs import main
from cdc.connectors.client import Connect
from tests.support import pages
from tests.support.postgres import run_psql

SECRET, REPLICATION = "owner-secret-42", "it's a :secret"
FILE = """\
pipeline: {name}
source:
  dsn: ${{OWNER_DSN}}
  heartbeat_s: 0.3
  tables: [shop.orders, shop.parts]
  {password}
sinks:
  cache: {{type: redis, url: "redis://127.0.0.1:1/0", prefix: {name}}}
kafka: {kafka}
connect: {connect}
"""
SHOP = """
CREATE TABLE shop.orders (id int PRIMARY KEY, note text);
CREATE TABLE shop.parts (id int PRIMARY KEY, n int) PARTITION BY RANGE (id);
CREATE TABLE shop.low PARTITION OF shop.parts FOR VALUES FROM (0) TO (100);
INSERT INTO shop.orders SELECT n, 'a' FROM generate_series(1, 10) n;
"""


@dataclass
class Owner:
    """A role that owns a schema of a database and nothing else; `admin` is the server's superuser."""

    name: str
    admin: psycopg.Connection[tuple[Any, ...]]
    folder: Path
    kafka: str = "127.0.0.1:1"
    connect: str = "http://127.0.0.1:1"

    @property
    def connector(self) -> str:
        return f"{self.name}_replication"

    @property
    def dsn(self) -> str:
        return make_conninfo(self.admin.info.dsn, user=self.name, password=SECRET)

    def write_file(self, password: str | None = None) -> None:
        line = f"replication_password: {json.dumps(password)}" if password else ""
        text = FILE.format(name=self.name, password=line, kafka=self.kafka, connect=self.connect)
        (self.folder / "shop.yaml").write_text(text)

    def cdc(self, *words: str, code: int = 0) -> str:
        """Run a verb as the owner; what it says, which never is a password."""
        printed, errors = io.StringIO(), io.StringIO()
        with (
            pytest.MonkeyPatch.context() as patch,
            redirect_stdout(printed),
            redirect_stderr(errors),
        ):
            patch.setattr(sys, "argv", ["cdc", "-p", str(self.folder / "shop.yaml"), *words])
            patch.setenv("OWNER_DSN", self.dsn)
            with pytest.raises(SystemExit) as exit_info:
                main()
        output = printed.getvalue() if code == 0 else f"{printed.getvalue()}{errors.getvalue()}"
        assert exit_info.value.code == code, (
            f"{words}: exit {exit_info.value.code}\n{printed.getvalue()}\n{errors.getvalue()}"
        )
        assert SECRET not in output
        assert REPLICATION not in output
        return output

    def psql(self, script: str, *options: str) -> str:
        """Run a script as the administrator."""
        info = self.admin.info
        return run_psql(make_conninfo(info.dsn, password=info.password), script, *options)

    def execute(self, statements: str) -> None:
        """Execute a statement as the owner."""
        with psycopg.connect(self.dsn) as conn:
            conn.execute(statements.encode())


@pytest.fixture
def owner(guarded: str, unique: str, tmp_path: Path) -> Iterator[Owner]:
    with psycopg.connect(guarded, autocommit=True) as server:
        role = sql.Identifier(unique)
        server.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD {}").format(role, SECRET))
        server.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(f"db_{unique}")))
    database = make_conninfo(guarded, dbname=f"db_{unique}")
    with closing(psycopg.connect(database, autocommit=True)) as admin:
        admin.execute(sql.SQL("CREATE SCHEMA shop AUTHORIZATION {}").format(role))
        owner = Owner(unique, admin, tmp_path)
        owner.write_file()
        owner.execute(SHOP)
        yield owner


def test_every_documented_statement_is_taken_by_a_server(owner: Owner) -> None:
    """Statements about the server are run, and taken back; those about tables in a transaction that
    is rolled back, which a slot that is dropped is not.
    """
    blocks = [
        (page.name, body)
        for page in pages.PAGES
        for language, body in pages.blocks(page.read_text())
        if language == "sql"
    ]
    assert len(blocks) >= 17
    owner.admin.execute("CREATE TABLE public.notes (id int NOT NULL)")
    owner.admin.execute("SELECT pg_create_logical_replication_slot('shop', 'pgoutput')")
    failures = {}
    for name, body in blocks:
        try:
            if "ALTER SYSTEM" in body:
                for statement in body.splitlines():
                    owner.admin.execute(statement.encode())
            else:
                with owner.admin.transaction(force_rollback=True):
                    owner.admin.execute("CREATE SCHEMA pages")
                    owner.admin.execute("SET LOCAL search_path = pages, public")
                    owner.admin.execute(body.encode())
        except psycopg.Error as error:
            failures[name] = str(error)
    owner.admin.execute("ALTER SYSTEM RESET ALL")
    owner.admin.execute("SELECT pg_reload_conf()")
    owner.admin.execute("DROP TABLE public.notes")
    assert failures == {}


def unwrapped(text: str) -> str:
    """Return a text in one line, however it was folded."""
    return " ".join(text.split())


@pytest.mark.own_source
def test_an_owner_of_tables_alone_and_the_script_for_an_administrator(
    owner: Owner, stack: Any
) -> None:
    """From nothing to changes that arrive, by two people of whom neither has the other's rights."""
    owner.kafka, owner.connect = stack.endpoints.kafka, stack.endpoints.connect
    owner.write_file(REPLICATION)
    refused = unwrapped(owner.cdc("migrate", code=4))
    assert f"permission denied for database db_{owner.name}" in refused
    assert f"run GRANT CREATE ON DATABASE db_{owner.name} TO {owner.name}" in refused
    assert "cdc -p FILE migrate --sql" in refused or "shop.yaml migrate --sql" in refused
    script = owner.cdc("migrate", "--sql")
    for _ in range(2):
        owner.psql(script, "-v", f"replication_password={REPLICATION}")
    assert unwrapped(owner.cdc("migrate")) == "nothing to do"
    assert "Nothing is missing" in owner.cdc("migrate", "--sql")
    try:
        assert "heartbeat has arrived" in unwrapped(owner.cdc("register"))
    finally:
        with Connect(stack.endpoints.connect) as connect:
            connect.reset(owner.name)


def test_what_the_owner_may_do_is_done(owner: Owner) -> None:
    """The first dead end: the statement that is missing is named, not just to whom it is to be granted."""
    owner.admin.execute(
        sql.SQL("GRANT CREATE ON DATABASE {} TO {}").format(
            *map(sql.Identifier, (f"db_{owner.name}", owner.name))
        )
    )
    refused = unwrapped(owner.cdc("migrate", code=4))
    assert "publication" in refused
    assert (
        f'may not run what is still needed: CREATE ROLE "{owner.connector}" WITH LOGIN REPLICATION'
        in refused
    )
    script = owner.cdc("migrate", "--sql")
    assert "CREATE PUBLICATION" not in script
    assert "0001_control" not in script
    owner.psql(script)
    assert unwrapped(owner.cdc("migrate")) == "nothing to do"


def test_an_administrator_without_event_triggers(owner: Owner) -> None:
    """As where nobody is a superuser: a role that may give REPLICATION and act as the owner does all but these."""
    chief = sql.Identifier(f"{owner.name}_chief")
    owner.admin.execute(
        sql.SQL(
            "CREATE ROLE {chief} LOGIN CREATEROLE REPLICATION; GRANT {owner} TO {chief}"
        ).format(chief=chief, owner=sql.Identifier(owner.name))
    )
    owner.admin.execute(
        sql.SQL("ALTER DATABASE {} OWNER TO {}").format(sql.Identifier(f"db_{owner.name}"), chief)
    )
    script = owner.cdc("migrate", "--sql")
    warned = owner.psql(
        sql.SQL("SET SESSION AUTHORIZATION {};").format(chief).as_string() + "\n" + script
    )
    assert "no event triggers" in warned
    lines = owner.cdc("migrate").splitlines()
    assert (len(lines), lines[0][:24], lines[1]) == (2, "note: no event triggers,", "nothing to do")


def give_database(owner: Owner, password: str) -> None:
    """Give the owner its database, and a role for the connector with a password."""
    database, role, connector = map(
        sql.Identifier, (f"db_{owner.name}", owner.name, owner.connector)
    )
    owner.admin.execute(sql.SQL("ALTER DATABASE {} OWNER TO {}").format(database, role))
    owner.admin.execute(
        sql.SQL("CREATE ROLE {} LOGIN REPLICATION PASSWORD {}").format(connector, password)
    )
    owner.write_file(REPLICATION)


def test_a_password_that_is_right_is_left_alone(owner: Owner) -> None:
    """The second dead end: once an administrator has made the role, `migrate` has nothing to alter about it."""
    give_database(owner, REPLICATION)
    output = owner.cdc("migrate")
    assert "created publication" in output
    assert "password" not in output
    assert owner.cdc("migrate").splitlines()[-1] == "nothing to do"


def test_a_password_that_is_wrong_is_somebody_elses_to_set(owner: Owner) -> None:
    """The third: `register` leads to `migrate`, and that to the statement that an administrator has to run."""
    give_database(owner, "another")
    refused = unwrapped(owner.cdc("migrate", code=4))
    assert f"ALTER ROLE \"{owner.connector}\" PASSWORD :'replication_password'" in refused
    script = owner.cdc("migrate", "--sql")
    # Without the variable nothing is set, and nothing fails.
    owner.psql(script)
    owner.cdc("migrate", code=4)
    owner.psql(script, "-v", f"replication_password={REPLICATION}")
    assert unwrapped(owner.cdc("migrate")) == "nothing to do"


def test_a_superuser_sees_whether_a_password_is_right(owner: Owner) -> None:
    """Also on a server that lets everybody in: there a login tells nothing."""
    owner.admin.execute(sql.SQL("ALTER ROLE {} SUPERUSER").format(sql.Identifier(owner.name)))
    owner.write_file(REPLICATION)
    assert f"set the password of role {owner.connector}" in owner.cdc("migrate")
    assert unwrapped(owner.cdc("migrate")) == "nothing to do"
    owner.admin.execute(
        sql.SQL("ALTER ROLE {} PASSWORD 'another'").format(sql.Identifier(owner.connector))
    )
    assert unwrapped(owner.cdc("migrate")) == f"set the password of role {owner.connector}"


def test_where_a_role_stands_for_replication(owner: Owner) -> None:
    """Amazon's administrators may not give the attribute; that the role is given can be tested, not what it does."""
    owner.admin.execute("CREATE ROLE rds_replication NOLOGIN")
    try:
        script = owner.cdc("migrate", "--sql")
        assert (
            f'CREATE ROLE "{owner.connector}" WITH LOGIN; GRANT rds_replication TO "{owner.connector}";'
            in script
        )
        owner.psql(script)
        assert unwrapped(owner.cdc("migrate")) == "nothing to do"
    finally:
        owner.admin.execute("DROP ROLE rds_replication")
    assert "WITH REPLICATION" in owner.cdc("migrate", "--sql")


def everything(owner: Owner) -> list[tuple[Any, ...]]:
    """Return all objects that a migration makes, as far as the catalogue has names for them."""
    return owner.admin.execute(
        "SELECT 'role', rolname FROM pg_roles UNION ALL SELECT 'schema', nspname FROM pg_namespace UNION ALL"
        " SELECT 'publication', pubname FROM pg_publication UNION ALL SELECT 'event trigger', evtname FROM"
        " pg_event_trigger UNION ALL SELECT 'trigger', tgname FROM pg_trigger UNION ALL"
        " SELECT 'relation', relname || relreplident::text || coalesce(relacl::text, '') FROM pg_class ORDER BY 1, 2"
    ).fetchall()


def test_a_dry_run_says_all_and_does_nothing(owner: Owner) -> None:
    owner.write_file(REPLICATION)
    state = everything(owner)
    output = owner.cdc("migrate", "--dry-run")
    assert everything(owner) == state
    assert max(map(len, output.splitlines())) <= 80
    for part in (
        f"GRANT CREATE ON DATABASE db_{owner.name} TO {owner.name}",
        f"created role {owner.connector} (LOGIN REPLICATION",
        f'CREATE ROLE "{owner.connector}"',
        "applied control/0001_control.sql",
        "set REPLICA IDENTITY FULL on shop.orders",
        f"created publication {owner.name} of 6 tables",
        "recording TRUNCATE of partition shop.low",
        "created event trigger cdc_ddl",
    ):
        assert part in unwrapped(output)
    would = json.loads(owner.cdc("migrate", "--dry-run", "--json"))["would"]
    assert all(step["sql"] for step in would)
    owner.admin.execute(sql.SQL("ALTER ROLE {} SUPERUSER").format(sql.Identifier(owner.name)))
    promised = [
        line for step in would for line in step["done"] if not line.startswith("GRANT CREATE")
    ]
    lines = owner.cdc("migrate").splitlines()
    # For a superuser the event triggers come with the control files, and see to the partitions.
    triggers = {
        f"created event trigger {name}"
        for name in ("cdc_ddl", "cdc_ddl_around", "cdc_drop", "cdc_rewrite")
    }
    assert set(promised) - set(lines) == triggers | {"recording TRUNCATE of partition shop.low"}
    assert set(lines) <= set(promised)
    assert unwrapped(owner.cdc("migrate", "--dry-run")) == "nothing to do"
