"""How a client of the cache trusts a server, and how it logs in: on a real server, through TLS."""

import re
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from cdc.errors import CdcError, SecretUnreadable, SinkRejected, SinkUnavailable
from cdc.model.outcome import Advance
from cdc.model.position import Position
from cdc.sink.contract import Sink
from cdc.sink.lane import Failure, Part, PartitionOutcome
from cdc.sink.remedy import Remedy, remedy
from cdc.sinks.redis.executor import PendingAdvance, RedisWriter
from cdc.sinks.redis.settings import Redis
from cdc.sinks.redis.sink import Redis as RedisSink
from tests.support.cache import cache
from tests.support.envelopes import table
from tests.support.proxy import Road

ITEMS = table("shop.public.items")
PAST = datetime.now(UTC) - timedelta(days=1)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with cache(tmp_path_factory.mktemp("cache")) as address:
        yield address


class Authorities:
    """One that signs servers, one that signs clients, and files in PEM of what they sign."""

    def __init__(self, folder: Path) -> None:
        self.servers = trustme.CA()
        self.clients = trustme.CA()
        self._folder = folder
        self.ca = folder / "ca.pem"
        self.servers.cert_pem.write_to_path(str(self.ca))

    def server(self, name: str = "localhost", **terms: Any) -> ssl.SSLContext:
        """What a server asks for: a certificate of a client, too."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.servers.issue_cert(name, **terms).configure_cert(context)
        self.clients.configure_trust(context)
        context.verify_mode = ssl.CERT_REQUIRED
        return context

    def client(self, authority: trustme.CA) -> dict[str, str]:
        issued = authority.issue_cert(common_name="cdc")
        issued.private_key_pem.write_to_path(str(self._folder / "client.key"))
        issued.cert_chain_pems[0].write_to_path(str(self._folder / "client.pem"))
        return {
            "certificate": str(self._folder / "client.pem"),
            "key": str(self._folder / "client.key"),
        }

    def settings(self) -> dict[str, str]:
        return {"ca": str(self.ca), **self.client(self.clients)}


@pytest.fixture
def authorities(tmp_path: Path) -> Authorities:
    return Authorities(tmp_path)


@contextmanager
def secured(url: str, context: ssl.SSLContext) -> Iterator[str]:
    road = Road(urlsplit(url).port or 0, context=context)
    yield f"rediss://localhost:{road.port}/0"
    road.close()


@contextmanager
def sink(**settings: Any) -> Iterator[Sink]:
    made = Redis.model_validate({"type": "redis", "prefix": "shop", **settings}).build(
        "cache", "shop"
    )
    try:
        yield made
    finally:
        made.close()


def refused(made: Sink) -> CdcError:
    with pytest.raises(CdcError) as caught:
        made.position(ITEMS)
    return caught.value


def test_a_server_with_an_authority_that_asks_for_a_certificate(
    url: str, authorities: Authorities
) -> None:
    with (
        secured(url, authorities.server()) as tls_url,
        sink(url=tls_url, **authorities.settings()) as made,
    ):
        made.prepare(ITEMS)
        assert made.generations(ITEMS)


@pytest.mark.parametrize(
    ("change", "kind", "message", "hint"),
    [
        (lambda _: {"ca": None}, SinkRejected, "of a CA that isn't trusted here", "`ca`"),
        (
            lambda own: {"certificate": None, "key": None},
            SinkRejected, "it asks for a client's certificate", "`certificate` and `key`",
        ),
        (
            lambda own: own.client(own.servers),
            SinkRejected, "it doesn't trust the client's certificate", "`certificate` and `key`",
        ),
    ],
    ids=["another CA", "no certificate", "a certificate of another CA"],
)  # fmt: skip
def test_what_the_client_lacks_is_named(
    url: str,
    authorities: Authorities,
    change: Callable[[Authorities], dict[str, Any]],
    kind: type[CdcError],
    message: str,
    hint: str,
) -> None:
    given = {**authorities.settings(), **change(authorities)}
    with secured(url, authorities.server()) as tls_url, sink(url=tls_url, **given) as made:
        error = refused(made)
    assert type(error) is kind
    assert message in error.message
    assert hint in error.hint


def test_a_certificate_for_another_name_is_named(url: str, authorities: Authorities) -> None:
    context = authorities.server("cache.example.org")
    with secured(url, context) as tls_url, sink(url=tls_url, **authorities.settings()) as made:
        error = refused(made)
    assert type(error) is SinkRejected
    assert "for another host name" in error.message


def test_an_expired_certificate_is_waited_for(url: str, authorities: Authorities) -> None:
    """Until somebody has renewed it; the same sink goes on then."""
    context = authorities.server(not_after=PAST, not_before=PAST - timedelta(days=1))
    with secured(url, context) as tls_url, sink(url=tls_url, **authorities.settings()) as made:
        error = refused(made)
        assert type(error) is SinkUnavailable
        assert "its certificate has expired" in error.message
        authorities.servers.issue_cert("localhost").configure_cert(context)
        made.position(ITEMS)


def test_tls_on_one_side_only_is_waited_for_and_named(url: str, authorities: Authorities) -> None:
    """Neither side says so: a server without TLS waits for the rest of a line, one with TLS hangs up."""
    tls_url = url.replace("redis://", "rediss://") + "?socket_timeout=1"
    with sink(url=tls_url, ca=str(authorities.ca)) as made:
        error = refused(made)
    assert type(error) is SinkUnavailable
    assert "rediss:// needs its TLS port" in error.hint
    with (
        secured(url, authorities.server()) as tls_url,
        sink(url=tls_url.replace("rediss://", "redis://")) as made,
    ):
        error = refused(made)
    assert type(error) is SinkUnavailable
    assert "closes the connection" in error.message
    assert "write rediss://" in error.hint


def test_files_are_read_again_at_each_connection(url: str, authorities: Authorities) -> None:
    """A new one counts without a restart."""
    given = authorities.settings()
    with secured(url, authorities.server()) as tls_url, sink(url=tls_url, **given) as made:
        content = authorities.ca.read_bytes()
        trustme.CA().cert_pem.write_to_path(str(authorities.ca))
        assert "isn't trusted here" in refused(made).message
        authorities.ca.write_bytes(content)
        made.position(ITEMS)


@pytest.mark.parametrize("setting", ["ca", "certificate", "key"])
def test_a_file_that_is_away_is_named_and_waited_for(
    url: str, authorities: Authorities, setting: str
) -> None:
    given = authorities.settings()
    with secured(url, authorities.server()) as tls_url, sink(url=tls_url, **given) as made:
        file = Path(given[setting])
        content = file.read_bytes()
        file.unlink()
        error = refused(made)
        assert remedy(error) is Remedy.RETRY
        assert f"{file} can't be read" in error.message
        assert "check the file" in error.hint
        file.write_bytes(content)
        made.position(ITEMS)


def lock(key: Path, password: str) -> None:
    """Encrypt a key with another password."""
    private = load_pem_private_key(key.read_bytes(), None)
    encryption = BestAvailableEncryption(password.encode())
    key.write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption))


def test_the_password_of_a_key_is_read_again_at_each_connection(
    url: str, authorities: Authorities, tmp_path: Path
) -> None:
    """On the driver and on executors. The first failure may still be of the former one."""
    password = tmp_path / "password"
    given = {**authorities.settings(), "key_password": f"${{file:{password}}}"}
    lock(Path(given["key"]), "first")
    password.write_text("first")
    with (
        secured(url, authorities.server()) as tls_url,
        sink(url=tls_url, **given) as made,
        redis.Redis.from_url(url) as server,
    ):
        made.position(ITEMS)
        authorities.settings()
        lock(Path(given["key"]), "second")
        password.write_text("second")
        server.client_kill_filter(_type="normal", skipme=True)
        assert remedy(refused(made)) is Remedy.RETRY
        made.position(ITEMS)
        made.close()
        password.unlink()
        assert remedy(refused(made)) is Remedy.RETRY
        assert isinstance(made, RedisSink)
        advance = Advance(ITEMS, None, Position("topic-1", (1, 0)))
        pending = PendingAdvance(advance, (0, 0), "", "one")
        part = Part(advance, 0, 0, PartitionOutcome(ITEMS.topic, 0), 1)
        with pytest.raises(Failure) as caught:
            RedisWriter(made.url, made.prefix, {ITEMS.topic: pending}).write([part])
        assert caught.value.kind == "unreadable"
        assert str(password) in caught.value.message


@contextmanager
def user(url: str, password: str) -> Iterator[Callable[[str], None]]:
    """A user of the server; yields what gives it another password and ends its connections."""

    def change(password: str) -> None:
        rules = ("reset", "on", f">{password}", "~*", "+@all")
        server.execute_command("ACL", "SETUSER", "app", *rules)
        server.execute_command("CLIENT", "KILL", "USER", "app", "SKIPME", "no")

    with redis.Redis.from_url(url) as server:
        change(password)
        yield change
        server.execute_command("ACL", "DELUSER", "app")


def test_a_rotated_password_counts_without_a_restart(url: str, tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("first\n")
    login = {"user": "app", "password": f"${{file:{file}}}"}
    with user(url, "first") as change, sink(url=url, **login) as made:
        made.position(ITEMS)
        change("second")
        error = refused(made)
        assert type(error) is SinkRejected
        assert "refuses the user or password of cache" in error.message
        assert re.search("first|second", f"{error.message} {error.hint} {error.details}") is None
        file.write_text("second\n")
        made.position(ITEMS)


def test_without_its_password_nobody_asks(url: str, tmp_path: Path) -> None:
    """Nor as the user that a server has for connections without a login."""
    file = tmp_path / "password"
    login = {"user": "app", "password": f"${{file:{file}}}"}
    with user(url, "first"), sink(url=url, **login) as made:
        for _ in range(3):
            error = refused(made)
            assert type(error) is SecretUnreadable
            assert f"${{file:{file}}} can't be read: No such file" in error.message
        file.write_text("first")
        made.position(ITEMS)
