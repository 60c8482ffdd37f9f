"""Views made again beside those that readers see: nobody notices, nothing wrong is shown, nothing is left over."""

import random
import signal
import statistics
import subprocess
import sys
import time
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import psutil
import pytest

from cdc.apply.stream import Environment
from cdc.errors import SparkError
from cdc.generations.registry import GenerationBuild, Registry
from cdc.kafka.topics import Topics
from cdc.model.generation import new_generation
from cdc.rebuild import build as rebuilding
from cdc.rebuild.build import keep_current, only_tables
from cdc.runtime.context import Context
from cdc.runtime.streams import Streams
from tests.support import http, readers, writer
from tests.support.bad_records import produce
from tests.support.budget import SCALE
from tests.support.load import load
from tests.support.shop import read_records
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from tests.scenarios.conftest import World

SINKS = ("search", "cache", "warehouse")
MAPPING = (
    "{analysis: {filter: {no_row: {type: stop, stopwords: [row]}},"
    " analyzer: {names: {tokenizer: standard, filter: [lowercase, no_row]}}},"
    " fields: {name: {analyzer: names}}}"
)
"""With it a search for `row` finds nothing."""
RATE = 300.0 if SCALE > 1 else 100.0
"""Changes a second while views are rebuilt."""
OLDEST_S = 6.0
"""The greatest age of a row that readers see meanwhile, in seconds: twice what it was on two cores.
Only `make properties` measures it, where nothing else is at work.
"""
BACK_S = 3.0
"""The longest rollback, there: twice what it was on two cores. In the warehouse it is mostly a wait for
the standby's next batch; the switch itself takes 0.05 s.
"""


def begin(world: "World", seed: str = writer.FILL) -> None:
    world.sql(writer.TABLE, seed)
    world.begin("{table: public.busy, partitions: 2}")


def pulse(world: "World") -> AbstractContextManager[None]:
    """Row 0 says when it was written."""
    world.sql(f"INSERT INTO busy VALUES (0, '{time.time()}', 0, now())")
    beat = "UPDATE busy SET name = %s WHERE id = 0"
    return load(
        world.dsn,
        lambda connection, _: connection.execute(beat, [str(time.time())]),
        readers.PULSE_S,
    )


def rebuilt(world: "World", name: str) -> dict[str, float]:
    """`cdc rebuild`; the seconds that each phase took."""
    began: dict[str, float] = {}

    def show(build: GenerationBuild) -> None:
        began.setdefault(build.phase, time.monotonic())

    world.rebuild(name, show=show)
    ends = [*began.values(), time.monotonic()][1:]
    return {
        phase: round(end - start, 1)
        for (phase, start), end in zip(began.items(), ends, strict=True)
    }


def generations(world: "World") -> dict[str, int]:
    """Count the generations of each sink's view."""
    (table,) = world.described
    return {sink.name: len(sink.generations(table)) for sink in world.sinks}


def found(world: "World") -> int:
    """Count the rows with `row` in their names, as a search finds them."""
    url = f"{world.stack.endpoints.elasticsearch}/{world.name}-public.busy/_count"
    query = {"query": {"match": {"name": "row"}}}
    return int(http.post(url, json=query).raise_for_status().json()["count"])


def ask_for_another_mapping(world: "World") -> None:
    """Until the rebuild the index keeps its mapping and stays current, also if `cdc run` reads the file."""
    text = world.file.read_text()
    world.file.write_text(text.replace("partitions: 2", f"partitions: 2, index: {MAPPING}"))
    world.sql("ALTER TABLE busy ADD COLUMN note text", "UPDATE busy SET note = 'new' WHERE id = 1")
    world.settle()
    assert found(world) > 0
    planned = " ".join(world.cdc("plan").stdout.split())
    assert "was made with other fields than the file asks for now: name." in planned
    assert "cdc -p FILE rebuild search --table public.busy" in planned
    # The other views are current. Their positions move while `plan` looks.
    assert planned.count("refused") == 1


def test_readers_notice_nothing(world: "World") -> None:
    """Each view is rebuilt, and rolled back and forth, while all are written and read; the index gets another
    mapping. What is kept outlives crashes.
    """
    begin(world)
    places = {
        "search": [world.stack.endpoints.elasticsearch, f"{world.name}-public.busy"],
        "cache": [world.cache, f"{world.name}:public.busy:"],
        "warehouse": [str(world.warehouse / "public.busy" / "mirror")],
    }
    took: dict[str, list[float]] = {}
    with world.running() if SCALE == 1 else world.process():
        with pulse(world), writer.writing(world.dsn, RATE):
            world.settle()
            with readers.reading(places) as readings:
                ask_for_another_mapping(world)
                for name in SINKS:
                    print(name, "rebuilt", rebuilt(world, name))
                    took[name] = []
                    for way in ("back", "forward"):
                        world.settle(sinks=[name])
                        took[name].append(round(world.rollback(name), 2))
                        if name == "search":
                            assert (found(world) == 0) is (way == "forward")
        world.settle()
    print(took, readings, sep="\n")
    assert {
        name: (reading.errors, reading.partial) for name, reading in readings.items()
    } == dict.fromkeys(SINKS, ([], []))
    assert all(reading.polls > 20 for reading in readings.values())
    if SCALE > 1:
        ages = {name: reading.oldest_s for name, reading in readings.items()}
        assert {name: age for name, age in ages.items() if age > OLDEST_S} == {}
        assert {name: ways for name, ways in took.items() if max(ways) > BACK_S} == {}
    world.assert_equal()
    assert world.cdc("plan").stdout == "nothing to do\n"
    outlive_crashes(world)


def spark_of(pid: int) -> psutil.Process | None:
    children = psutil.Process(pid).children()
    return next((child for child in children if child.name() == "java"), None)


def runs(log: Path, start: int) -> bool:
    return b"cache running" in log.read_bytes()[start:]


def outlive_crashes(world: "World") -> None:
    """`cdc run` is killed, then its Spark, in whatever batch; both generations of each view equal
    the source. Then what is kept expires.
    """
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


def test_what_differs_is_never_shown(world: "World") -> None:
    """A row that the log has and the source has not: the planted twin of every rebuild that ends well."""
    begin(world, "INSERT INTO busy SELECT n, 'row', n, now() FROM generate_series(1, 100) n")
    with world.running():
        world.settle()
    (table,) = world.described
    record = read_records(world.pipeline.kafka, table.topic)[0]
    key = record.key.replace(b'"id":', b'"id":90')
    value = record.value.replace(b'"id":', b'"id":90')
    produce(world.pipeline.kafka, table.topic, [(key, value)])
    generations = [sink.generations(table) for sink in world.sinks]
    failed = world.cdc("rebuild", "search", code=8)
    assert "1 extra" in " ".join(failed.stderr.split())
    assert [sink.generations(table) for sink in world.sinks] == generations
    world.assert_equal()
    context, names = Context(world.file, world.folder), {table.qualified: new_generation()}
    (search,) = context.sinks(["search"])
    describe = only_tables(Streams(context).follower, names)
    with keep_current(
        Environment.on_spark(world.spark, world.pipeline.kafka),
        search.for_generation(names),
        names,
        world.pipeline,
        describe,
        context.placeholder,
    ) as removed:
        wait_until(
            lambda: removed.progress.state == "failed",
            30,
            "who keeps current what isn't there any more to end",
        )
    assert [sink.generations(table) for sink in world.sinks] == generations


KILLED = """
import os, signal, sys, threading
from cdc import entry
from cdc.rebuild import build as rebuild
_, after_s, *words = sys.argv
def kill(): os.kill(os.getpid(), signal.SIGKILL)
publish = rebuild.Rebuild._publish
def published(self, **changes):
    publish(self, **changes)
    if self._build.phase == "replay" and not published.armed:
        published.armed = True
        threading.Timer(float(after_s), kill).start()
published.armed = False
rebuild.Rebuild._publish = published
sys.argv = ["cdc", *words]
entry.main()
"""
WRITTEN_S = 1.0
"""The process is killed so many seconds after the beginning of its replay: while it writes."""
INTERRUPTED = ("catch up", "verify", "promote")
"""Later phases, whose beginning is interrupted in this process, whose Spark is warm: what the next
command finds is the same.
"""


class CommandStoppedError(Exception):
    """The rebuild is interrupted here."""


def interrupted(world: "World", sink: str, phase: str) -> None:
    def show(build: GenerationBuild) -> None:
        if build.phase == phase:
            raise CommandStoppedError

    with pytest.raises(CommandStoppedError):
        world.rebuild(sink, show=show)


def interrupted_once_promoted(world: "World", sink: str) -> None:
    """Readers see what it has written, and nothing is said of what they saw before."""
    with (
        mock.patch.object(rebuilding, "retain", side_effect=CommandStoppedError),
        pytest.raises(CommandStoppedError),
    ):
        world.rebuild(sink)


def killed(world: "World", sink: str) -> None:
    words = world.words("rebuild", sink, "--keep", "0")
    process = subprocess.run(
        [sys.executable, "-c", KILLED, str(WRITTEN_S), *words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == -signal.SIGKILL, (process.returncode, process.stderr[-3000:])


def test_killed_in_every_phase(world: "World") -> None:
    """The same command again and again, each time ended in a later phase; then once to the end."""
    sink = "warehouse"
    begin(world)
    steps = [
        partial(killed, world, sink),
        *(partial(interrupted, world, sink, phase) for phase in INTERRUPTED),
        partial(interrupted_once_promoted, world, sink),
    ]
    with world.running():
        world.settle()
        for end_in_phase in steps:
            world.sql("UPDATE busy SET amount = amount + 1 WHERE id % 10 = 0")
            end_in_phase()
        world.cdc("rebuild", sink, "--keep", "0")
        world.settle()
        world.assert_equal()
    assert generations(world) == dict.fromkeys(SINKS, 1)
