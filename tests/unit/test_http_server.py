"""Where figures and probes of `run` and `verify` are served: loopback, or what one asks for."""

import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from typing import Any

import psutil
import pytest

from cdc.errors import SettingsError
from cdc.observe import http_server
from cdc.observe.http_server import HttpServer, Listener, read_listener
from tests.support import http


def answer(_: dict[str, Any], respond: Callable[..., Any]) -> Iterable[bytes]:
    respond("200 OK", [("Content-Type", "text/plain")])
    return [b"ok"]


def other_addresses() -> list[str]:
    """This machine's addresses but the usual loopback one. With Linux all of 127.0.0.0/8 is."""
    outward = [
        address.address
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family == socket.AF_INET and not address.address.startswith("127.")
    ]
    return [*outward, *(["127.0.0.2"] if sys.platform == "linux" else [])]


def has_address(address: str) -> bool:
    """Whether this machine has an address: containers often have none of IPv6."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with suppress(OSError), socket.socket(family) as probe:
        probe.bind((address, 0))
        return True
    return False


@pytest.fixture
def loopback() -> Iterator[HttpServer]:
    with closing(HttpServer(answer, Listener(0))) as served:
        yield served


def test_by_itself_only_this_machine_reaches_it(loopback: HttpServer) -> None:
    assert http.get(loopback.url).text == "ok"
    for address in other_addresses():
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((address, loopback.port), 5)


@pytest.mark.parametrize("address", ["0.0.0.0", "localhost", "127.0.0.2", "::1"])
def test_it_is_served_on_the_address_that_is_asked_for(address: str) -> None:
    if not has_address(address):
        pytest.skip(f"this machine has no address {address}")
    with closing(HttpServer(answer, Listener(0, address))) as served:
        reached = other_addresses() if address == "0.0.0.0" else [address]
        for name in reached:
            shown = f"[{name}]" if ":" in name else name
            assert http.get(f"http://{shown}:{served.port}/").text == "ok"
        assert served.url.startswith("http://[::1]:" if ":" in address else f"http://{address}:")


def test_a_port_that_is_taken_and_an_address_of_another_machine_are_named(
    loopback: HttpServer,
) -> None:
    with pytest.raises(SettingsError, match=f"127.0.0.1, port {loopback.port}: Address already"):
        HttpServer(answer, Listener(loopback.port))
    with pytest.raises(SettingsError, match=r"192[.]0[.]2[.]1"):
        HttpServer(answer, Listener(0, "192.0.2.1"))


def test_a_client_that_says_nothing_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server.RequestHandler, "timeout", 0.1)
    with closing(HttpServer(answer, Listener(0))) as served:
        with socket.create_connection(("127.0.0.1", served.port), 60) as silent:
            began = time.monotonic()
            assert silent.recv(1) == b""
        assert time.monotonic() - began < 60
        assert http.get(served.url).text == "ok"


def test_an_address_needs_a_port() -> None:
    assert read_listener(None, "127.0.0.1") is None
    assert read_listener(9104, "0.0.0.0") == Listener(9104, "0.0.0.0")
    with pytest.raises(SettingsError, match="--metrics-address") as refused:
        read_listener(None, "10.0.0.7")
    assert "--metrics 9104 --metrics-address 10.0.0.7" in refused.value.hint
