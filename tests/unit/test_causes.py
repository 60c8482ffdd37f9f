"""Why a server can't be used is reported at once, in the same words whatever its client says."""

import socket
import time
from collections.abc import Callable

import psycopg
import pytest

from cdc.apply import schema_follower
from cdc.control.registrations import Registration
from cdc.errors import CdcError, SinkRejected, SinkUnavailable, SourceError, SourceUnavailable
from cdc.model.causes import cause
from cdc.model.table import Column, Table
from cdc.postgres import source
from cdc.sink.remedy import classify
from cdc.sinks.elasticsearch.connection import forget
from cdc.sinks.elasticsearch.sink import Elasticsearch
from cdc.sinks.redis.sink import Redis
from tests.support.answering import ELSEWHERE, answering, postgres_tls, silent, tls, web
from tests.support.pipelines import pipeline
from tests.support.wait import answer_within

TABLE = Table("public", "items", (Column("id", "bigint"),), ("id",), "t")
UNKNOWN = "its certificate is of a CA that isn't trusted here"
OTHER_HOST = "its certificate is for another host name"
NO_TLS = "it doesn't speak TLS at that port"


def index(url: str) -> None:
    try:
        Elasticsearch("search", url, "shop").position(TABLE)
    finally:
        forget(url)


def cache(url: str) -> None:
    Redis("cache", url, "shop").position(TABLE)


READY = b"Z\x00\x00\x00\x05I"
LET_IN = b"R\x00\x00\x00\x08\x00\x00\x00\x00" + READY


def wordless_postgres(client: socket.socket) -> None:
    """Lets a client in, and says nothing from then on."""
    client.recv(1024)
    client.sendall(LET_IN)
    silent(client)


DONE = b"C\x00\x00\x00\x0dSELECT 1\x00" + READY
TEXT = b"T\x00\x00\x00\x1a\x00\x01m\x00" + bytes(6) + b"\x00\x00\x00\x19" + b"\xff" * 6 + bytes(2)
ON = TEXT + b"D\x00\x00\x00\x0c\x00\x01\x00\x00\x00\x02on"


def falling_silent(client: socket.socket) -> None:
    """The same after the statements with which a session begins."""
    client.recv(1024)
    client.sendall(LET_IN)
    client.recv(1024)
    client.sendall(DONE)
    client.recv(1024)
    client.sendall(ON + DONE)
    silent(client)


WORDLESS = "postgresql://owner@127.0.0.1:{port}/shop?sslmode=disable&gssencmode=disable"


def test_a_session_that_never_begins_is_not_waited_for_without_end() -> None:
    with answering(wordless_postgres) as port:
        url = WORDLESS.format(port=port) + "&connect_timeout=2"
        began = time.monotonic()
        with pytest.raises(SourceUnavailable, match="can't be reached"):
            source.connect(url)
        assert 1.9 < time.monotonic() - began < 60


def test_a_postgres_that_falls_silent_is_not_waited_for_without_end() -> None:
    with answering(falling_silent) as port:
        began, url = time.monotonic(), WORDLESS.format(port=port)
        with (
            pytest.raises(psycopg.OperationalError) as caught,
            source.connect(url) as connection,
            source.within(connection, 0.3),
        ):
            connection.execute("SELECT 1")
        assert 0.2 < time.monotonic() - began < 60
    assert isinstance(classify(caught.value, "postgres"), SourceUnavailable)


def test_a_run_goes_on_with_the_tables_as_they_were_when_postgres_falls_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It could not be stopped either as long as it waited."""
    monkeypatch.setattr(schema_follower, "PATIENCE_S", 0.3)
    with answering(falling_silent) as port:
        shop = pipeline("shop", WORDLESS.format(port=port), "public.items")
        began = time.monotonic()
        tables, aside = schema_follower.SchemaFollower(lambda: shop, [TABLE])([], Registration())
        assert time.monotonic() - began < 60
    assert ([table.qualified for table in tables], aside) == (["public.items"], {})


def postgres(url: str) -> None:
    source.connect(url).close()


def refused(ask: Callable[[str], None], url: str) -> CdcError:
    def refusal() -> CdcError:
        with pytest.raises(CdcError) as caught:
            ask(url)
        return caught.value

    error = answer_within(5, refusal)
    assert "secret" not in f"{error.message} {error.hint}"
    return error


@pytest.mark.parametrize(
    ("ask", "answer", "url", "cause", "hint", "kind"),
    [
        (index, tls, "https://me:secret@127.0.0.1:{}", UNKNOWN, "the sink's `ca`", SinkRejected),
        (index, web, "https://127.0.0.1:{}", NO_TLS, "http://", SinkRejected),
        (cache, tls, "rediss://:secret@127.0.0.1:{}/0", UNKNOWN, "`ca`", SinkRejected),
        (cache, tls, "rediss://127.0.0.1:{}/0?ssl_ca_certs=" + str(ELSEWHERE), OTHER_HOST, "host name", SinkRejected),
        (cache, web, "rediss://127.0.0.1:{}/0", NO_TLS, "redis://", SinkRejected),
        (cache, web, "redis://:secret@127.0.0.1:{}/0", "is no Redis: it answers in another way", "url", SinkRejected),
        (
            postgres, postgres_tls, "postgresql://me:secret@127.0.0.1:{}/d?sslmode=verify-full&sslrootcert=system",
            UNKNOWN, "sslrootcert=", SourceError,
        ),
        (
            postgres, postgres_tls, "postgresql://127.0.0.1:{}/d?sslmode=verify-full&sslrootcert=" + str(ELSEWHERE),
            OTHER_HOST, "host name", SourceError,
        ),
        (
            postgres, postgres_tls, "postgresql://127.0.0.1:{}/d?sslmode=verify-full&sslrootcert=/no/ca.pem",
            "the file of its CA isn't there", "sslrootcert=", SourceError,
        ),
    ],
)  # fmt: skip
def test_what_answers_in_the_servers_place(
    ask: Callable[[str], None],
    answer: Callable[..., None],
    url: str,
    cause: str,
    hint: str,
    kind: type[CdcError],
) -> None:
    with answering(answer) as port:
        error = refused(ask, url.format(port))
    assert cause in error.message
    assert f"127.0.0.1:{port}" in error.message
    assert hint in error.hint
    # It won't pass by itself: nobody is to wait for it.
    assert type(error) is kind


def test_a_ca_of_the_environment_is_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the hint says: then only the name is still wrong."""
    monkeypatch.setenv("SSL_CERT_FILE", str(ELSEWHERE))
    with answering(tls) as port:
        error = refused(index, f"https://127.0.0.1:{port}")
    assert OTHER_HOST in error.message


@pytest.mark.parametrize(
    ("ask", "url", "cause", "kind"),
    [
        (index, "http://127.0.0.1:1", "nothing listens there", SinkUnavailable),
        (cache, "redis://127.0.0.1:1", "nothing listens there", SinkUnavailable),
        (postgres, "postgresql://127.0.0.1:1/d", "nothing listens there", SourceUnavailable),
        (index, "http://nowhere.invalid:1", "its host name is unknown", SinkUnavailable),
        (cache, "redis://nowhere.invalid:1", "its host name is unknown", SinkUnavailable),
        (postgres, "postgresql://nowhere.invalid/d", "its host name is unknown", SourceUnavailable),
    ],
)
def test_what_is_away_may_come_back(
    ask: Callable[[str], None], url: str, cause: str, kind: type[CdcError]
) -> None:
    error = refused(ask, url)
    assert f"can't be reached: {cause}." in error.message
    assert type(error) is kind


@pytest.mark.parametrize(
    ("words", "text", "passes"),
    [
        ("certificate verify failed: certificate has expired (_ssl.c:1000)", "its certificate has expired", True),
        ("certificate verify failed: unable to get local issuer certificate", UNKNOWN, False),
        ("tlsv13 alert certificate required", "it asks for a client's certificate", False),
        ("sslv3 alert certificate expired", "the client's certificate has expired", True),
        ("sslv3 alert certificate unknown", "it doesn't trust the client's certificate", False),
        ("tlsv1 alert unknown ca", "it doesn't trust the client's certificate", False),
        ("server does not support SSL, but SSL was required", NO_TLS, False),
        ("[SSL: WRONG_VERSION_NUMBER] wrong version number", NO_TLS, False),
        ("timeout expired", "it doesn't answer", True),
        ("Timeout connecting to server", "it doesn't answer", True),
        ("words of another language", "", True),
    ],
)  # fmt: skip
def test_words_of_libraries(words: str, text: str, passes: bool) -> None:
    why = cause(words)
    assert (why.text, why.is_transient) == (text, passes)
