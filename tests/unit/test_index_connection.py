"""How clients reach an index: the next node where one is away, logins that change, and what is refused by name."""

import json
import pickle
import socket
import ssl
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest
import trustme
from urllib3 import Timeout

from cdc.errors import CdcError, SinkRejected, SinkUnavailable
from cdc.model import secrets
from cdc.model.login import Address, Login
from cdc.model.outcome import Advance
from cdc.model.position import Position
from cdc.model.table import Column, Table
from cdc.sink.lane import Failure, FoldedRow, Part, PartitionOutcome
from cdc.sinks.elasticsearch.client import Refusal, Server, send_request
from cdc.sinks.elasticsearch.connection import forget
from cdc.sinks.elasticsearch.executor import ElasticsearchWriter
from tests.support.answering import answering, silent
from tests.support.faulty import RESET, Answer, Proxy, Request, json_answer

NOWHERE = "http://127.0.0.1:1"
NOW = datetime.now(UTC)
TABLE = Table("public", "items", (Column("id", "bigint"),), ("id",), "t")


class Nodes:
    """Nodes that answer everything with the same, and keep what they are asked."""

    def __init__(self, stack: ExitStack, count: int) -> None:
        self.requests: list[list[Request]] = [[] for _ in range(count)]
        self.proxies = [stack.enter_context(Proxy(NOWHERE)) for _ in range(count)]
        self.urls = [proxy.url for proxy in self.proxies]
        for number, proxy in enumerate(self.proxies):
            proxy.rule = partial(self._answer, number)

    def _answer(self, number: int, request: Request) -> Answer:
        self.requests[number].append(request)
        return json_answer(200, {"errors": False})

    def lose(self, number: int) -> None:
        """Let a node take requests, and end before it answers."""

        def lost(request: Request) -> Answer:
            self.requests[number].append(request)
            return RESET

        self.proxies[number].rule = lost


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    with ExitStack() as stack:
        yield Nodes(stack, 2)


@contextmanager
def forgotten(url: str) -> Iterator[str]:
    try:
        yield url
    finally:
        forget(url)


@pytest.mark.parametrize("is_repeatable", [True, False])
def test_a_node_that_is_away_fails_no_request(nodes: Nodes, is_repeatable: bool) -> None:
    """Nothing of it was sent."""
    with forgotten(f"{NOWHERE},{nodes.urls[0]}") as url:
        for number in range(6):
            send_request(url, "POST", f"/{number}", is_repeatable=is_repeatable)
    assert len(nodes.requests[0]) == 6


def test_what_may_have_been_carried_out_is_repeated_only_if_that_changes_nothing(
    nodes: Nodes,
) -> None:
    nodes.lose(0)
    with forgotten(",".join(nodes.urls)) as url:
        for number in range(4):
            send_request(url, "POST", "/_bulk", f"{number}\n")
    assert [request.body for request in nodes.requests[1]] == [b"0\n", b"1\n", b"2\n", b"3\n"]
    lost = len(nodes.requests[0])
    assert lost

    def store_twice(url: str) -> None:
        for _ in range(2):
            Server("search", url).ask("POST", "/_bulk", "positions\n")

    with forgotten(",".join(nodes.urls)) as url, pytest.raises(SinkUnavailable) as caught:
        store_twice(url)
    assert nodes.urls[0] in caught.value.message
    assert len(nodes.requests[0]) == lost + 1


def test_a_node_that_is_back_is_asked_when_the_other_goes_away(nodes: Nodes) -> None:
    """Although it failed so often that it isn't to be asked for a while."""
    answers = [proxy.rule for proxy in nodes.proxies]
    nodes.lose(0)
    nodes.lose(1)
    with forgotten(",".join(nodes.urls)) as url:
        for _ in range(6):
            with pytest.raises(SinkUnavailable):
                send_request(url, "GET", "/")
        nodes.proxies[0].rule = answers[0]
        send_request(url, "GET", "/")
        nodes.proxies[1].rule = answers[1]
        nodes.lose(0)
        send_request(url, "GET", "/last")
    assert nodes.requests[1][-1].path == "/last"


def test_a_node_without_its_cluster_fails_one_request(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it is its turn again, by a clock that doesn't move."""
    monkeypatch.setattr(time, "time", NOW.timestamp)
    nodes.proxies[0].rule = lambda _: json_answer(503, {"error": {"type": "master_not_discovered"}})
    failures = 0
    with forgotten(",".join(nodes.urls)) as url:
        for _ in range(6):
            try:
                send_request(url, "GET", "/")
            except SinkUnavailable:
                failures += 1
    assert (failures, len(nodes.requests[1])) == (1, 5)


def test_a_node_that_takes_no_connection_fails_no_request(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cdc.sinks.elasticsearch.connection.TIMEOUT", Timeout(connect=0.3, read=60))
    with ExitStack() as stack:
        full = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        port = full.getsockname()[1]
        # Nobody accepts these; the system answers no further one.
        with suppress(TimeoutError):
            while True:
                stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=0.3))
        url = stack.enter_context(forgotten(f"http://127.0.0.1:{port},{nodes.urls[0]}"))
        for number in range(2):
            send_request(url, "POST", f"/{number}", is_repeatable=False)
    assert len(nodes.requests[0]) == 2


def test_of_nodes_that_are_all_away_each_is_named() -> None:
    urls = NOWHERE, "http://127.0.0.1:2"
    with forgotten(",".join(urls)) as url, pytest.raises(SinkUnavailable) as caught:
        send_request(url, "GET", "/")
    assert all(node in caught.value.message for node in urls)


def part() -> Part:
    rows = {"1": FoldedRow("1", 5, b"{}", (), [])}
    return Part(Advance(TABLE, None, Position("id", (9,))), 0, 0, PartitionOutcome("t", 0), 6, rows)


def basic(password: str) -> str:
    return f"Basic {b64encode(f'shop:{password}'.encode()).decode()}"


@pytest.mark.parametrize(
    ("login", "header"),
    [
        (lambda url, secret: Address(url, Login(user="shop", password=secret)), basic),
        (lambda url, secret: Address(url, Login(api_key=secret)), lambda key: f"ApiKey {key}"),
        (
            lambda url, secret: secrets.read_before_login(url.replace("//", f"//shop:{secret}@")),
            basic,
        ),
    ],
    ids=["password", "api_key", "url"],
)
def test_a_secret_in_a_file_is_read_again_when_it_is_refused(
    nodes: Nodes,
    tmp_path: Path,
    login: Callable[[str, str], str],
    header: Callable[[str], str],
) -> None:
    """Executors get the reference, not the secret."""
    secret = tmp_path / "secret"
    secret.write_text("Zmlyc3Q=\n")
    accepted = "Zmlyc3Q="
    unauthorized = json_answer(401, {"error": {"type": "security_exception"}})
    proxy = nodes.proxies[0]
    proxy.rule = lambda request: (
        json_answer(200, {"errors": False}) if request.login == header(accepted) else unauthorized
    )
    with forgotten(login(proxy.url, f"${{file:{secret}}}")) as url:
        writer = pickle.dumps(ElasticsearchWriter(url, {"t": "i"}))
        assert b"Zmlyc3Q" not in writer
        pickle.loads(writer).write([part()])
        accepted = "c2Vjb25k"
        with pytest.raises(Failure) as failed:
            pickle.loads(writer).write([part()])
        assert failed.value.kind == "login"
        assert proxy.url in failed.value.message
        with pytest.raises(Refusal, match="doesn't accept the login") as caught:
            send_request(url, "GET", "/")
        assert "api_key" in caught.value.hint
        secret.write_text("c2Vjb25k")
        pickle.loads(writer).write([part()])
        secret.unlink()
        # Who is let in reads no file.
        send_request(url, "GET", "/")
        accepted = "dGhpcmQ="
        with pytest.raises(SinkUnavailable, match="No such file"):
            send_request(url, "GET", "/")


def test_a_key_that_a_header_cannot_hold_is_not_quoted(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hunter2\nhunter2")
    address = Address(NOWHERE, Login(api_key=f"${{file:{secret}}}"))
    with forgotten(address) as url, pytest.raises(SinkRejected) as caught:
        send_request(url, "GET", "/")
    assert "api_key isn't in base64" in caught.value.message
    assert "hunter2" not in str(caught.value)


UNAUTHORIZED_ACTION = (
    "action [indices:data/write/bulk[s]] is unauthorized for user [shop] with effective roles [shop] on indices"
    " [i], this action is granted by the index privileges [create_doc,index,write,all]"
)


def test_a_privilege_that_lacks_is_named(nodes: Nodes) -> None:
    error = {"type": "security_exception", "reason": UNAUTHORIZED_ACTION}
    named = "indices:data/write/bulk[s] on i (status 403); any of the index privileges create_doc, index, write, all"
    proxy = nodes.proxies[0]
    with forgotten(proxy.url) as url:
        proxy.rule = lambda _: json_answer(403, {"error": error})
        with pytest.raises(Refusal) as caught:
            send_request(url, "POST", "/_bulk", "x\n")
        assert named in caught.value.message
        assert "cdc-position" in caught.value.hint
        items = [{"index": {"status": 403, "error": error}}]
        proxy.rule = lambda _: json_answer(200, {"errors": True, "items": items})
        with pytest.raises(Failure) as failed:
            ElasticsearchWriter(url, {"t": "i"}).write([part()])
    assert failed.value.kind == "forbidden"
    assert named in failed.value.message


OK = b"HTTP/1.1 200 OK\r\nx-elastic-product: E\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}"


def secured(
    authority: trustme.CA, own: trustme.LeafCert, *, asks: bool = False
) -> Callable[[socket.socket], None]:
    """A server over TLS. asks: for a client's certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    own.configure_cert(context)
    authority.configure_trust(context)
    context.verify_mode = ssl.CERT_REQUIRED if asks else ssl.CERT_NONE

    def answer(client: socket.socket) -> None:
        with context.wrap_socket(
            client, server_side=True, do_handshake_on_connect=False
        ) as wrapped:
            try:
                wrapped.do_handshake()
            except ssl.SSLError:
                # The end of a connection with unread bytes would overtake the reason.
                with socket.socket(fileno=wrapped.detach()) as plain:
                    silent(plain)
                return
            wrapped.recv(4096)
            wrapped.sendall(OK)

    return answer


def refused(url: str) -> CdcError:
    with forgotten(url), pytest.raises(CdcError) as caught:
        send_request(url, "GET", "/")
    return caught.value


@pytest.mark.parametrize(
    ("own", "asks", "words", "hint", "kind"),
    [
        ({}, False, None, "", None),
        ({"not_after": NOW - timedelta(days=1), "not_before": NOW - timedelta(days=2)}, False,
         "its certificate has expired", "renew", SinkUnavailable),
        ({"name": "es.example"}, False, "for another host name", "host name", SinkRejected),
        ({"authority": "another"}, False, "of a CA that isn't trusted", "`ca`", SinkRejected),
        ({}, True, "asks for a client's certificate", "`certificate`", SinkRejected),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_certificate_is_named_with_its_setting(
    tmp_path: Path,
    own: dict[str, object],
    asks: bool,
    words: str | None,
    hint: str,
    kind: type[CdcError] | None,
) -> None:
    ca = trustme.CA()
    ca.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    options = {name: value for name, value in own.items() if name.startswith("not_")}
    signing = trustme.CA() if "authority" in own else ca
    leaf = signing.issue_cert(str(own.get("name", "127.0.0.1")), **options)  # type: ignore[arg-type]
    with answering(secured(ca, leaf, asks=asks)) as port:
        address = Address(f"https://127.0.0.1:{port}", Login(ca=str(tmp_path / "ca.pem")))
        if kind is None or words is None:
            with forgotten(address):
                send_request(address, "GET", "/")
            return
        error = refused(address)
    assert words in error.message
    assert f"https://127.0.0.1:{port}" in error.message
    assert hint in error.hint
    assert type(error) is kind


def test_a_certificate_that_is_refused_is_asked_of_no_other_node(tmp_path: Path) -> None:
    """One node of two has another authority's: that shows, and doesn't pass for a node that is away."""
    ca = trustme.CA()
    ca.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    good = secured(ca, ca.issue_cert("127.0.0.1"))
    bad = secured(ca, trustme.CA().issue_cert("127.0.0.1"))
    with answering(good) as first, answering(bad) as second:
        urls = f"https://127.0.0.1:{first},https://127.0.0.1:{second}"
        address = Address(urls, Login(ca=str(tmp_path / "ca.pem")))
        with forgotten(address), pytest.raises(SinkRejected) as caught:
            # In turn.
            [send_request(address, "GET", "/") for _ in range(2)]
    assert f"https://127.0.0.1:{second} can't be reached: its certificate" in caught.value.message
    assert str(first) not in caught.value.message


def write_own(folder: Path, own: trustme.LeafCert) -> None:
    own.private_key_pem.write_to_path(str(folder / "key.pem"))
    own.cert_chain_pems[0].write_to_path(str(folder / "own.pem"))


def with_own(port: int, folder: Path) -> Address:
    files = {"ca": "ca.pem", "certificate": "own.pem", "key": "key.pem"}
    login = Login(**{name: str(folder / file) for name, file in files.items()})
    return Address(f"https://127.0.0.1:{port}", login)


@pytest.mark.parametrize("is_repeatable", [True, False])
@pytest.mark.parametrize("renewed", ["ca", "own"])
def test_a_renewed_certificate_fails_no_request(
    tmp_path: Path, renewed: str, is_repeatable: bool
) -> None:
    authority = trustme.CA()
    clients = trustme.CA()

    def renew() -> Callable[[socket.socket], None]:
        authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
        write_own(tmp_path, clients.issue_cert("shop"))
        return secured(clients, authority.issue_cert("127.0.0.1"), asks=True)

    server = renew()

    def answer(client: socket.socket) -> None:
        server(client)

    with (
        answering(answer) as port,
        forgotten(with_own(port, tmp_path)) as address,
    ):
        send_request(address, "GET", "/", is_repeatable=is_repeatable)
        if renewed == "ca":
            authority = trustme.CA()
        else:
            clients = trustme.CA()
        server = renew()
        send_request(address, "GET", "/", is_repeatable=is_repeatable)


def test_a_clients_certificate_is_shown_and_read_again(tmp_path: Path) -> None:
    ca = trustme.CA()
    ca.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    write_own(tmp_path, trustme.CA().issue_cert("shop"))
    with (
        answering(secured(ca, ca.issue_cert("127.0.0.1"), asks=True)) as port,
        forgotten(with_own(port, tmp_path)) as address,
    ):
        with pytest.raises(SinkRejected, match="doesn't trust the client's certificate"):
            send_request(address, "GET", "/")
        write_own(tmp_path, ca.issue_cert("shop"))
        send_request(address, "GET", "/")


def test_a_clients_certificate_that_has_expired_is_waited_for(tmp_path: Path) -> None:
    """Until somebody has renewed it, as with the server's."""
    ca = trustme.CA()
    ca.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    day = timedelta(days=1)
    write_own(tmp_path, ca.issue_cert("shop", not_before=NOW - 2 * day, not_after=NOW - day))
    with answering(secured(ca, ca.issue_cert("127.0.0.1"), asks=True)) as port:
        error = refused(with_own(port, tmp_path))
    assert type(error) is SinkUnavailable
    assert "the client's certificate has expired" in error.message
    assert "renew the sink's `certificate`" in error.hint


@pytest.mark.parametrize("content", [None, b"no certificate"])
def test_a_file_that_cannot_be_read_any_more_is_named(
    tmp_path: Path, content: bytes | None
) -> None:
    path = tmp_path / "ca.pem"
    if content is not None:
        path.write_bytes(content)
    error = refused(Address("https://127.0.0.1:1", Login(ca=str(path))))
    assert str(path) in error.message
    assert "read again" in error.hint


def test_an_address_without_tls_of_a_port_with_it_is_named() -> None:
    def shut(client: socket.socket) -> None:
        client.recv(1024)

    with answering(shut) as port:
        error = refused(f"http://127.0.0.1:{port}")
    assert "closes the connection without an answer" in error.message
    assert "write https://" in error.hint


def test_an_unknown_host_is_named() -> None:
    error = refused("https://es-1.invalid:9200")
    assert "https://es-1.invalid:9200" in error.message
    assert "its host name is unknown" in error.message
    assert "url or nodes" in error.hint
    assert json.dumps(error.details)


ROOT_OF_OPENSEARCH = {
    "name": "os-1",
    "version": {"distribution": "opensearch", "number": "2.19.6", "build_type": "tar"},
    "tagline": "The OpenSearch Project: https://opensearch.org/",
}
"""What OpenSearch 2.19.6 answers at its root; none of its answers has a product header."""
ABSENT = {
    "error": {"type": "index_not_found_exception", "reason": "no such index [x]"},
    "status": 404,
}


def opensearch(request: Request) -> Answer:
    """Answer as OpenSearch 2.19.6 did."""
    answers: dict[str, tuple[int, object]] = {
        "/": (200, ROOT_OF_OPENSEARCH),
        "/x/_search/point_in_time": (200, {"pit_id": "pit-1", "creation_time": 1}),
        "/_search/point_in_time": (200, {"pits": [{"successful": True, "pit_id": "pit-1"}]}),
    }
    status, body = answers.get(request.path.partition("?")[0], (404, ABSENT))
    return Answer(status, json.dumps(body).encode())


def test_an_opensearch_is_known_by_its_root() -> None:
    """Its answers have no header of the product, and its points in time have addresses of their own."""
    asked: list[tuple[str, str]] = []

    def rule(request: Request) -> Answer:
        asked.append((request.method, request.path))
        return opensearch(request)

    with Proxy(NOWHERE) as proxy:
        proxy.rule = rule
        server = Server("search", proxy.url)
        assert server.open_point_in_time("x", "1m") == "pit-1"
        server.close_point_in_time("pit-1")
        assert server.product == "OpenSearch"
        with pytest.raises(Refusal) as caught:
            server.ask("GET", "/y/_alias")
        assert (caught.value.status, caught.value.kind) == (404, "index_not_found_exception")
        assert asked.count(("GET", "/")) == 1
        assert ("DELETE", "/_search/point_in_time") in asked
        # What stands before it is not the server: what isn't found there may be there.
        for page in (
            Answer(404, b"<html>", "text/html"),
            Answer(404, b'{"message":"no route"}'),
            Answer(200, b"<html>", "text/html"),
        ):
            proxy.rule = lambda _, page=page: page  # type: ignore[misc]
            with pytest.raises(SinkUnavailable, match="no Elasticsearch and no OpenSearch"):
                server.ask("GET", "/y/_alias")
        forget(proxy.url)


@pytest.mark.parametrize(
    "root",
    [
        {"version": {"number": "7.10.2", "build_flavor": "oss"}},
        {"message": "a page"},
        ["a page"],
    ],
)
def test_what_does_not_say_that_it_is_an_opensearch(root: object) -> None:
    with Proxy(NOWHERE) as proxy:
        proxy.rule = lambda _: Answer(200, json.dumps(root).encode())
        with pytest.raises(SinkUnavailable, match="no Elasticsearch and no OpenSearch"):
            Server("search", proxy.url).ask("GET", "/y/_alias")
        forget(proxy.url)
