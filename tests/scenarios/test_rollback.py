"""The generation before: as right as the one that readers see, whatever happens to who keeps it."""

import random
import signal
import statistics
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from cdc.errors import SparkError
from cdc.generations.registry import Registry
from cdc.kafka.topics import Topics
from tests.scenarios.test_rebuild import SINKS, begin
from tests.support import writer
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from tests.scenarios.conftest import World


def spark_of(pid: int) -> psutil.Process | None:
    children = psutil.Process(pid).children()
    return next((child for child in children if child.name() == "java"), None)


def runs(log: Path, start: int) -> bool:
    return b"cache running" in log.read_bytes()[start:]


def test_what_is_kept_outlives_crashes(world: "World") -> None:
    """`cdc run` is killed, then its Spark, in whatever batch; both generations of each view equal
    the source.
    """
    begin(world)
    with world.running():
        world.settle()
        for name in SINKS:
            world.rebuild(name)
    chance = random.Random(3)
    with writer.writing(world.dsn, 200.0):
        for group in (True, False):
            log = world.folder / "run.log"
            length = log.stat().st_size if log.exists() else 0
            with world.process() as run:
                # What was killed may have left a task that still moves the position, for a while:
                # this run itself must have begun.
                wait_until(partial(runs, log, length), 60, "the cache's stream to run")
                world.wait_for("cache", world.offsets("cache") + chance.randint(200, 600))
                spark = spark_of(run.pid)
                assert spark
                (run if group else spark).send_signal(signal.SIGKILL)
                assert run.wait(300) == (-signal.SIGKILL if group else SparkError.exit_code)
        assert "Spark's process was ended" in " ".join(
            (world.folder / "run.log").read_text().split()
        )
    with world.running():
        world.settle()
        took_s = []
        for _ in range(2):
            world.assert_equal()
            took_s += [world.rollback(name) for name in SINKS]
        assert statistics.median(took_s) < 15, took_s
        (table,) = world.described
        with Topics(world.pipeline.kafka) as kafka:
            registry = Registry(world.pipeline, kafka).read()
            for name in SINKS:
                retained = registry.for_sink(name).retained[table.qualified]
                expired = replace(retained, until=time.time() + 1)
                registry.write((("kept", name, table.qualified), asdict(expired)))
            wait_until(
                lambda: not any(registry.read().for_sink(name).retained for name in SINKS),
                60,
                "what has been kept long enough to be forgotten",
            )
        wait_until(
            lambda: all(len(sink.generations(table)) == 1 for sink in world.sinks),
            60,
            "what was kept to be removed",
        )
        world.assert_equal()
