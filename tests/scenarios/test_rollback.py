"""The generation before: as right as the one that readers see, whatever happens to who keeps it."""

import random
import signal
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from cdc.generations import Builds
from cdc.topics import Topics
from tests.scenarios.test_rebuild import SINKS, begin
from tests.support import writer
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from tests.scenarios.conftest import World

pytestmark = pytest.mark.timeout(600)


def test_what_is_kept_outlives_crashes(world: "World") -> None:
    """`cdc run` is killed again and again, in whatever batch; both generations of each view equal the source."""
    begin(world)
    with world.running():
        world.settle()
        with writer.writing(world.dsn, 200.0):
            # Two a second time, while the first one's way back is kept: a newer one takes its place.
            for name in (*SINKS, "search", "warehouse"):
                world.rebuild(name)
    chance = random.Random(3)
    with writer.writing(world.dsn, 200.0):
        for _ in range(2):
            with world.process() as killed:
                world.wait_for("cache", world.offsets("cache") + chance.randint(200, 600))
                killed.send_signal(signal.SIGKILL)
                killed.wait()
    with world.running():
        world.settle()
        for _ in range(2):
            world.assert_equal()
            for name in SINKS:
                assert world.rollback(name) < 5
        (table,) = world.described
        with Topics(world.pipeline.kafka) as kafka:
            builds = Builds(world.pipeline, kafka).read()
            assert {*builds.found} == {*SINKS}
            for found in builds.found.values():
                builds.write(replace(found, keep_until=time.time() + 1))
            wait_until(lambda: not builds.read().found, 60, "what has been kept long enough to be forgotten")
        wait_until(
            lambda: all(len(sink.generations(table)) == 1 for sink in world.sinks), 60, "what was kept to be removed"
        )
        world.assert_equal()
