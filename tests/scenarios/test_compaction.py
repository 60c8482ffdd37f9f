"""Views are made again from a log that the broker has compacted, tombstones included."""

from typing import TYPE_CHECKING

import psycopg

from cdc.generations.registry import GenerationBuild
from cdc.kafka.topics import Topics
from cdc.verify.verification import compare
from tests.support.compaction import compact
from tests.support.postgres import await_reads
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from tests.scenarios.conftest import World


def rows_read(world: "World") -> tuple[int, ...]:
    """Scans of the table, and rows read by them, as Postgres counts them."""
    with psycopg.connect(world.dsn, autocommit=True) as connection:
        query = "SELECT seq_scan + idx_scan, seq_tup_read + idx_tup_fetch FROM pg_stat_user_tables"
        return connection.execute(f"{query} WHERE relname = 'items'").fetchone() or ()


def test_a_compacted_log_makes_the_views_again(world: "World") -> None:
    """No ghosts: rows whose tombstones are gone aren't in a view that is made of what is left."""
    world.sql("CREATE TABLE items (id int PRIMARY KEY, n int)")
    world.begin("{table: public.items, partitions: 2}", sinks=["search", "cache"])
    world.sql(
        "INSERT INTO items SELECT n, 0 FROM generate_series(1, 200) n", "UPDATE items SET n = 1"
    )
    world.sql("UPDATE items SET n = 2", "DELETE FROM items WHERE id > 150")
    with Topics(world.stack.endpoints.kafka) as topics, world.running():
        world.settle()
        compact(topics, f"{world.name}.public.items", tombstones=True)
        world.sql("UPDATE items SET n = 3 WHERE id < 10", "DELETE FROM items WHERE id = 10")
        world.rebuild("search")
        read: dict[str, tuple[int, ...]] = {}

        def note(build: GenerationBuild) -> None:
            # Postgres reports reads seconds later, so only the phases that are compared wait.
            if build.phase in ("replay", "catch up") and build.phase not in read:
                with psycopg.connect(world.dsn, autocommit=True) as connection:
                    await_reads(connection)
                read[build.phase] = rows_read(world)

        world.rebuild("cache", show=note)
        # Replay leaves Postgres alone; the proof afterwards reads it.
        assert read["replay"] == read["catch up"]
        wait_until(
            lambda: rows_read(world) > read["catch up"], 60, "the proof's reads to be counted"
        )
        world.settle()
        comparisons = compare(world.spark, world.described, world.dsn, world.sinks)
        assert [comparison.equal for comparison in comparisons] == [True, True]
