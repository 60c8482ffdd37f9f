"""`cdc topics audit` on a real log: rows that only a compacted log lacks, found, sent again, and the view made
again.
"""

from collections import Counter
from typing import TYPE_CHECKING

import psycopg

from cdc.audit.auditor import Audit, Auditor
from cdc.kafka.topics import Topics
from cdc.runtime.context import Context
from cdc.verify import barrier
from cdc.verify.verification import compare
from tests.support.compaction import compact
from tests.support.shop import read
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from tests.scenarios.conftest import World

TABLE = "public.wide"
VALUES = "records-incomplete/values"
OUTDATED = "records-incomplete/outdated"
RETAINED = "setting-differs/delete.retention.ms"


def audited(world: "World", kafka: Topics) -> Audit:
    """Once all that is committed is in the log, whether or not a view has applied it."""
    with psycopg.connect(world.dsn) as connection:
        (now_ms,) = connection.execute(
            "SELECT extract(epoch FROM clock_timestamp())::float8 * 1000"
        ).fetchone() or (0,)
    barrier.place_barrier(world.pipeline, kafka, world.described, now_ms, barrier.WaitOptions(120))
    placeholder = Context(world.file, world.folder).placeholder
    return Auditor(world.spark, world.pipeline, kafka, placeholder, world.sinks).audit(
        world.described[0]
    )


def flawed_keys(audit: Audit) -> dict[str, set[str]]:
    return {flaw.key: set(flaw.keys) for flaw in audit.flaws}


def ids(*numbers: int) -> set[str]:
    return set(map(str, numbers))


def snapshot_reads(world: "World") -> Counter[str]:
    """Count how often each row was read from its table."""
    changes = read(world.stack.endpoints.kafka, f"{world.name}.{TABLE}")
    return Counter(str(change.key["id"]) for change in changes if change.op == "r")


def test_what_a_compacted_log_lacks_is_found_and_repaired(world: "World") -> None:
    world.sql(
        "CREATE TABLE wide (id int PRIMARY KEY, n int, t text)",
        "ALTER TABLE wide ALTER t SET STORAGE EXTERNAL",
        "INSERT INTO wide SELECT n, 0, repeat('t', 9000) FROM generate_series(1, 20) n",
    )
    world.begin(f"{{table: {TABLE}, partitions: 2}}", sinks=["cache"])
    # `cdc migrate` has set FULL.
    world.sql("ALTER TABLE wide REPLICA IDENTITY DEFAULT", "UPDATE wide SET n = 1 WHERE id <= 5")
    with world.running():
        world.settle()
    with Topics(world.stack.endpoints.kafka) as kafka:
        first_audit = audited(world, kafka)
        assert flawed_keys(first_audit) == {}
        assert (
            first_audit.records,
            first_audit.keys,
            first_audit.saved,
            first_audit.dirty_ratio,
        ) == (25, 20, 5, 0.2)
        compact(kafka, world.described[0].topic)
        lacking = audited(world, kafka)
        assert flawed_keys(lacking) == {VALUES: ids(*range(1, 6))}
        assert (lacking.records, lacking.keys, lacking.saved) == (20, 20, 0)
        # Nobody runs who would have all rows sent again.
        world.sql(
            "ALTER TABLE wide ADD d int DEFAULT 7",
            "ALTER TABLE wide ADD e int",
            "UPDATE wide SET t = t || n WHERE id = 6",
        )
        world.sql("DELETE FROM wide WHERE id = 20")
        missed_deletes(world, kafka)
        earlier_reads = snapshot_reads(world)
        repaired = world.json("topics", "audit", "--repair")
        assert (repaired["replayable"], repaired["topics"][0]["repaired"]) == (True, 18)
        assert repaired["topics"][0]["findings"] == []
        assert snapshot_reads(world) - earlier_reads == Counter(ids(*range(1, 6), *range(7, 20)))
    world.rebuild("cache")
    comparisons = compare(world.spark, world.described, world.dsn, world.sinks)
    assert [
        (comparison.equal, comparison.source_rows, comparison.view_rows)
        for comparison in comparisons
    ] == [(True, 19, 19)]


def with_deletes(audit: Audit) -> Audit | None:
    return audit if "view-stopped" in flawed_keys(audit) else None


def missed_deletes(world: "World", kafka: Topics) -> None:
    """The view is behind a tombstone: no harm for as long as such are kept."""
    outdated = {VALUES: ids(*range(1, 6)), OUTDATED: ids(*range(1, 6), *range(7, 20))}
    assert flawed_keys(audited(world, kafka)) == outdated
    topic = f"{world.name}.{TABLE}"
    retention = kafka.overrides([topic])[topic]["delete.retention.ms"]
    kafka.override({topic: {"delete.retention.ms": "1000"}})
    late = wait_until(lambda: with_deletes(audited(world, kafka)), 30, "the tombstone to be of age")
    assert late
    assert flawed_keys(late) == {**outdated, "view-stopped": set(), RETAINED: set()}
    assert {defect.key for defect in late.defects} == {VALUES, OUTDATED, "view-stopped"}
    kafka.override({topic: {"delete.retention.ms": retention}})
