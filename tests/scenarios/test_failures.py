"""What fails under a running pipeline, and isn't the pipeline's fault."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TYPE_CHECKING, Any
from unittest import mock

import psutil
import pytest
import redis

from cdc.apply import supervisor
from cdc.apply.supervisor import AfterError, supervise
from cdc.cli.console import configure_logging
from cdc.observe.run_log import RunLog
from cdc.runtime.context import Context
from cdc.runtime.streams import Streams
from cdc.spark.session import is_running
from tests.support.pipelines import NOWHERE
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from tests.scenarios.conftest import World

SECRET = "hunter2"
ROWS = 30_000
PAUSE_S = 6.0
"""Seconds in which a stream that has lost a worker has gone on, and reported it."""


def workers() -> list[psutil.Process]:
    """Spark's Python workers under this process: the children of their daemon."""
    below = psutil.Process().children(recursive=True)
    daemons = [process for process in below if _is_worker(process)]
    return [child for daemon in daemons for child in daemon.children()]


def _is_worker(process: psutil.Process) -> bool:
    try:
        return "cdc.spark.python_worker" in process.cmdline()
    except psutil.Error:
        return False


def kill_workers() -> bool:
    """Whether there were any."""
    killed = False
    for worker in workers():
        try:
            worker.kill()
            killed = True
        except psutil.NoSuchProcess:
            continue
    return killed


class Pause:
    """A pause between kills: a stream that has lost its workers five times without any progress is
    right to end.
    """

    def __init__(self) -> None:
        self._end = 0.0

    @property
    def over(self) -> bool:
        return time.monotonic() > self._end

    def begin(self) -> None:
        self._end = time.monotonic() + PAUSE_S


def test_a_python_worker_that_is_killed_in_mid_batch_is_waited_for(world: "World") -> None:
    world.write_file("public.items")
    world.sql("CREATE TABLE items (id int PRIMARY KEY, v int, note text)")
    world.cdc("migrate")
    world.cdc("register")
    errors: set[str] = set()
    pause = Pause()

    def lost() -> bool:
        """Workers are killed as soon as there are any, and every few seconds until a stream has
        reported it: the killed ones may have had nothing to do.
        """
        if pause.over and kill_workers():
            pause.begin()
        progress = world.progress().values()
        errors.update(state.error for state in progress if state.error)
        # An error is reported until the stream goes on, which may be before the next look.
        return any(state.restarts.get("failure") for state in progress)

    world.sql("INSERT INTO items VALUES (0, 0, '')")
    with world.running(), closing(redis.Redis.from_url(world.cache)) as server:
        world.settle()
        # Until writes go on, a batch can't end, however quick the machine is.
        server.client_pause(600_000, all=False)
        try:
            world.sql(
                f"INSERT INTO items SELECT n, 0, repeat('x', 50) FROM generate_series(1, {ROWS}) n"
            )
            wait_until(lost, 120, lambda: f"a stream to lose a worker: {errors}")
        finally:
            server.client_unpause()
        world.settle()
    assert {state.state for state in world.progress().values()} == {"stopped"}
    world.assert_equal()
    assert_started_again(world)


def assert_started_again(world: "World") -> None:
    """Assert that a cache that refuses ends its stream, which goes on once the reason is gone,
    without anybody's help.
    """
    context, stopping = Context(world.file, world.folder), threading.Event()
    streams = Streams(context).of_sinks(world.spark, context.sinks(["cache"]))
    server = redis.Redis.from_url(world.cache)
    with (
        ThreadPoolExecutor(1) as pool,
        closing(RunLog(context.pipeline)) as run_log,
        mock.patch.object(supervisor, "FIRST_PAUSE_S", 3.0),
    ):
        server.config_set("maxmemory-policy", "allkeys-lru")
        work = pool.submit(
            supervise,
            streams,
            stopping,
            after_error=AfterError.RESTART,
            is_over=lambda: not is_running(world.spark),
            on_tick=run_log.publish,
        )
        try:
            wait_until(
                lambda: world.progress()["cache"].restart_at, 60, "the cache's stream to fail"
            )
            findings = world.json("status", code=7)["findings"]
            (finding,) = (entry for entry in findings if entry["code"] == "sink-failed")
            assert "starts again by itself" in finding["message"]
            assert "allkeys-lru" in finding["message"]
            server.config_set("maxmemory-policy", "noeviction")
            wait_until(lambda: streams[0].progress.state == "running", 60, "the stream to go on")
            world.sql(f"INSERT INTO items VALUES ({ROWS + 1}, 0, '')")
            world.wait_for("cache", ROWS + 2)
        finally:
            server.config_set("maxmemory-policy", "noeviction")
            server.close()
            stopping.set()
        assert work.result(300) == []
    assert streams[0].progress.restarts["error"] >= 1


def test_a_sink_that_is_away_is_reported_and_no_secret_with_it(
    world: "World", capfd: pytest.CaptureFixture[str]
) -> None:
    """The warehouse goes on; all that is printed, logged and written names neither password."""
    configure_logging()
    world.write_file("public.items")
    world.sql("CREATE TABLE items (id int PRIMARY KEY, v int)", "INSERT INTO items VALUES (1, 1)")
    world.cdc("migrate")
    world.cdc("register")
    urls = {
        "${CDC_ELASTICSEARCH}": f"http://elastic:{SECRET}@{NOWHERE}",
        world.cache: f"redis://app:{SECRET}@{NOWHERE}/2",
    }
    text = world.file.read_text()
    for url, broken in urls.items():
        text = text.replace(url, broken)
    world.file.write_text(text)
    context, stopping = Context(world.file, world.folder), threading.Event()
    streams = Streams(context).of_sinks(world.spark, context.sinks(None))

    def reported() -> dict[str, Any]:
        status = {sink["name"]: sink for sink in world.json("status")["sinks"]}
        states = {name: sink["state"] for name, sink in status.items()}
        expected = {"search": "waiting", "cache": "waiting", "warehouse": "running"}
        return status if states == expected else {}

    with ThreadPoolExecutor(1) as pool, closing(RunLog(context.pipeline)) as run_log:
        work = pool.submit(supervise, streams, stopping, on_tick=run_log.publish)
        try:
            world.wait_for("warehouse", 1)
            status = wait_until(reported, 30, "the state of each sink", 0.5)
        finally:
            stopping.set()
        assert work.result(300) == []
    assert all(status[name]["error"] and status[name]["hint"] for name in ("search", "cache"))
    printed = capfd.readouterr()
    assert "sink_waiting" in printed.err
    assert SECRET not in json.dumps(status) + printed.out + printed.err
    for path in world.folder.rglob("*"):
        if path.is_file() and path != world.file:
            assert SECRET.encode() not in path.read_bytes(), path
