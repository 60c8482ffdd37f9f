"""A cache behind Sentinels: a run goes on after a failover, and every row equals in the end."""

import json
import re
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
import redis

from cdc.apply.progress import RunState
from cdc.apply.stream import Environment, Stream
from cdc.config.settings import Pipeline
from cdc.control.registrations import KEY, Captured, Registration
from cdc.errors import CdcError, SinkRejected, SinkUnavailable
from cdc.kafka.log_reader import Block, OffsetRange
from cdc.model.clock import Clock
from cdc.redis.server import COMMANDS, shell_command
from cdc.sink.contract import Sink
from cdc.sinks.redis.database import Database
from cdc.sinks.redis.scan import PAGE_ROWS
from cdc.sinks.redis.settings import Redis
from tests.support.cache import CacheServer, Guarded, cache, guarded
from tests.support.envelopes import PLACEHOLDER, Topic, encoded, table
from tests.support.pipelines import pipeline
from tests.support.proxy import Road
from tests.support.simulated import MemoryEnds, MemoryLog, in_process
from tests.support.wait import wait_until

ITEMS = table("shop.public.items")
PREFIX = "shop"
ROWS = 6000
BLOCK = 500
"""Records that the log hands over at once: many blocks are a batch."""
USER = "cdc"
PASSWORD = "let me:in@4711"
RULES = ["on", f">{PASSWORD}", f"~{PREFIX}:*", *(f"+{command}" for command in COMMANDS.split())]
SENTINELS_PASSWORD = "who-goes-there"


class ShopLog(MemoryLog):
    """A log that does something once, in the middle of a batch."""

    def __init__(self) -> None:
        super().__init__(Clock())
        self.topic = Topic(ITEMS)
        self.create(ITEMS.topic, self.topic.partitions)
        for name in SHOP_TOPICS:
            self.create(name)
        registration = Registration(tables={ITEMS.qualified: Captured()})
        self.write(SHOP.registered_topic, [(KEY, msgspec.json.encode(registration))])
        self._written = 0
        self._acts: list[Callable[[], object]] = []

    def in_mid_batch(self, act: Callable[[], object]) -> None:
        self._acts.append(act)

    def change(self, op: str, numbers: Sequence[int], value: str) -> None:
        for number in numbers:
            self.topic.add(op, {"a": "x", "b": number, "v": value, "n": number})
        for record in self.topic.records[self._written :]:
            key = encoded(record.key)
            self.append(ITEMS.topic, record.partition, key, encoded(record.value))
        self._written = len(self.topic.records)

    def read(self, kind: str, ranges: Sequence[OffsetRange]) -> Generator[Block]:
        for number, (topic, partition, records) in enumerate(super().read(kind, ranges)):
            for first in range(0, len(records), BLOCK):
                if self._acts and (number or first >= len(records) // 2):
                    self._acts.pop()()
                yield topic, partition, records[first : first + BLOCK]


SHOP: Pipeline = pipeline("shop", "postgresql://127.0.0.1:1/x", ITEMS.qualified)
SHOP_TOPICS = [
    SHOP.registered_topic,
    SHOP.quarantine_topic,
    SHOP.generations_topic,
    SHOP.settings_topic,
    *map(SHOP.topic, ("cdc.truncation", "cdc.ddl")),
]


class Run:
    """A stream at work in its own thread, as in `cdc run`."""

    def __init__(self, log: ShopLog, sink: Sink) -> None:
        self.log = log
        environment = Environment(log, MemoryEnds(log), in_process(log), Clock())
        self.stream = Stream(
            environment, sink, SHOP, lambda *_: ([ITEMS], {}), PLACEHOLDER, trigger_s=0.05
        )
        self._failure: list[CdcError] = []
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            self.stream.run()
        except CdcError as error:
            self._failure.append(error)

    def wait_until_applied(self) -> None:
        ends = self.log.topic.ends

        def is_applied() -> bool:
            assert self._failure == []
            try:
                checkpoint = self.stream.sink.position(ITEMS)
            except SinkUnavailable:
                return False
            return checkpoint is not None and checkpoint.position.offsets == ends

        wait_until(is_applied, 60, "the run to apply everything")

    def end(self) -> None:
        self.stream.stop()
        self._thread.join(30)
        assert self._failure == []
        assert self.stream.progress.state is RunState.STOPPED


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Guarded]:
    with guarded(tmp_path, "--user", USER, *RULES, sentinel_password=SENTINELS_PASSWORD) as both:
        yield both


def settings(servers: Guarded, **changes: Any) -> Redis:
    given = {
        "type": "redis",
        "url": "redis:///0",
        "sentinels": servers.sentinels,
        "service": servers.service,
        "sentinel_password": SENTINELS_PASSWORD,
        "user": USER,
        "password": PASSWORD,
        "prefix": PREFIX,
    }
    return Redis.model_validate({**given, **changes})


def rows(server: CacheServer) -> dict[str, Any]:
    """All rows of a server, by id."""
    begin = f"{PREFIX}:{ITEMS.qualified}:"
    with redis.Redis.from_url(server.url, decode_responses=True) as client:
        keys = list(client.scan_iter(f"{begin}*", count=1000))
        values = client.mget(keys)
    # A key may have been deleted since.
    return {
        key.removeprefix(begin): json.loads(text)
        for key, text in zip(keys, values, strict=True)
        if text is not None
    }


def fail_over(servers: Guarded) -> None:
    servers.primary.kill()


def switch(servers: Guarded) -> None:
    servers.switch()
    wait_until(servers.has_switched, 30, "the Sentinels to switch")


@pytest.mark.parametrize("change_over", [fail_over, switch])
def test_a_run_goes_on_after_a_failover_in_mid_batch(
    servers: Guarded, change_over: Callable[[Guarded], None]
) -> None:
    log = ShopLog()
    log.change("c", range(ROWS), "first")
    reader = settings(servers).build("cache", "shop")
    assert reader.position(ITEMS) is None
    log.in_mid_batch(lambda: change_over(servers))
    run = Run(log, settings(servers).build("cache", "shop"))
    run.wait_until_applied()
    assert servers.has_switched()
    log.change("u", range(0, ROWS, 7), "second")
    log.change("d", range(0, ROWS, 11), "")
    # After a switch without a failure the former primary takes writes for some seconds more, from
    # who has a connection to it. They are lost when it becomes a replica.
    wait_until(
        lambda: rows(servers.replica) == log.topic.model(), 60, "the new primary to have every row"
    )
    run.end()
    # A reader's connection of before leads to the new primary, too.
    checkpoint = reader.position(ITEMS)
    assert checkpoint is not None
    assert checkpoint.position.offsets == log.topic.ends
    reader.close()


def test_what_the_new_primary_lacks_is_applied_again(servers: Guarded) -> None:
    """Nothing of this run has got to the replica, not even that it is the writer now."""
    log = ShopLog()
    log.change("c", range(ROWS), "first")
    former = Run(log, settings(servers).build("cache", "shop"))
    former.wait_until_applied()
    former.end()
    wait_until(lambda: rows(servers.replica) == log.topic.model(), 30, "the replica to have all")
    log.change("u", range(0, ROWS, 3), "second")
    servers.replica.stand_still(still=True)
    with redis.Redis.from_url(servers.primary.url) as server:
        # What is on its way doesn't come, either.
        server.execute_command("CLIENT", "KILL", "TYPE", "replica")
    run = Run(log, settings(servers).build("cache", "shop"))
    run.wait_until_applied()
    servers.primary.kill()
    servers.replica.stand_still(still=False)
    log.change("d", range(0, ROWS, 5), "")
    run.wait_until_applied()
    run.end()
    assert rows(servers.replica) == log.topic.model()


def test_a_scan_that_another_server_goes_on_with_is_refused(tmp_path: Path) -> None:
    """A cursor means nothing there: keys would be skipped, and the rows left that a TRUNCATE removes."""
    with cache(tmp_path / "a") as first, cache(tmp_path / "b") as second:
        for url in (first, second):
            with redis.Redis.from_url(url) as server:
                server.mset({f"{PREFIX}:{number}": "" for number in range(3 * PAGE_ROWS)})
        road = Road(urlsplit(first).port or 0)
        database = Database("cache", f"redis://127.0.0.1:{road.port}/0", PREFIX)
        pages = database.own_keys()
        next(pages)
        road.target = urlsplit(second).port or 0
        with redis.Redis.from_url(first) as server:
            server.client_kill_filter(_type="normal", skipme=True)
        # Now and then the client sends its request before it sees that the connection has ended.
        with pytest.raises(SinkUnavailable, match=r"another server|closes the connection"):
            list(pages)
        road.close()


def refused(sink: Sink) -> CdcError:
    with pytest.raises(CdcError) as caught:
        sink.position(ITEMS)
    sink.close()
    error = caught.value
    for secret in (PASSWORD, SENTINELS_PASSWORD):
        assert secret not in f"{error.message} {error.hint} {error.details}"
    return error


@pytest.mark.parametrize(
    ("changes", "kind", "message", "hint"),
    [
        ({"sentinels": ["127.0.0.1:1"]}, SinkUnavailable, "Sentinels at .* can't be reached: nothing listens", "up?"),
        ({"service": "other"}, SinkRejected, "know no service other, but shop", "`service`"),
        ({"sentinel_password": "wrong"}, SinkRejected, "Sentinels at .* refuse the password", "`sentinel_password`"),
        ({"sentinel_password": None}, SinkRejected, "Sentinels at .* refuse the password", "`sentinel_password`"),
        ({"password": "wrong"}, SinkRejected, "refuses the user or password", "`password`"),
        ({"user": "nobody"}, SinkRejected, "refuses the user or password", "`user`"),
    ],
)  # fmt: skip
def test_each_mistake_is_named(
    servers: Guarded, changes: dict[str, Any], kind: type[CdcError], message: str, hint: str
) -> None:
    error = refused(settings(servers, **changes).build("cache", "shop"))
    assert type(error) is kind
    assert re.search(message, error.message)
    assert hint in error.hint


def test_a_server_in_a_sentinels_place_is_named(servers: Guarded, tmp_path: Path) -> None:
    with cache(tmp_path / "stranger") as url:
        sentinels = [url.removeprefix("redis://").removesuffix("/0")]
        changes = {"sentinels": sentinels, "sentinel_password": None}
        error = refused(settings(servers, **changes).build("cache", "shop"))
    assert "is no Sentinel" in error.message
    assert "host and port" in error.hint


def test_one_sentinel_that_answers_is_enough(servers: Guarded) -> None:
    sentinels = ["127.0.0.1:1", servers.sentinels[0]]
    sink = settings(servers, sentinels=sentinels).build("cache", "shop")
    assert sink.position(ITEMS) is None
    sink.close()


def test_without_a_primary_it_is_waited_for(servers: Guarded) -> None:
    sink = settings(servers).build("cache", "shop")
    servers.replica.kill()
    servers.primary.kill()
    wait_until(lambda: servers.ask()["is_odown"], 30, "the Sentinels to agree")
    error = refused(sink)
    assert type(error) is SinkUnavailable
    assert "know of no primary of shop that is up" in error.message


def test_commands_for_people_go_to_the_primary(servers: Guarded) -> None:
    url = settings(servers).connection_url
    sink = settings(servers).build("cache", "shop")
    words = "redis-cli -h 127.0.0.1 -p {} --user cdc --askpass"
    sink.position(ITEMS)
    assert shell_command(url) == words.format(servers.primary.port)
    fail_over(servers)

    def is_followed() -> bool:
        with suppress(SinkUnavailable):
            return sink.position(ITEMS) is None
        return False

    wait_until(is_followed, 30, "the sink to follow")
    assert shell_command(url) == words.format(servers.replica.port)
    sink.close()
