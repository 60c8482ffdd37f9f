"""Where figures and probes of `run` are served: loopback, or what one asks for."""

import socket
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress

import psutil
import pytest

from cdc.cli.run import LOOPBACK, require_port
from cdc.errors import SettingsError
from cdc.observe import run_endpoint
from cdc.observe.run_endpoint import RunEndpoint
from cdc.observe.sampler import Sampler
from cdc.observe.status import Status
from tests.support import http

NOTHING = "no sink has begun\n"


def serve(port: int = 0, address: str = LOOPBACK) -> RunEndpoint:
    looks = Sampler("the servers", lambda: Status("shop"))
    return RunEndpoint(looks, lambda: True, port, address)


def text_of(url: str) -> str:
    return http.get(f"{url}/readyz").text


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
def loopback() -> Iterator[RunEndpoint]:
    with closing(serve()) as served:
        yield served


def test_by_itself_only_this_machine_reaches_it(loopback: RunEndpoint) -> None:
    assert text_of(loopback.url) == NOTHING
    for address in other_addresses():
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((address, loopback.port), 5)


@pytest.mark.parametrize("address", ["0.0.0.0", "localhost", "127.0.0.2", "::1"])
def test_it_is_served_on_the_address_that_is_asked_for(address: str) -> None:
    if not has_address(address):
        pytest.skip(f"this machine has no address {address}")
    with closing(serve(0, address)) as served:
        reached = other_addresses() if address == "0.0.0.0" else [address]
        for name in reached:
            shown = f"[{name}]" if ":" in name else name
            assert text_of(f"http://{shown}:{served.port}") == NOTHING
        assert served.url.startswith("http://[::1]:" if ":" in address else f"http://{address}:")


def test_a_port_that_is_taken_and_an_address_of_another_machine_are_named(
    loopback: RunEndpoint,
) -> None:
    with pytest.raises(SettingsError, match=f"127.0.0.1, port {loopback.port}: Address already"):
        serve(loopback.port)
    with pytest.raises(SettingsError, match=r"192[.]0[.]2[.]1"):
        serve(0, "192.0.2.1")


def test_a_client_that_says_nothing_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_endpoint.RequestHandler, "timeout", 0.1)
    with closing(serve()) as served:
        with socket.create_connection(("127.0.0.1", served.port), 60) as silent:
            began = time.monotonic()
            assert silent.recv(1) == b""
        assert time.monotonic() - began < 60
        assert text_of(served.url) == NOTHING


def test_an_address_needs_a_port() -> None:
    require_port(None, LOOPBACK)
    require_port(9104, "0.0.0.0")
    with pytest.raises(SettingsError, match="--metrics-address") as refused:
        require_port(None, "10.0.0.7")
    assert "--metrics 9104 --metrics-address 10.0.0.7" in refused.value.hint
