"""What fails under a running pipeline, and isn't the pipeline's fault."""

from typing import TYPE_CHECKING

import psutil
import pytest

from cdc.supervise import published
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from tests.scenarios.conftest import World

pytestmark = pytest.mark.timeout(900)
ROWS = 30_000


def workers() -> list[psutil.Process]:
    """Spark's Python workers under this process: the children of their daemon."""
    below = psutil.Process().children(recursive=True)
    daemons = [one for one in below if _is_worker(one)]
    return [child for daemon in daemons for child in daemon.children()]


def _is_worker(process: psutil.Process) -> bool:
    try:
        return "cdc.daemon" in process.cmdline()
    except psutil.Error:
        return False


def kill_workers() -> None:
    for worker in workers():
        try:
            worker.kill()
        except psutil.NoSuchProcess:
            continue


def test_a_python_worker_that_is_killed_in_mid_batch_is_waited_for(world: "World") -> None:
    world.write_file("public.items")
    world.sql("CREATE TABLE items (id int PRIMARY KEY, v int, note text)")
    world.cdc("migrate")
    world.cdc("register")
    told: set[str] = set()

    def lost() -> bool:
        """Workers are killed whenever there are any, until a stream has told of it."""
        kill_workers()
        told.update(one.error for one in published(world.folder / "runs").values() if one.error)
        return any("worker" in error for error in told)

    world.sql(f"INSERT INTO items SELECT n, 0, repeat('x', 50) FROM generate_series(1, {ROWS}) n")
    with world.running():
        wait_until((world.folder / "runs").exists, 60, "the streams to be at work")
        wait_until(lost, 120, lambda: f"a stream to lose a worker: {told}")
        world.settle()
    assert {one.state for one in published(world.folder / "runs").values()} == {"stopped"}
    world.assert_equal()
