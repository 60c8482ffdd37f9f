"""Who may see the page and who may act: addresses, names, tokens, origins, forms. Each refusal has
the request beside it that only lacks the fault.
"""

import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cdc.errors import SettingsError
from cdc.serve.access import sessions
from cdc.serve.access.guard import COOKIE, LARGEST
from cdc.serve.access.policy import read_access
from cdc.serve.access.sessions import Sessions
from tests.support import http
from tests.support.page import Scene, ServedPage, serve_page
from tests.support.wait import wait_until

TOKEN = "correct-horse-battery-staple"
BEARER = {"authorization": f"Bearer {TOKEN}"}
PRINTER = ["-c", "import sys; print(sys.argv[1:])"]
UNLOCKED = ("/login", "/livez", "/readyz", "/static/page.css")
LOCKED = ("/", "/tables", "/generations", "/quarantine", "/activity", "/runbooks/slot-lost")
LOCKED_DATA = (
    "/api/status",
    "/api/sample",
    "/api/lag/day",
    "/api/quarantine",
    "/metrics",
    "/events",
)
VERIFY = {"verb": "verify", "sink": "cache", "table": "public.orders"}


@pytest.fixture
def open_page() -> Iterator[ServedPage]:
    with serve_page(Scene(), program=PRINTER) as served:
        yield served


@pytest.fixture
def locked_page() -> Iterator[ServedPage]:
    with serve_page(Scene(), TOKEN, PRINTER) as served:
        yield served


class Browser:
    """As much of a browser as the guard looks at: cookies, Origin, the text of forms."""

    def __init__(self, page: ServedPage) -> None:
        self.client = http.Client(base_url=page.url, headers={"origin": page.url})

    def csrf(self, path: str) -> str:
        text = self.client.get(path).raise_for_status().text
        return text.partition('name="csrf" value="')[2].partition('"')[0]

    def post(self, path: str, **fields: str) -> httpx.Response:
        return self.client.post(path, data=fields)

    def log_in(self, token: str = TOKEN) -> httpx.Response:
        return self.post("/login", csrf=self.csrf("/login"), who="Ada", token=token)


def test_a_token_is_needed_for_all_but_the_login(locked_page: ServedPage) -> None:
    for path in LOCKED:
        answer = http.get(f"{locked_page.url}{path}")
        assert (answer.status_code, answer.headers["location"]) == (303, "/login"), path
    for path in LOCKED_DATA:
        assert http.get(f"{locked_page.url}{path}").status_code == 401, path
    for path in UNLOCKED:
        assert http.get(f"{locked_page.url}{path}").status_code == 200, path


def test_the_token_in_a_header_opens(locked_page: ServedPage) -> None:
    for path in (*LOCKED, *LOCKED_DATA[:-1]):
        assert http.get(f"{locked_page.url}{path}", headers=BEARER).status_code == 200, path
    for wrong in ("Bearer wrong", "Bearer", f"Bearer {TOKEN}x", "Bearer \xe9"):
        headers = {b"authorization": wrong.encode("latin-1")}
        assert http.get(f"{locked_page.url}/api/status", headers=headers).status_code == 401
    assert http.get(f"{locked_page.url}/?token={TOKEN}").status_code == 303


def test_a_login_gives_a_session_and_a_logout_ends_it(locked_page: ServedPage) -> None:
    browser = Browser(locked_page)
    refused = browser.log_in("wrong")
    assert refused.status_code == 403
    assert "the token was wrong" in refused.text
    before = next(iter(browser.client.cookies.jar)).value
    answer = browser.log_in()
    assert answer.status_code == 303
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Lax" in cookie
    after = next(iter(browser.client.cookies.jar)).value
    assert before != after
    assert TOKEN not in cookie
    assert browser.client.get("/").status_code == 200
    assert "Log out Ada" in browser.client.get("/").text
    assert browser.post("/logout", csrf=browser.csrf("/")).status_code == 303
    assert browser.client.get("/").status_code == 303


def test_a_session_ends_by_itself(locked_page: ServedPage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "SESSION_S", 0.0)
    browser = Browser(locked_page)
    browser.log_in()
    assert browser.client.get("/").status_code == 303


def test_a_cookie_that_was_made_up_opens_nothing(locked_page: ServedPage) -> None:
    port = locked_page.url.rpartition(":")[2]
    headers = {"cookie": f"{COOKIE}_{port}=made-up"}
    assert http.get(f"{locked_page.url}/", headers=headers).status_code == 303


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", ""])
def test_a_foreign_name_is_refused(open_page: ServedPage, host: str) -> None:
    for path in (*LOCKED, *LOCKED_DATA):
        assert http.get(f"{open_page.url}{path}", headers={"host": host}).status_code == 421
    assert http.get(f"{open_page.url}/livez", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "[::1]:9", "127.0.0.1"])
def test_own_names_are_answered(open_page: ServedPage, host: str) -> None:
    assert http.get(f"{open_page.url}/", headers={"host": host}).status_code == 200


def started(page: ServedPage) -> int:
    assert page.dashboard.actions
    return len(page.dashboard.actions.history)


def test_a_form_of_this_page_acts(open_page: ServedPage) -> None:
    browser = Browser(open_page)
    csrf = browser.csrf("/actions/new?verb=verify&sink=cache&table=public.orders")
    answer = browser.post("/actions", csrf=csrf, who="Ada", **VERIFY)
    assert (answer.status_code, answer.headers["location"]) == (303, "/activity")
    assert started(open_page) == 1


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:1"},
        {"origin": ""},
    ],
)
def test_a_form_of_another_page_is_refused(open_page: ServedPage, headers: dict[str, str]) -> None:
    browser = Browser(open_page)
    csrf = browser.csrf("/actions/new?verb=verify")
    fields = {"csrf": csrf, "who": "Ada", **VERIFY}
    assert browser.client.post("/actions", data=fields, headers=headers).status_code == 403
    del browser.client.headers["origin"]
    assert browser.client.post("/actions", data=fields).status_code == 403
    assert started(open_page) == 0


@pytest.mark.parametrize("csrf", ["", "wrong", "é", "0" * 64])
def test_a_form_without_its_proof_is_refused(open_page: ServedPage, csrf: str) -> None:
    browser, other = Browser(open_page), Browser(open_page)
    browser.csrf("/actions/new?verb=verify")
    for text in (csrf, other.csrf("/actions/new?verb=verify")):
        answer = browser.post("/actions", csrf=text, who="Ada", **VERIFY)
        assert answer.status_code == 403
    assert started(open_page) == 0


def test_a_form_without_a_cookie_is_refused(open_page: ServedPage) -> None:
    browser = Browser(open_page)
    csrf = browser.csrf("/actions/new?verb=verify")
    browser.client.cookies.clear()
    assert browser.post("/actions", csrf=csrf, who="Ada", **VERIFY).status_code == 403


def test_the_form_of_the_login_starts_nothing(locked_page: ServedPage) -> None:
    browser = Browser(locked_page)
    csrf = browser.csrf("/login")
    for path, code in (("/actions", 303), ("/api/actions", 401)):
        answer = browser.post(path, csrf=csrf, who="Ada", **VERIFY)
        assert answer.status_code == code
    assert started(locked_page) == 0


def test_every_unsafe_method_is_guarded(locked_page: ServedPage) -> None:
    for path in (
        "/",
        "/login",
        "/logout",
        "/actions",
        "/actions/interrupt",
        "/api/actions",
        "/livez",
    ):
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
            answer = http.request(method, f"{locked_page.url}{path}")
            assert answer.status_code in (403, 405), (method, path)


def test_what_is_no_form_or_too_large_is_refused(open_page: ServedPage) -> None:
    browser = Browser(open_page)
    csrf = browser.csrf("/actions/new?verb=verify")
    answer = browser.client.post("/actions", json={"csrf": csrf, **VERIFY})
    assert answer.status_code == 415
    assert browser.post("/actions", csrf=csrf, who="x" * LARGEST).status_code == 413


def test_a_program_acts_with_the_token(locked_page: ServedPage) -> None:
    address = f"{locked_page.url}/api/actions"
    fields = {"who": "nightly", **VERIFY}
    assert http.post(address, data=fields).status_code == 403
    answer = http.post(address, data=fields, headers=BEARER)
    assert answer.status_code == 202
    elsewhere = {**BEARER, "origin": "https://evil.example"}
    assert http.post(address, data=fields, headers=elsewhere).status_code == 403


def test_without_leave_there_are_no_actions() -> None:
    with serve_page(Scene()) as served:
        browser = Browser(served)
        assert http.get(f"{served.url}/actions/new?verb=verify").status_code == 403
        assert "--allow-actions" in browser.client.get("/activity").text
        assert "/actions/new" not in browser.client.get("/tables").text
        assert browser.client.get("/api/actions").json() == {"actions": []}


def test_answers_forbid_what_the_page_does_not_need(open_page: ServedPage) -> None:
    headers = http.get(f"{open_page.url}/").headers
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-store"
    assert "server" not in headers


def test_the_token_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[int, int]] = []

    def compare(first: bytes, second: bytes) -> bool:
        compared.append((len(first), len(second)))
        return first == second

    monkeypatch.setattr("hmac.compare_digest", compare)
    guarded = Sessions(TOKEN)
    assert [guarded.is_token(text) for text in (TOKEN, "", "x" * 9999)] == [True, False, False]
    assert compared == [(32, 32)] * 3


def access(address: str, *names: str, **values: Any) -> tuple[str, ...]:
    file = values.get("file")
    return read_access(address, names, file, values.get("environment", {})).hosts


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.5", "::1", "localhost"])
def test_on_loopback_no_token_is_needed(address: str) -> None:
    assert "localhost" in access(address)
    assert read_access(address, [], None, {}).token is None


@pytest.mark.parametrize(
    "address", ["0.0.0.0", "::", "10.0.0.7", "cdc.example.com", "::ffff:10.0.0.7"]
)
def test_anywhere_else_a_token_is_needed(address: str) -> None:
    with pytest.raises(SettingsError, match="token is needed"):
        access(address, "cdc.example.com")
    hosts = access(address, "cdc.example.com", environment={"CDC_SERVE_TOKEN": TOKEN})
    assert "cdc.example.com" in hosts


def test_every_address_needs_a_name() -> None:
    with pytest.raises(SettingsError, match="has to know its names"):
        access("0.0.0.0", environment={"CDC_SERVE_TOKEN": TOKEN})


def test_the_token_is_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    with pytest.raises(SettingsError, match="can't be read"):
        access("10.0.0.7", file=file)
    file.write_text("short\n")
    with pytest.raises(SettingsError, match="could be guessed"):
        access("10.0.0.7", file=file)
    file.write_text(f"{TOKEN}\n")
    file.chmod(stat.S_IRUSR)
    given_access = read_access("10.0.0.7", [], file, {"CDC_SERVE_TOKEN": "another-token-here"})
    assert given_access.token == TOKEN
    assert TOKEN not in repr(given_access)


def test_a_token_never_reaches_an_action(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CDC_SERVE_TOKEN", TOKEN)
    program = ["-c", "import os; print('token' if 'CDC_SERVE_TOKEN' in os.environ else 'none')"]
    with serve_page(Scene(), TOKEN, program) as served:
        http.post(f"{served.url}/api/actions", data={"who": "x", **VERIFY}, headers=BEARER)
        assert served.dashboard.actions
        action = served.dashboard.actions.history[0]
        wait_until(lambda: action.code is not None, 20, "the action to end")
        assert list(action.output) == ["none"]
