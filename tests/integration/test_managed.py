"""Servers on which nobody is a superuser, as services run them: roles with the rights that the services
document, and poolers in front. No service itself is tried.
"""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from cdc.connectors.client import Connect
from cdc.errors import SourceError
from cdc.model.table import Column, Table
from cdc.postgres import source
from cdc.verify.source_rows import open_snapshot
from tests.integration.test_owner import REPLICATION, SECRET, SHOP, Owner, unwrapped
from tests.support.answering import answering
from tests.support.pages import PAGES
from tests.support.proxy import Pooler

PAGE = next(page for page in PAGES if page.name == "managed-postgres.md").read_text()


@pytest.fixture
def master(guarded: str, unique: str, tmp_path: Path) -> Iterator[Owner]:
    """The user that a service hands out: it makes roles and databases, and owns the tables."""
    with psycopg.connect(guarded, autocommit=True) as server:
        role = sql.Identifier(unique)
        server.execute(
            sql.SQL("CREATE ROLE {} LOGIN CREATEROLE CREATEDB PASSWORD {}").format(role, SECRET)
        )
        server.execute(
            sql.SQL("CREATE DATABASE {} OWNER {}").format(sql.Identifier(f"db_{unique}"), role)
        )
    database = make_conninfo(guarded, dbname=f"db_{unique}")
    with closing(psycopg.connect(database, autocommit=True)) as admin:
        owner = Owner(unique, admin, tmp_path)
        owner.write_file(REPLICATION)
        owner.execute("CREATE SCHEMA shop")
        owner.execute(SHOP)
        yield owner


def name_reader(owner: Owner) -> str:
    """Let the file name a role for readers, with its own password; the role's name."""
    reader = f"{owner.name}_reader"
    file = owner.folder / "shop.yaml"
    dsn = make_conninfo(owner.dsn, user=reader, password=SECRET)
    file.write_text(file.read_text().replace("source:\n", f"source:\n  reader: {dsn}\n"))
    return reader


@pytest.mark.own_source
def test_a_user_that_may_give_replication_does_all_by_itself(master: Owner, stack: Any) -> None:
    """Cloud SQL, Azure, Neon and Supabase: from nothing to a heartbeat, without another role."""
    owner = master
    owner.admin.execute(sql.SQL("ALTER ROLE {} REPLICATION").format(sql.Identifier(owner.name)))
    owner.kafka = stack.endpoints.kafka
    owner.connect = stack.endpoints.connect
    owner.write_file(REPLICATION)
    reader = name_reader(owner)
    done = unwrapped(owner.cdc("migrate"))
    assert f"created role {reader} (LOGIN), which has no password yet" in done
    assert "note: no event triggers, which take a superuser" in done
    assert "nothing to do" in owner.cdc("migrate")
    owner.execute(f"ALTER ROLE {reader} PASSWORD '{SECRET}'")
    try:
        assert "heartbeat has arrived" in unwrapped(owner.cdc("register"))
    finally:
        with Connect(stack.endpoints.connect) as connect:
            connect.reset(owner.name)


def test_a_user_that_gives_a_role_in_place_of_replication(master: Owner) -> None:
    """RDS and Aurora. What membership does there can't be tried."""
    owner = master
    owner.admin.execute("CREATE ROLE rds_replication NOLOGIN")
    try:
        owner.admin.execute(
            sql.SQL("GRANT rds_replication TO {} WITH ADMIN OPTION").format(
                sql.Identifier(owner.name)
            )
        )
        owner.cdc("migrate")
        granted = owner.admin.execute(
            "SELECT pg_has_role(%s, 'rds_replication', 'MEMBER'), rolreplication"
            " FROM pg_roles WHERE rolname = %s",
            [owner.connector, owner.connector],
        ).fetchone()
        assert granted == (True, False)
        assert "nothing to do" in owner.cdc("migrate")
    finally:
        owner.admin.execute("DROP ROLE rds_replication")


def test_what_such_a_user_may_not_do(master: Owner) -> None:
    """What the page says that isn't there, and that the pipeline therefore doesn't need."""
    for statement in (
        "ALTER SYSTEM SET max_slot_wal_keep_size = '50GB'",
        "CREATE EVENT TRIGGER e ON ddl_command_end EXECUTE FUNCTION cdc.record_ddl()",
        "SELECT FROM pg_authid",
        "CREATE ROLE chief SUPERUSER",
        "CREATE ROLE connector REPLICATION",
    ):
        with (
            psycopg.connect(master.dsn, autocommit=True) as conn,
            pytest.raises(psycopg.errors.InsufficientPrivilege),
        ):
            conn.execute(statement.encode())
    refused = unwrapped(master.cdc("migrate", code=4))
    assert f'may not run what is still needed: CREATE ROLE "{master.connector}"' in refused


def test_the_owner_of_a_service_is_who_logs_in(
    master: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = master
    owner.admin.execute(sql.SQL("ALTER ROLE {} REPLICATION").format(sql.Identifier(owner.name)))
    services = owner.folder / "services"
    lines = [f"{name}={value}\n" for name, value in conninfo_to_dict(owner.dsn).items()]
    services.write_text("[shop]\n" + "".join(lines))
    monkeypatch.setenv("PGSERVICEFILE", str(services))
    file = owner.folder / "shop.yaml"
    file.write_text(file.read_text().replace("${OWNER_DSN}", "service=shop"))
    name_reader(owner)
    owner.cdc("migrate")
    assert "nothing to do" in owner.cdc("migrate")


def test_a_reader_of_a_service_has_to_name_its_user(master: Owner) -> None:
    """It may be another one than the system's, and `migrate` would make and grant a role."""
    file = master.folder / "shop.yaml"
    text = file.read_text()
    file.write_text(text.replace("source:\n", "source:\n  reader: service=shop\n"))
    assert "write user=... in source.reader" in unwrapped(master.cdc("migrate", code=2))


def test_hidden_rows_stop_the_comparison_of_a_reader(master: Owner) -> None:
    """The owner by itself is taken at its word: which conditions show it all rows nobody can say."""
    orders = Table("shop", "orders", (Column("id", "integer"),), ("id",), "t.shop.orders")
    master.execute("ALTER TABLE shop.orders ENABLE ROW LEVEL SECURITY")
    master.execute("ALTER TABLE shop.orders FORCE ROW LEVEL SECURITY")
    master.execute(f"CREATE POLICY p ON shop.orders USING (current_user = '{master.name}')")
    with open_snapshot(master.dsn, orders):
        pass
    with (
        pytest.raises(SourceError, match=f"hide rows from {master.name}:"),
        open_snapshot(master.dsn, orders, setting=source.READER),
    ):
        pass


REFUSALS = {
    "pgbouncer, and what is made of it": "unsupported startup parameter in options: bytea_output",
    "older ones": "unsupported startup parameter: options",
    "RDS Proxy": "Feature not supported: RDS Proxy currently doesn\u2019t support command-line options.",
}


@pytest.mark.parametrize("text", REFUSALS.values(), ids=list(REFUSALS))
def test_a_pooler_that_refuses_settings_is_named(text: str) -> None:
    fields = b"SFATAL\0VFATAL\0C08P01\0M" + text.encode() + b"\0\0"
    message = b"E" + (len(fields) + 4).to_bytes(4, "big") + fields

    def refuse(client: Any) -> None:
        client.recv(4096)
        client.sendall(message)

    with answering(refuse) as port:
        dsn = f"postgresql://me@127.0.0.1:{port}/d?sslmode=disable&gssencmode=disable"
        with pytest.raises(SourceError) as caught:
            source.connect(dsn, source.READER)
    assert "source.reader leads to a pooler" in caught.value.hint


def test_a_pooler_that_leaves_settings_out_is_named(guarded: str) -> None:
    """Times, for one, would be written in another zone."""
    with psycopg.connect(guarded) as conn:
        pooler = Pooler(conn.info.port)
    try:
        with pytest.raises(SourceError, match="a pooler leaves them out") as caught:
            source.connect(make_conninfo(guarded, port=pooler.port))
        assert "the address of the server itself" in caught.value.hint
    finally:
        pooler.close()
    source.connect(guarded).close()


def test_the_page_names_every_service() -> None:
    for service in ("RDS", "Aurora", "Cloud SQL", "Azure", "Neon", "Supabase"):
        assert f"| {service}" in PAGE, service
    assert "**No service has been tried.**" in PAGE
