"""Kafka Connect's REST interface behind TLS that asks for a certificate, for a user, or for a token."""

import ssl
import threading
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from cdc.compose.authority import Authority
from cdc.config.server_settings import ConnectSettings
from cdc.connectors.client import Connect
from cdc.errors import ConnectorError

PASSWORD = "p@ss:w/rd"
ACCEPTED = ("Bearer a token", "Basic " + b64encode(f"shop:{PASSWORD}".encode()).decode())


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    made = Authority(tmp_path_factory.mktemp("authority"))
    made.certify("certified", "client")
    made.certify("worker", "localhost")
    return made


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("strangers"))


class Worker(ThreadingHTTPServer):
    """Answers whom it knows: by a certificate, or else by a user or a token."""

    def __init__(self, authority: Authority, *, by_certificate: bool) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                login = self.headers["Authorization"]
                is_known = login is None if by_certificate else login in ACCEPTED
                self.send_response(200 if is_known else 401)
                self.end_headers()
                self.wfile.write(b"[]")

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(authority.folder / "worker.pem")
        context.load_verify_locations(authority.ca)
        if by_certificate:
            context.verify_mode = ssl.CERT_REQUIRED
        self.socket = context.wrap_socket(
            self.socket, server_side=True, do_handshake_on_connect=False
        )
        self.url = f"https://localhost:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients hang up whose handshake is refused."""


@pytest.fixture(scope="module")
def by_certificate(authority: Authority) -> Iterator[str]:
    with closing_server(Worker(authority, by_certificate=True)) as url:
        yield url


@pytest.fixture(scope="module")
def by_login(authority: Authority) -> Iterator[str]:
    with closing_server(Worker(authority, by_certificate=False)) as url:
        yield url


@contextmanager
def closing_server(worker: Worker) -> Iterator[str]:
    yield worker.url
    worker.shutdown()
    worker.server_close()


def ask(**settings: Any) -> dict[str, str]:
    given = ConnectSettings.model_validate({name: str(value) for name, value in settings.items()})
    with Connect(given.address) as connect:
        return connect.plugins()


def test_a_certificate_is_enough(by_certificate: str, authority: Authority) -> None:
    files = {
        "certificate": authority.folder / "certified.crt",
        "key": authority.folder / "certified.key",
    }
    assert ask(url=by_certificate, ca=authority.ca, **files) == {}


def test_users_and_tokens_are_read_from_files(
    by_login: str, authority: Authority, tmp_path: Path
) -> None:
    (tmp_path / "password").write_text(f"{PASSWORD}\n")
    (tmp_path / "token").write_text("a token\n")
    reference = f"${{file:{tmp_path}/password}}"
    escaped = reference.replace("/", "%2F")
    assert ask(url=by_login, ca=authority.ca, user="shop", password=reference) == {}
    assert ask(url=by_login.replace("//", f"//shop:{escaped}@"), ca=authority.ca) == {}
    assert ask(url=by_login, ca=authority.ca, token=f"${{file:{tmp_path}/token}}") == {}


@pytest.mark.parametrize(
    ("changed", "message", "hint"),
    [
        ({"token": "another"}, "refuses the user or the token (status 401)", "user and password"),
        ({}, "refuses the user or the token (status 401)", "user and password"),
        ({"ca": "STRANGERS"}, "of a CA that isn't trusted here", "ca: FILE"),
        ({"host": "127.0.0.1"}, "is for another host name", "host name"),
    ],
)
def test_a_refusal_names_the_setting(
    by_login: str,
    authority: Authority,
    strangers: Authority,
    changed: dict[str, str],
    message: str,
    hint: str,
) -> None:
    given = {"ca": str(authority.ca), **changed}
    given["url"] = by_login.replace("localhost", given.pop("host", "localhost"))
    given["ca"] = given["ca"].replace("STRANGERS", str(strangers.ca))
    with pytest.raises(ConnectorError) as caught:
        ask(**given)
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_a_missing_certificate_is_named(by_certificate: str, authority: Authority) -> None:
    with pytest.raises(ConnectorError) as caught:
        ask(url=by_certificate, ca=authority.ca)
    assert "asks for a client's certificate" in caught.value.message
    assert "certificate: FILE" in caught.value.hint
