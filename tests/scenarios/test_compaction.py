"""`cdc topics compact`: the broker compacts now, nobody is disturbed, settings come back, also
after a crash.
"""

import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from cdc.audit.compaction import CompactionOptions, CompactionResult, compact
from cdc.connectors.client import Connect
from cdc.errors import ConnectorError
from cdc.generations.registry import GenerationBuild
from cdc.kafka.topics import Topics
from cdc.spark.kafka_source import census
from cdc.verify.verification import compare
from tests.scenarios.test_exact import begin
from tests.support.load import load
from tests.support.postgres import await_reads
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from tests.scenarios.conftest import World

OWN_SETTINGS = {"segment.ms": "3600000", "min.cleanable.dirty.ratio": "0.9"}


def write(conn: "psycopg.Connection[Any]", number: int) -> None:
    conn.execute("UPDATE items SET n = %s WHERE id = %s", [number, number % 100 + 1])
    conn.execute("DELETE FROM items WHERE id = %s", [1000 + number - 10])
    conn.execute("INSERT INTO items VALUES (%s, 0)", [1000 + number])


def of_topics(world: "World") -> list[dict[str, Any]]:
    """Return the findings on the topics' settings that `status` tells."""
    findings = world.json("status")["findings"]
    return [finding for finding in findings if finding["code"] == "settings-lowered"]


def compacted(world: "World", topics: Topics, timeout_s: float) -> CompactionResult:
    (result,) = compact(
        topics,
        world.pipeline,
        world.described,
        world.sinks,
        lambda goal: census(world.spark, world.stack.endpoints.kafka, goal),
        CompactionOptions(timeout_s, tombstones=True, progress=print),
    )
    return result


def rows_read(world: "World") -> tuple[int, ...]:
    """Scans of the table, and rows read by them, as Postgres counts them."""
    with psycopg.connect(world.dsn, autocommit=True) as connection:
        await_reads(connection)
        query = "SELECT seq_scan + idx_scan, seq_tup_read + idx_tup_fetch FROM pg_stat_user_tables"
        return connection.execute(f"{query} WHERE relname = 'items'").fetchone() or ()


def test_compaction_is_forced_and_awaited(world: "World") -> None:
    world.sql("CREATE TABLE items (id int PRIMARY KEY, n int)")
    begin(world, "{table: public.items, partitions: 2}")
    # Under load the warehouse is the one to be waited for.
    world.file.write_text(re.sub(r"  warehouse: .*\n", "", world.file.read_text()))
    topic = f"{world.name}.public.items"
    world.sql(
        "INSERT INTO items SELECT n, 0 FROM generate_series(1, 200) n", "UPDATE items SET n = 1"
    )
    world.sql("UPDATE items SET n = 2", "DELETE FROM items WHERE id > 150")
    with Topics(world.stack.endpoints.kafka) as topics:
        topics.override({topic: OWN_SETTINGS})
        settings = topics.overrides([topic])
        assert settings[topic].items() >= OWN_SETTINGS.items()
        with pytest.raises(
            ConnectorError, match="No record may go before every view that needs it has seen it"
        ):
            compacted(world, topics, 1)
        assert topics.overrides([topic]) == settings
        with world.running():
            world.settle()
            goal = topics.ends([topic])
            with load(world.dsn, write, 0.05):
                result = compacted(world, topics, 90)
            assert result.before >= 700
            assert (result.records, result.tombstones) == (result.keys, 0)
            partitions = census(world.spark, world.stack.endpoints.kafka, goal)[topic]
            assert sum(partition.tombstones for partition in partitions) == 0
            assert (
                sum(partition.records for partition in partitions)
                == sum(partition.keys for partition in partitions)
                <= 150
            )
            assert topics.overrides([topic]) == settings
            # No ghosts: rows whose tombstones are gone aren't in a view that is made of what is
            # left.
            world.rebuild("search")
            read: dict[str, tuple[int, ...]] = {}

            def note(build: GenerationBuild) -> None:
                # Postgres reports reads seconds later, so only the phases that are compared ask.
                if build.phase in ("replay", "catch up", "verify") and build.phase not in read:
                    read[build.phase] = rows_read(world)

            world.rebuild("cache", show=note)
            # Replay leaves Postgres alone; the proof afterwards reads it.
            assert read["replay"] == read["catch up"]
            wait_until(
                lambda: rows_read(world) > read["verify"], 60, "the proof's reads to be counted"
            )
            world.settle()
            comparisons = compare(world.spark, world.described, world.dsn, world.sinks)
            assert [comparison.equal for comparison in comparisons] == [True, True]
            with Connect(world.stack.endpoints.connect) as connect:
                assert connect.state(world.name).tasks == ("RUNNING",)


@contextmanager
def compacting(
    world: "World", topics: Topics, settings: dict[str, dict[str, str]]
) -> Iterator["subprocess.Popen[bytes]"]:
    """`cdc topics compact --tombstones`, waiting for views that nobody applies to, with settings
    lowered.
    """
    process = subprocess.Popen(
        world.command("topics", "compact", "--tombstones"), stderr=subprocess.DEVNULL
    )
    wait_until(lambda: topics.overrides(settings) != settings, 90, "settings to be lowered")
    yield process
    process.wait(60)


def test_a_compaction_that_is_ended_leaves_no_settings_lowered(world: "World") -> None:
    world.sql("CREATE TABLE items (id int PRIMARY KEY, n int)", "INSERT INTO items VALUES (1, 0)")
    begin(world, "{table: public.items, partitions: 1}")
    world.file.write_text(re.sub(r"  (search|warehouse): .*\n", "", world.file.read_text()))
    topic = f"{world.name}.public.items"
    with Topics(world.stack.endpoints.kafka) as topics:
        topics.override({topic: OWN_SETTINGS})
        settings = topics.overrides([topic])
        with compacting(world, topics, settings) as process:
            process.send_signal(signal.SIGTERM)
        assert process.returncode == 128 + signal.SIGTERM
        assert topics.overrides([topic]) == settings
        assert of_topics(world) == []
        with compacting(world, topics, settings) as process:
            # Somebody is at work: no problem, and nobody else restores them.
            assert of_topics(world) == []
            assert "settings of" not in world.cdc("topics", "--json").stderr
            process.kill()
        assert topics.overrides([topic]) != settings
        (finding,) = wait_until(lambda: of_topics(world), 30, "the settings to be told")
        assert (finding["fix"], finding["severity"]) == ("cdc -p FILE topics", "degraded")
        log = world.cdc("run", "--sink", "cache", "--until-caught-up").stderr
        assert f"restored the settings of {topic}" in log
        assert topics.overrides([topic]) == settings
        assert of_topics(world) == []
