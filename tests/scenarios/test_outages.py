"""The hops of one running pipeline fail, one after another or two at once: everybody who tells of it
says the same.

`cdc status`, the figures of `cdc run` and `cdc serve`, the page, its API and a webhook name the hops and
the codes within 10 s, and blame no other hop; afterwards all of them say that all is well. A sink that is
away holds up no other, and catches up alone.
"""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cdc.cli.health import check_health
from cdc.redis.server import client as redis_client
from cdc.runtime.context import Context
from tests.support import http
from tests.support.budget import SCALE
from tests.support.receiver import Receiver
from tests.support.verbs import run_verb
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from tests.scenarios.conftest import World

AGREE_S = 10.0
ANSWER_S = 3.0
"""Seconds for an answer: less than a look at a server that hangs takes."""
TOKEN = "correct-horse-battery-staple"
POLL_S = 0.3
ROWS = 200
IDLE_S = 6.0 if SCALE == 1 else 18.0 * SCALE
pytestmark = pytest.mark.timeout(900 + IDLE_S)
Trouble = tuple[str, str]
"""A hop and a code."""


@dataclass(frozen=True)
class Outage:
    """A hop that fails, and what everybody has to say of it. `writes`: whether rows can still be written at the
    source.
    """

    trouble: Trouble
    begin: Callable[["World"], AbstractContextManager[None]]
    writes: bool = True


@contextmanager
def paused_connector(world: "World") -> Iterator[None]:
    """Somebody pauses the connector; what `cdc status` says is typed to mend it."""
    connector = f"{world.stack.endpoints.connect}/connectors/{world.name}"
    http.ask_connect("PUT", f"{connector}/pause")
    try:
        yield
        (fix,) = {
            finding["fix"]
            for finding in status_of(world)["findings"]
            if finding["code"] == "connector-stopped"
        }
        mended = run_verb(world.words(fix.split()[-1]))
        assert mended.returncode == 0, mended.stderr
    finally:
        http.ask_connect("PUT", f"{connector}/resume")


@contextmanager
def away_warehouse(world: "World") -> Iterator[None]:
    """A file stands where the folder was, as where a mount point is broken."""
    moved = world.warehouse.with_name("moved")
    world.warehouse.rename(moved)
    world.warehouse.write_text("")
    try:
        yield
    finally:
        world.warehouse.unlink()
        moved.rename(world.warehouse)


def frozen(server: str) -> Callable[["World"], AbstractContextManager[None]]:
    return lambda world: world.stack.servers.frozen(server)


CONNECTOR = Outage(("Postgres -> Kafka", "connector-stopped"), paused_connector)
POSTGRES = Outage(("Postgres", "source-unreachable"), frozen("postgres"), writes=False)
CONNECT = Outage(("Postgres -> Kafka", "connect-unreachable"), frozen("connect"))
KAFKA = Outage(("Kafka", "kafka-unreachable"), frozen("kafka"))
INDEX = Outage(("Kafka -> search", "sink-unreachable"), frozen("elasticsearch"))
CACHE = Outage(("Kafka -> cache", "sink-unreachable"), frozen("redis"))
WAREHOUSE = Outage(("Kafka -> warehouse", "sink-unreachable"), away_warehouse)
ROUNDS = ((CONNECTOR, CACHE), (POSTGRES,), (CONNECT,), (KAFKA,), (INDEX, WAREHOUSE))
"""Hops that fail at once, one group after another."""
SILENCE = {
    *("source-unreachable", "connect-unreachable", "kafka-unreachable", "sink-unreachable"),
    "heartbeat-late",
}
"""Codes of a server that gives no answer, or is slow."""


class Witnesses:
    """All that tell of a pipeline's troubles."""

    def __init__(self, world: "World", run: str, page: httpx.Client, receiver: Receiver) -> None:
        self.page, self.receiver = page, receiver
        self.sources: Mapping[str, Callable[[], set[Trouble]]] = {
            "status": lambda: _troubles(status_of(world)),
            "metrics of run": lambda: _troubles_of_metrics(http.get(run)),
            "metrics of serve": lambda: _troubles_of_metrics(page.get("/metrics")),
            "api": lambda: _troubles(page.get("/api/status").json()),
            "page": lambda: _troubles_of_page(page.get("/")),
            "webhook": lambda: self.notified,
        }

    @property
    def notified(self) -> set[Trouble]:
        """What was posted as opened, since the receiver was last emptied."""
        return {
            (body["hop"], body["code"])
            for body in self.receiver.bodies
            if body["event"] == "opened"
        }

    @property
    def unclosed(self) -> set[Trouble]:
        """Troubles whose last post says that they are open."""
        last = {
            (body["hop"], body["code"], body["subject"]): body["event"]
            for body in self.receiver.bodies
            if body["severity"] in ("down", "degraded")
        }
        return {(hop, code) for (hop, code, _), event in last.items() if event == "opened"}


def status_of(world: "World") -> dict[str, Any]:
    return dict(json.loads(run_verb(world.words("status", "--json")).stdout))


def _troubles(status: dict[str, Any]) -> set[Trouble]:
    return {
        (finding["hop"], finding["code"])
        for finding in status["findings"]
        if finding["severity"] in ("down", "degraded")
    }


def _troubles_of_metrics(answer: httpx.Response) -> set[Trouble]:
    return {
        (sample.labels["hop"], sample.labels["code"])
        for family in text_string_to_metric_families(answer.raise_for_status().text)
        for sample in family.samples
        if sample.name == "cdc_findings" and sample.labels["severity"] in ("down", "degraded")
    }


def _troubles_of_page(answer: httpx.Response) -> set[Trouble]:
    text = answer.raise_for_status().text
    places = re.findall(r'class="meta">([^<]+?) · <a [^>]*href="/runbooks/([a-z-]+)"', text)
    return {(hop.replace("-&gt;", "->"), code) for hop, code in places}


@contextmanager
def served(world: "World") -> Iterator[httpx.Client]:
    """`cdc serve` as a process; SIGTERM must end it cleanly."""
    log = world.folder / "serve.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            world.command("serve", "--port", "0"),
            stdout=out,
            stderr=out,
            env={**os.environ, "CDC_SERVE_TOKEN": TOKEN},
        )
    try:
        wait_until(lambda: "serving http" in log.read_text(), 60, log.read_text)
        url = log.read_text().partition("serving ")[2].partition("/,")[0]
        headers = {"authorization": f"Bearer {TOKEN}"}
        with httpx.Client(base_url=url, headers=headers, timeout=http.TIMEOUT_S) as client:
            yield client
        process.send_signal(signal.SIGTERM)
        process.wait(120)
    finally:
        process.kill()
        process.wait()
    text = log.read_text()
    assert (process.returncode, "Traceback" in text, TOKEN in text) == (0, False, False), text


def assert_answers_at_once(client: httpx.Client) -> None:
    """Whatever hangs: the quickest of three answers, for a busy machine makes one of them late."""
    took_s = []
    for _ in range(3):
        began = time.monotonic()
        client.get("/api/status")
        took_s.append(time.monotonic() - began)
    assert min(took_s) < ANSWER_S, took_s


@contextmanager
def observed(world: "World") -> Iterator[Witnesses]:
    """Run the pipeline and its page, and a receiver of what both tell."""
    receiver = Receiver()
    with world.file.open("a") as file:
        file.write(f"notify: [{{url: {receiver.url!r}, after_s: 0}}]\n")
    log = world.folder / "run.log"
    try:
        with (
            world.process("--metrics", "0", "--metrics-address", "localhost"),
            served(world) as page,
        ):
            wait_until(lambda: "/metrics," in log.read_text(), 90, log.read_text)
            (address,) = re.findall(r"http://localhost:\d+/metrics", log.read_text())
            yield Witnesses(world, address, page, receiver)
    finally:
        receiver.close()


def wait_for_all(
    witnesses: Witnesses, says: Callable[[str, set[Trouble]], bool], limit_s: float
) -> dict[str, float]:
    """Ask each until it says what it has to: the seconds that each took."""

    def wait_for(name: str) -> float:
        began, last = time.monotonic(), set[Trouble]()

        def has_said() -> bool:
            nonlocal last
            last = witnesses.sources[name]()
            return says(name, last)

        wait_until(has_said, limit_s, lambda: f"{name} to tell it: {last}", POLL_S, patience=1)
        return round(time.monotonic() - began, 1)

    with ThreadPoolExecutor(len(witnesses.sources)) as pool:
        waiting = {name: pool.submit(wait_for, name) for name in witnesses.sources}
    return {name: wait.result() for name, wait in waiting.items()}


def assert_agreed(outages: Sequence[Outage], witnesses: Witnesses, limit_s: float) -> None:
    """All name the troubles within the limit, and blame no other hop. The webhook alone may have
    more: what passes is posted, too.
    """
    troubles = {outage.trouble for outage in outages}
    hops = {hop for hop, _ in troubles}

    def names_them(name: str, named: set[Trouble]) -> bool:
        blames_others = name != "webhook" and {hop for hop, _ in named} - hops
        return troubles <= named and not blames_others

    took_s = wait_for_all(witnesses, names_them, limit_s)
    assert_answers_at_once(witnesses.page)
    print(f"{sorted(troubles)}: {took_s}")


def wait_until_over(world: "World", witnesses: Witnesses) -> float:
    """Nobody names a trouble, all that was posted is closed, and no view is behind; the seconds of
    a look at what is well.
    """
    look_s = 0.0

    def is_well() -> bool:
        nonlocal look_s
        began = time.monotonic()
        status = status_of(world)
        look_s = time.monotonic() - began
        lags = {view["lag_seconds"] for sink in status["sinks"] for view in sink["views"]}
        return not _troubles(status) and lags == {0.0}

    for name, ask in witnesses.sources.items():
        # The status is a process each time: asked last, when the others say that it is worth it.
        if name not in ("webhook", "status"):
            wait_until(lambda ask=ask: not ask(), 60, f"{name} to say that it is over", POLL_S)  # type: ignore[misc]
    wait_until(
        lambda: not witnesses.unclosed, 60, lambda: f"to close: {witnesses.unclosed}", POLL_S
    )
    wait_until(is_well, 60, "the status to be well")
    return look_s


def test_everybody_says_which_hop_is_away_and_when_it_is_back(world: "World") -> None:
    world.sql("CREATE TABLE items (id int PRIMARY KEY, n int)", "INSERT INTO items VALUES (0, 0)")
    world.begin("public.items")
    with observed(world) as witnesses:
        world.settle()
        look_s = wait_until_over(world, witnesses)
        assert "Nothing is in quarantine." in witnesses.page.get("/quarantine").text
        generations = witnesses.page.get("/api/generations").json()
        assert [len(generations[name]) for name in ("live", "kept", "builds")] == [3, 0, 0]
        for number, outages in enumerate(ROUNDS, 1):
            witnesses.receiver.bodies.clear()
            with ExitStack() as stack:
                for outage in outages:
                    stack.enter_context(outage.begin(world))
                cached = world.offsets("cache") if INDEX in outages else 0
                if all(outage.writes for outage in outages):
                    rows = f"SELECT {number}000 + n, 0 FROM generate_series(1, {ROWS}) n"
                    world.sql(f"INSERT INTO items {rows}")
                # A look may have begun before, and whoever asks takes time as well: on a busy
                # machine much of it.
                assert_agreed(outages, witnesses, AGREE_S + 6 * look_s)
                if INDEX in outages:
                    world.wait_for("cache", cached + ROWS)
            look_s = max(look_s, wait_until_over(world, witnesses))
            world.settle()
        assert_left_alone(world)
        world.settle()
        named = idle_troubles(witnesses)
        if named and {code for _, code in named} <= SILENCE:
            # On a busy machine a server that is well may once give no answer in time.
            wait_until_over(world, witnesses)
            named = idle_troubles(witnesses)
        assert named == set()
    world.assert_equal()


def idle_troubles(witnesses: Witnesses) -> set[Trouble]:
    """What anybody tells of while nothing happens but heartbeats: 40 s of them in 6 s, for they
    come every 0.3 s here and every 2 s by default; 40 minutes of them in `make properties`.
    """
    witnesses.receiver.bodies.clear()
    end, named = time.monotonic() + IDLE_S, set[Trouble]()

    def is_over() -> bool:
        for name, ask in witnesses.sources.items():
            # The status is a process each time, of which the API has the same look.
            if name != "status":
                named.update(ask())
        return bool(named) or time.monotonic() > end

    wait_until(is_over, IDLE_S + 60, "the idle time to be over", POLL_S)
    return named


def assert_left_alone(world: "World") -> None:
    """A look at the pipeline leaves a connection alone that a stream of the same process uses."""
    pool = redis_client(world.cache).connection_pool
    connection = pool.get_connection()
    try:
        check_health(Context(world.file, world.folder))
        connection.send_command("PING")  # type: ignore[no-untyped-call]
        assert connection.read_response() == "PONG"
    finally:
        pool.release(connection)
