"""What fails under a running pipeline, and isn't the pipeline's fault."""

import time
from typing import TYPE_CHECKING

import psutil

from tests.support.wait import wait_until

if TYPE_CHECKING:
    from tests.scenarios.conftest import World

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
    """A pause between kills: a stream that has lost its workers five times without any progress is right to end."""

    def __init__(self) -> None:
        self._end = 0.0

    @property
    def over(self) -> bool:
        return time.monotonic() > self._end

    def begin(self) -> None:
        self._end = time.monotonic() + PAUSE_S


def test_a_python_worker_that_is_killed_in_mid_batch_is_waited_for(world: "World") -> None:
    world.sql("CREATE TABLE items (id int PRIMARY KEY, v int, note text)")
    world.begin("public.items")
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

    world.sql(f"INSERT INTO items SELECT n, 0, repeat('x', 50) FROM generate_series(1, {ROWS}) n")
    with world.running():
        wait_until(world.progress, 60, "the streams to be at work")
        wait_until(lost, 120, lambda: f"a stream to lose a worker: {errors}")
        world.settle()
    assert {state.state for state in world.progress().values()} == {"stopped"}
    world.assert_equal()
