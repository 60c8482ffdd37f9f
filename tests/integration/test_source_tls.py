"""A source with TLS and passwords, through both drivers: certificates that are right and wrong, and
passwords that change.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
import trustme
from psycopg import sql
from psycopg.conninfo import make_conninfo

from cdc.capture.configuration import configuration
from cdc.compose.authority import Authority
from cdc.connectors.client import Connect
from cdc.errors import ConnectorError, SourceError
from cdc.postgres import source
from tests.support.postgres import tls_postgres
from tests.support.shop import Shop, shop_on


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Authority]]:
    """A server that asks for certificates as well: of the connector's role for one of that name."""
    folder = tmp_path_factory.mktemp("authority")
    with tls_postgres(folder, "hostssl all /^c_.*$ all cert") as served:
        yield served


@pytest.fixture
def tls_shop(secured: tuple[str, Authority], unique: str, stack: Any) -> Iterator[Shop]:
    dsn, _ = secured
    with psycopg.connect(dsn, autocommit=True) as admin:
        admin.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(f"db_{unique}")))
    yield from shop_on(make_conninfo(dsn, dbname=f"db_{unique}"), unique, stack)


@pytest.mark.own_source
def test_verify_full_through_both_drivers(tls_shop: Shop) -> None:
    shop = tls_shop
    (encrypted,) = (
        shop.conn.execute("SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()").fetchone()
        or ()
    )
    assert encrypted
    shop.migrate()
    shop.register()
    rows = shop.conn.execute(
        "SELECT DISTINCT ssl FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) WHERE usename = %s",
        [shop.pipeline.replication_user],
    ).fetchall()
    assert rows == [(True,)]
    assert set(shop.rows("shop.counters")) == set(range(1, 11))


@pytest.mark.own_source
def test_a_server_that_isnt_the_one_meant_is_refused_by_both(
    tls_shop: Shop, tmp_path: Path
) -> None:
    shop = tls_shop
    shop.migrate()
    name = shop.pipeline.pipeline
    other = tmp_path / "other.pem"
    other.write_bytes(trustme.CA().cert_pem.bytes())
    for changes, words in (
        ({"sslrootcert": str(other)}, "of a CA that isn't trusted here"),
        ({"host": "127.0.0.1"}, "for another host name"),
    ):
        dsn = make_conninfo(shop.pipeline.source.dsn, **changes)
        with pytest.raises(SourceError, match=words):
            source.connect(dsn)
        # The connector by itself: nothing of this is put.
        settings = shop.pipeline.source.model_copy(update={"dsn": dsn})
        config = configuration(
            shop.pipeline.model_copy(update={"source": settings}),
            tables=shop.tables,
            server_version=shop.conn.info.server_version,
        )
        with Connect(shop.connect) as connect, pytest.raises(ConnectorError) as refused:
            connect.validate(config)
        assert name in refused.value.message


@pytest.mark.own_source
def test_the_connector_proves_who_it_is_by_a_certificate(
    tls_shop: Shop, secured: tuple[str, Authority], unique: str
) -> None:
    shop = tls_shop
    _, authority = secured
    role = f"c_{unique}"
    settings = shop.pipeline.source.model_copy(update={"replication_user": role})
    shop = Shop(
        shop.pipeline.model_copy(update={"source": settings}), shop.conn, shop.kafka, shop.connect
    )
    shop.migrate()
    with pytest.raises(ConnectorError, match="certificate"):
        shop.register()
    # Java refuses a certificate without names, and reads no other key than RSA.
    certificate, key = authority.certify(role, "client.example", key_type=trustme.KeyType.RSA)
    certified = type(settings).model_validate(
        {
            **settings.model_dump(exclude={"replication_password"}),
            "replication_certificate": {"certificate": str(certificate), "key": str(key)},
        }
    )
    shop.register(source=certified)
    rows = shop.conn.execute(
        "SELECT DISTINCT client_dn FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) WHERE usename = %s",
        [role],
    ).fetchall()
    assert [re.search("CN=([^,/]*)", dn or "") is not None for (dn,) in rows] == [True]


def test_a_password_that_is_changed_counts_from_the_next_connection(
    secured: tuple[str, Authority], unique: str, tmp_path: Path
) -> None:
    """No restart: the file is read again. The whole DSN may be in a file, too."""
    dsn, _ = secured
    file = tmp_path / "password"
    whole = tmp_path / "dsn"
    with psycopg.connect(dsn, autocommit=True) as admin:
        role = sql.Identifier(unique)
        admin.execute(sql.SQL("CREATE ROLE {} LOGIN").format(role))
        reader = make_conninfo(dsn, user=unique, password=f"${{file:{file}}}")
        for password in ("first", "se'con\\d @/:", "${NAME}"):
            admin.execute(sql.SQL("ALTER ROLE {} PASSWORD {}").format(role, password))
            if file.exists():
                with pytest.raises(SourceError, match="password authentication failed"):
                    source.connect(reader)
            file.write_text(f"{password}\n")
            whole.write_text(make_conninfo(dsn, user=unique, password=password))
            for login in (reader, f"${{file:{whole}}}"):
                with source.connect(login) as conn:
                    assert conn.info.user == unique
