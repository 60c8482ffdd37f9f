"""What the pipeline file may say of a cache's server: logins, TLS, Sentinels."""

from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import redis

from cdc.config import settings
from cdc.errors import SettingsError
from cdc.model.address import address
from cdc.redis.server import CLUSTER_COMMANDS, COMMANDS, failure
from cdc.sinks.redis.settings import Redis
from tests.support.answering import ELSEWHERE

FILE = """\
pipeline: shop
source: {dsn: postgresql://127.0.0.1:1/shop, tables: [public.items]}
kafka: 127.0.0.1:1
connect: http://127.0.0.1:1
sinks:
  cache:
"""
PAIR = f"certificate: {ELSEWHERE}, key: {ELSEWHERE}"
BEHIND = 'url: "rediss:///3", sentinels: [s-1, "s-2:26380"], service: shop'


def load(folder: Path, *sinks: str) -> settings.Pipeline:
    lines = [
        f"  c{number}: {{type: redis, prefix: shop, {text}}}" for number, text in enumerate(sinks)
    ]
    path = folder / "shop.yaml"
    path.write_text(FILE.replace("  cache:", "\n".join(lines)))
    return settings.load(path, {})


def cache(folder: Path, text: str) -> Redis:
    sink = load(folder, text).sinks["c0"]
    assert isinstance(sink, Redis)
    return sink


@pytest.mark.parametrize(
    ("text", "place", "message", "hint"),
    [
        ('url: "redis:///0"', "url", "names no host", "redis://localhost:6379/0"),
        ('url: "redis:///0", sentinels: [s-1]', "sentinels", "needs service, too", "service: mymaster"),
        ("url: redis://h, service: shop", "service", "needs sentinels, too", "sentinels: [s-1"),
        ("url: redis://h, sentinel_password: x", "sentinel_password", "needs sentinels", "sentinels: [s-1"),
        ("url: redis://h, sentinels: [s-1], service: x", "url", "has a host, but the sentinels find the server", "redis:///0"),
        ("url: unix:///a.sock, sentinels: [s-1], service: x", "url", "has a host", "redis:///0"),
        ('url: "redis:///0", sentinels: [redis://s-1], service: x', "sentinels.0", "is no host:port", "s-1:26379"),
        ('url: "redis:///0", sentinels: ["s-1:x"], service: x', "sentinels.0", "is no host:port", "s-1:26379"),
        ("url: redis://app@h, user: app", "user", "is in the url, too", "take it out of the url"),
        ("url: redis://app:x@h, password: y", "password", "is in the url, too", "take it out of the url"),
        ('url: "redis://h?password=x", password: y', "password", "is in the url, too", "take it out of the url"),
        (f"url: 'rediss://h?ssl_ca_certs=/a', ca: {ELSEWHERE}", "ca", "is in the url, too", "take it out"),
        (f"url: redis://h, ca: {ELSEWHERE}", "ca", "needs TLS, and the url doesn't begin with rediss:", "rediss://"),
        (f"url: redis://h, {PAIR}", "certificate", "needs TLS, and the url doesn't begin with rediss:", "rediss://"),
        ("url: rediss://h, ca: /no/ca.pem", "ca", "is not an existing file", "PEM"),
        (f"url: rediss://h, key: {ELSEWHERE}", "c0", "certificate and key go together", "both"),
        ("url: 'redis://h:1,i:2'", "url", "names several hosts", "cluster: true"),
        ("url: redis://h, cluster: true, spare: 3", "spare", "isn't for a cluster", "take it out"),
        ("url: redis://h, cluster: true, shared: true", "shared", "isn't for a cluster", "take it out"),
        ("url: redis://h/1, cluster: true", "url", "a cluster has one database", "redis://host"),
        ("url: redis://h, tables: [{table: public.items, ttl: 1 month}]", "0.ttl", "a month has no fixed", "30 days"),
        ("url: redis://h, tables: [{table: public.items, ttl: 0 days}]", "0.ttl", "rows that expire at once", "1 day"),
        ("url: redis://h, tables: [{table: 'public.*', ttl: 1 day}]", "tables.0", "ttl is a single table's", "ttl: "),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_its_setting(
    tmp_path: Path, text: str, place: str, message: str, hint: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        load(tmp_path, text)
    assert f"{place}: {message}" in caught.value.message
    assert hint in caught.value.hint


def test_the_url_of_the_client_has_what_the_file_says(tmp_path: Path) -> None:
    login = 'user: "a:b", password: "p@ss/w%rd", sentinel_password: "x&y@z"'
    url = cache(tmp_path, f"{BEHIND}, {login}, ca: {ELSEWHERE}, {PAIR}").connection_url
    parts = urlsplit(url)
    assert (parts.scheme, parts.path) == ("rediss", "/3")
    assert parts.netloc == "a%3Ab:p%40ss%2Fw%25rd@s-1,s-2:26380"
    assert parse_qs(parts.query) == {
        **{f"ssl_{name}": [str(ELSEWHERE)] for name in ("ca_certs", "certfile", "keyfile")},
        "service": ["shop"],
        "sentinel_password": ["x&y@z"],
    }
    assert address(url) == "rediss://s-1,s-2:26380/3"


@pytest.mark.parametrize(
    "url", ["redis://h", "rediss://app:p%40@h:1/2?ssl_ca_certs=%2Fa", "unix://app:x@/a.sock?db=2"]
)
def test_a_url_alone_stays_as_it_is(tmp_path: Path, url: str) -> None:
    assert cache(tmp_path, f'url: "{url}"').connection_url == url


def test_nodes_of_a_cluster(tmp_path: Path) -> None:
    sink = cache(tmp_path, "url: 'rediss://h:1,i', cluster: true, user: app, password: x")
    assert sink.connection_url == "rediss://app:x@h:1,i?cluster=true"
    assert sink.territory == {("redis", "h", 1, "", "shop"), ("redis", "i", 6379, "", "shop")}


def test_a_state_on_a_cluster_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "shop.yaml"
    state = "\nstate: {type: redis, prefix: s, url: redis://h, cluster: true}\n"
    path.write_text(
        FILE.replace("  cache:", "  c: {type: redis, prefix: p, url: redis://i}") + state
    )
    with pytest.raises(SettingsError, match="the state can't be on a cluster"):
        settings.load(path, {})


def test_a_login_beside_a_url(tmp_path: Path) -> None:
    assert cache(tmp_path, "url: redis://app@h, password: x").connection_url == "redis://app:x@h"
    socket = cache(tmp_path, "url: 'unix:///a.sock?db=2', user: app, password: x")
    assert socket.connection_url == "unix://app:x@/a.sock?db=2"


@pytest.mark.parametrize(
    ("text", "is_same"),
    [
        ('url: "redis:///3", sentinels: ["s-2:26380", "s-1:26379"], service: shop, user: x', True),
        ('url: "redis:///0?db=3", sentinels: [s-1, "s-2:26380"], service: shop', True),
        ('url: "redis:///3", sentinels: [s-1, "s-2:26380"], service: other', False),
        ('url: "redis:///4", sentinels: [s-1, "s-2:26380"], service: shop', False),
        ('url: "redis:///3", sentinels: [t-1, "t-2:26380"], service: shop', False),
        ("url: redis://s-1:26379/3", False),
    ],
)
def test_two_caches_behind_sentinels_on_one_place(tmp_path: Path, text: str, is_same: bool) -> None:
    if not is_same:
        assert len(load(tmp_path, BEHIND, text).sinks) == 2
        return
    with pytest.raises(SettingsError, match="c0 and c1 are on one place"):
        load(tmp_path, BEHIND, text)


@pytest.mark.parametrize(
    ("sentinels", "number", "is_disjoint"),
    [(["s-1"], 4, False), (["s-3", "s-2:26380"], 3, False), (["s-1"], 5, True), (["t-1"], 3, True)],
)
def test_whoever_shares_a_sentinel_shares_a_territory(
    tmp_path: Path, sentinels: list[str], number: int, is_disjoint: bool
) -> None:
    """A state may not lie where the cache makes its next generation."""
    given: dict[str, Any] = {"type": "redis", "prefix": "state", "service": "shop"}
    state = Redis.model_validate({**given, "url": f"redis:///{number}", "sentinels": sentinels})
    assert state.territory.isdisjoint(cache(tmp_path, BEHIND).territory) is is_disjoint


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("ERR ACL failure in script: User cdc has no permissions to run the 'mset' command", "MSET"),
        ("The user executing the script can't run this command or subcommand script: 0b82", "a command"),
        ("The user executing the script can't access at least one of the keys", "these keys"),
    ],
)  # fmt: skip
def test_a_right_that_a_script_lacks_is_named_as_far_as_the_server_says(
    text: str, right: str
) -> None:
    """Recorded from Valkey 9.1 and from Redis 7.0, which the suites don't start."""
    kind, message = failure(redis.exceptions.ResponseError(text), "redis://h/0", "cache")
    assert kind == "forbidden"
    assert f"doesn't let its user use {right}, for cache" in message


@pytest.mark.parametrize(
    "text",
    [
        "MOVED 12182 10.0.0.7:6379",
        "CROSSSLOT Keys in request don't hash to the same slot",
        "ERR SELECT is not allowed in cluster mode",
    ],
)
def test_a_node_of_a_cluster_is_refused_by_name(text: str) -> None:
    """As Valkey 9.1 answers, and to SELECT Redis 7."""
    kind, message = failure(redis.exceptions.ResponseError(text), "redis://h/0", "cache")
    assert kind == "clustered"
    assert message == (
        "The server at redis://h/0 is a node of a cluster, where keys of cache are spread over nodes."
    )


def test_the_documented_rights_are_those_of_the_suites() -> None:
    page = Path("docs/start/own-kafka-and-connect.md").read_text()
    text = " ".join(page.split())
    for commands in (COMMANDS, CLUSTER_COMMANDS.removeprefix(COMMANDS)):
        rights = " ".join(f"+{command}" for command in commands.split())
        assert rights in text
