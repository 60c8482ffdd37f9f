"""`cdc chaos` on real servers: equal after faults, a planted difference is found, a signal leaves no fault behind."""

import json
import os
import re
import signal
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import redis

from cdc.connectors.client import Connect
from tests.support import http, writer
from tests.support.verbs import run_with_spark
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from tests.scenarios.conftest import World

FIRED = ("slot connection", "connector pause", "write block", "writes pause", "clients kill", "run")
RATE = 20.0
STANDING = 1
"""A row that nobody changes any more."""


def begin(world: "World") -> None:
    world.sql(writer.TABLE, writer.FILL)
    world.begin("public.busy", sinks=("search", "cache"))
    world.file.write_text(f"staging: true\n{world.file.read_text()}")


def interrupted(
    world: "World", fault: str, is_broken: "Callable[[], bool]", number: signal.Signals
) -> int:
    """Have a signal end the verb while a fault is at work; return its exit code."""

    def end() -> None:
        wait_until(is_broken, 120, f"{fault} to begin", 0.05)
        os.kill(os.getpid(), number)

    ending = threading.Thread(target=end)
    ending.start()
    try:
        return run_with_spark(world.words("chaos", "--only", fault)).returncode
    finally:
        ending.join()


def test_a_staging_pipeline_is_broken_and_right_again(world: "World") -> None:
    begin(world)
    index = f"{world.stack.endpoints.elasticsearch}/{world.name}-public.busy"

    def is_blocked() -> bool:
        return "blocks" in http.get(f"{index}/_settings?flat_settings=false").text

    def is_paused() -> bool:
        with Connect(world.stack.endpoints.connect) as connect:
            return connect.state(world.name).connector == "PAUSED"

    with world.process():
        world.settle()
        only = [word for name in FIRED for word in ("--only", name)]
        with writer.writing(world.dsn, RATE):
            lines = world.cdc("chaos", "--minutes", "0", "--seed", "7", *only).stdout.splitlines()
            assert interrupted(world, "write block", is_blocked, signal.SIGTERM) == 130
            assert not is_blocked()
            assert interrupted(world, "connector pause", is_paused, signal.SIGHUP) == 130
            wait_until(lambda: not is_paused(), 60, "the connector to be resumed")
    pattern = r"chaos: equal · seed 7 · 7 faults of 7 kinds · \d+ s"
    assert re.fullmatch(pattern, lines[-1]), lines
    assert max(map(len, lines)) <= 80
    assert not any("skipped" in line for line in lines), lines


def test_a_row_that_was_edited_behind_the_pipelines_back_is_found(world: "World") -> None:
    begin(world)
    with world.running(), writer.writing(world.dsn, RATE):
        world.settle()
        with redis.Redis.from_url(world.cache) as cache:
            cache.set(f"{world.name}:public.busy:{STANDING}", json.dumps({"id": STANDING}))
        ended = world.cdc("chaos", "--minutes", "0", "--only", "restart", code=8)
    verdict = ended.stdout.splitlines()[-1]
    assert verdict.startswith("chaos: NOT EQUAL: 1 of 2 views differ"), ended.stdout
