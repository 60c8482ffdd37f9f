"""The generation before: as right as the one that readers see, whatever happens to who keeps it."""

import random
import signal
import time
from typing import TYPE_CHECKING

import pytest

from tests.support import writer

if TYPE_CHECKING:
    from tests.scenarios.conftest import World

pytestmark = pytest.mark.timeout(600)
SINKS = ("search", "cache", "warehouse")


def test_what_is_kept_outlives_crashes(world: "World") -> None:
    """`cdc run` is killed again and again, in whatever batch; both generations of each view equal the source."""
    world.write_file("{table: public.busy, partitions: 2}")
    world.sql(writer.TABLE, writer.FILL)
    world.cdc("migrate")
    world.cdc("register")
    with world.running():
        world.settle()
        for name in SINKS:
            world.rebuild(name)
    chance = random.Random(3)
    with writer.writing(world.dsn, 200.0):
        for _ in range(3):
            with world.process() as killed:
                before = world.offsets("cache")
                world.wait_for("cache", before + 200)
                time.sleep(chance.uniform(0, 2))
                killed.send_signal(signal.SIGKILL)
                killed.wait()
    with world.running():
        world.settle()
        for _ in range(2):
            world.assert_equal()
            for name in SINKS:
                assert world.rollback(name) < 5
