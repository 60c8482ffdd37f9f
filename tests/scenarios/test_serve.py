"""The page of a real pipeline: each hop is shown, and a server that is away."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import httpx

from tests.support import http
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from tests.scenarios.conftest import World

ANSWER_S = 3.0
"""Seconds for an answer: less than a look at a server that hangs takes."""
TOKEN = "correct-horse-battery-staple"


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


def status(client: httpx.Client) -> Any:
    answer = client.get("/api/status")
    return answer.json() if answer.status_code == 200 else None


def assert_answers_at_once(client: httpx.Client) -> None:
    """Whatever hangs: the quickest of three answers, for a busy machine makes one of them late."""
    took_s = []
    for _ in range(3):
        began = time.monotonic()
        client.get("/api/status")
        took_s.append(time.monotonic() - began)
    assert min(took_s) < ANSWER_S, took_s


def lags(client: httpx.Client) -> list[float | None]:
    """The lag of each view, in seconds; `settle` may have ended after the last look."""
    return [view["lag_seconds"] for sink in status(client)["sinks"] for view in sink["views"]]


def shows(client: httpx.Client, path: str, text: str) -> bool:
    return text in client.get(path).text


def test_the_page_of_a_real_pipeline(world: "World") -> None:
    world.write_file("public.items")
    world.sql("CREATE TABLE items (id int PRIMARY KEY, v int)", "INSERT INTO items VALUES (1, 1)")
    world.cdc("migrate")
    with served(world) as client:
        # Before anything is registered.
        wait_until(lambda: status(client), 60, "a first look")
        wait_until(lambda: shows(client, "/", "no replication slot"), 30, "the slot to be missed")
        world.cdc("register")
        with world.running():
            world.settle()
            wait_until(lambda: shows(client, "/", "is well"), 60, lambda: client.get("/").text)
            wait_until(lambda: lags(client) == [0, 0, 0], 30, lambda: str(lags(client)))
            assert shows(client, "/quarantine", "Nothing is in quarantine.")
            with world.stack.servers.frozen("elasticsearch"):
                wait_until(
                    lambda: (
                        shows(client, "/", "search, unknown")
                        or shows(client, "/", "lag could not be read")
                    ),
                    30,
                    lambda: client.get("/").text,
                )
                assert status(client)["verdict"] == "down"
                assert_answers_at_once(client)
            wait_until(lambda: shows(client, "/", "is well"), 60, lambda: client.get("/").text)
