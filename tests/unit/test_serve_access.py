"""Who may see the page: addresses, names, tokens. Each refusal has the request beside it that only
lacks the fault.
"""

import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from cdc.errors import SettingsError
from cdc.serve.access import read_access
from tests.support import http
from tests.support.page import Scene, ServedPage, serve_page

TOKEN = "correct-horse-battery-staple"
BEARER = {"authorization": f"Bearer {TOKEN}"}
PROBES = ("/livez", "/readyz")
LOCKED = (
    "/", "/tables", "/generations", "/quarantine", "/runbooks/slot-lost", "/static/page.css", "/api/status",
    "/api/sample", "/api/lag/day", "/api/generations", "/api/quarantine", "/metrics", "/nothing",
)  # fmt: skip
"""Paths that need a token where one is set. The last has no page."""


@pytest.fixture(scope="module")
def open_page() -> Iterator[ServedPage]:
    with serve_page(Scene()) as served:
        yield served


@pytest.fixture(scope="module")
def locked_page() -> Iterator[ServedPage]:
    with serve_page(Scene(), TOKEN) as served:
        yield served


def test_a_token_is_needed_for_all_but_the_probes(locked_page: ServedPage) -> None:
    for path in (*LOCKED, "/events"):
        answer = http.get(f"{locked_page.url}{path}")
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer"), path
        assert "A token is needed" in answer.json()["error"]
        assert "set-cookie" not in answer.headers, path
    for path in PROBES:
        answer = http.get(f"{locked_page.url}{path}")
        assert (answer.status_code, "set-cookie" in answer.headers) == (200, False), path


def test_the_token_in_a_header_opens_to_own_names(locked_page: ServedPage) -> None:
    for path in LOCKED:
        answer = http.get(f"{locked_page.url}{path}", headers=BEARER)
        assert answer.status_code == (404 if path == "/nothing" else 200), path
        assert "set-cookie" not in answer.headers, path
    foreign = {**BEARER, "host": "evil.example"}
    assert http.get(f"{locked_page.url}/", headers=foreign).status_code == 421
    with http.stream("GET", f"{locked_page.url}/events", headers=BEARER) as events:
        assert events.status_code == 200


def test_a_wrong_token_opens_nothing(locked_page: ServedPage) -> None:
    wrong_tokens = ("wrong", f"{TOKEN}x", TOKEN[:-1], TOKEN.upper(), "\xe9")
    schemes = ("Bearer", f"Basic {TOKEN}", TOKEN, "")
    for wrong in (*(f"Bearer {token}" for token in wrong_tokens), *schemes):
        headers = {b"authorization": wrong.encode("latin-1")}
        for path in ("/", "/api/status", "/static/page.css"):
            answer = http.get(f"{locked_page.url}{path}", headers=headers)
            assert answer.status_code == 401, (wrong, path)


def test_a_token_elsewhere_opens_nothing(locked_page: ServedPage) -> None:
    for name in ("token", "access_token", "authorization"):
        assert http.get(f"{locked_page.url}/?{name}={TOKEN}").status_code == 401
        cookie = {"cookie": f"{name}={TOKEN}"}
        assert http.get(f"{locked_page.url}/", headers=cookie).status_code == 401


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", ""])
def test_a_foreign_name_is_refused(open_page: ServedPage, host: str) -> None:
    for path in (*LOCKED, "/events"):
        assert http.get(f"{open_page.url}{path}", headers={"host": host}).status_code == 421
    assert http.get(f"{open_page.url}/livez", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "[::1]:9", "127.0.0.1"])
def test_own_names_are_answered(open_page: ServedPage, host: str) -> None:
    assert http.get(f"{open_page.url}/", headers={"host": host}).status_code == 200


def test_what_could_change_something_is_refused(
    open_page: ServedPage, locked_page: ServedPage
) -> None:
    for page in (open_page, locked_page):
        for path in (*LOCKED, *PROBES, "/events"):
            for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "PROPFIND"):
                answer = http.request(method, f"{page.url}{path}", headers=BEARER)
                assert answer.status_code == 405, (method, path)
                assert answer.headers["allow"] == "GET, HEAD", (method, path)


def test_answers_forbid_what_the_page_does_not_need(open_page: ServedPage) -> None:
    headers = http.get(f"{open_page.url}/").headers
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-store"
    assert "server" not in headers


def test_the_token_is_compared_in_constant_time(
    locked_page: ServedPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[tuple[int, int]] = []

    def compare(first: bytes, second: bytes) -> bool:
        compared.append((len(first), len(second)))
        return first == second

    monkeypatch.setattr("hmac.compare_digest", compare)
    for text, code in ((TOKEN, 200), ("x", 401), ("x" * 9999, 401)):
        headers = {"authorization": f"Bearer {text}"}
        assert http.get(f"{locked_page.url}/", headers=headers).status_code == code
    assert compared == [(32, 32)] * 3


ENVIRONMENT = {"CDC_SERVE_TOKEN": TOKEN}
NAMES = ("cdc.example.com",)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.5", "::1", "localhost"])
def test_on_loopback_no_token_is_needed(address: str) -> None:
    access = read_access(address, [], None, {})
    assert "localhost" in access.hosts
    assert access.token is None


@pytest.mark.parametrize(
    "address", ["0.0.0.0", "::", "10.0.0.7", "cdc.example.com", "::ffff:10.0.0.7"]
)
def test_anywhere_else_a_token_is_needed(address: str) -> None:
    with pytest.raises(SettingsError, match="token is needed"):
        read_access(address, NAMES, None, {})
    assert "cdc.example.com" in read_access(address, NAMES, None, ENVIRONMENT).hosts


def test_every_address_needs_a_name() -> None:
    with pytest.raises(SettingsError, match="has to know its names"):
        read_access("0.0.0.0", [], None, ENVIRONMENT)


def test_the_token_is_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    with pytest.raises(SettingsError, match="can't be read"):
        read_access("10.0.0.7", [], file, {})
    file.write_text("short\n")
    with pytest.raises(SettingsError, match="could be guessed"):
        read_access("10.0.0.7", [], file, {})
    file.write_text(f"{TOKEN}\n")
    file.chmod(stat.S_IRUSR)
    given_access = read_access("10.0.0.7", [], file, {"CDC_SERVE_TOKEN": "another-token-here"})
    assert given_access.token == TOKEN
    assert TOKEN not in repr(given_access)
