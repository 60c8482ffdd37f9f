"""Triggers of captured tables. They record TRUNCATE: of a table as its floor, of a partition alone in
the journal. On a table of events they refuse UPDATE instead.

In:  the captured tables. It only reads: the caller runs each statement before it takes the next.
Out: a statement for each change; none when all triggers are right already.
Invariant: every table and partition whose views lose rows with a TRUNCATE has a trigger that fires
whoever truncates; every table of events one that fires whoever updates.
"""

from collections.abc import Collection, Iterator, Sequence

import psycopg
from psycopg import sql

from cdc.migrations.role import OF_OTHER_PIPELINES
from cdc.migrations.statement import Statement
from cdc.readiness.facts import TableFacts

TABLE = "record_truncation"
PARTITIONED = "begin_truncation"
PARTITION = "record_partition_truncation"
EVENTS = "refuse_update"
TRIGGERS = {
    TABLE: ("cdc_truncation", "AFTER TRUNCATE", "STATEMENT"),
    PARTITIONED: ("cdc_truncating", "BEFORE TRUNCATE", "STATEMENT"),
    EVENTS: ("cdc_events", "BEFORE UPDATE", "ROW"),
}
"""Name and event of the triggers, and what they fire for, by the function that they execute.
`cdc.adopt_partitions` makes the triggers of partitions.
"""
SECOND = ("cdc_truncating", "cdc_truncation_done")
"""Triggers that come with another one, whose message is enough for both."""

PRESENT = f"""
SELECT t.tgrelid, n.nspname, c.relname, t.tgname, p.proname, t.tgenabled = 'A',
       coalesce(pg_partition_root(t.tgrelid)::oid, t.tgrelid) IN ({OF_OTHER_PIPELINES})
FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid JOIN pg_namespace n ON n.oid = c.relnamespace
JOIN pg_proc p ON p.oid = t.tgfoid AND p.pronamespace = to_regnamespace('cdc')
-- Postgres gives each partition a copy of a trigger for rows.
WHERE p.proname = ANY (%(functions)s) AND t.tgparentid = 0
ORDER BY n.nspname, c.relname, t.tgname
"""
# The partitions that hold rows, and whether a trigger of their own is missing.
LEAVES = """
SELECT n.nspname || '.' || c.relname, NOT EXISTS (
           SELECT FROM pg_trigger t JOIN pg_proc p ON p.oid = t.tgfoid AND p.pronamespace = to_regnamespace('cdc')
           WHERE t.tgrelid = c.oid AND t.tgenabled = 'A' AND p.proname = 'record_partition_truncation') AS unwatched
FROM pg_partition_tree(%(root)s::oid) part JOIN pg_class c ON c.oid = part.relid AND c.oid <> %(root)s::oid
JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE part.isleaf
ORDER BY 1
"""
# Floors of a server that was restored or replaced: its LSNs start again, so every change would lie
# below such a floor.
BEYOND = "SELECT table_name FROM cdc.truncation WHERE lsn > pg_current_wal_insert_lsn() ORDER BY 1"
RESET = """
UPDATE cdc.truncation SET lsn = '0/0', at = clock_timestamp()
WHERE lsn > pg_current_wal_insert_lsn() AND table_name = {}
"""


def ensure_triggers(
    conn: psycopg.Connection,
    pipeline: str,
    captured: Sequence[TableFacts],
    events: Collection[str] = (),
) -> Iterator[Statement]:
    """Create the triggers of captured tables; drop what is on tables that are captured no longer.
    `events`: names of tables whose rows are events.
    """
    functions = [TABLE, PARTITIONED, PARTITION, EVENTS]
    rows = conn.execute(PRESENT, {"pipeline": pipeline, "functions": functions}).fetchall()
    watched = {(oid, function) for oid, _, _, _, function, always, _ in rows if always}
    expected: set[tuple[int, str]] = set()
    for relation in captured:
        if relation.label in events:
            # Views keep what a TRUNCATE removes.
            expected.add((relation.oid, EVENTS))
            if (relation.oid, EVENTS) not in watched:
                yield _addition(relation, EVENTS, f"refusing UPDATE of {relation.label}")
            continue
        expected.add((relation.oid, TABLE))
        if (relation.oid, TABLE) not in watched:
            yield _addition(relation, TABLE, f"recording TRUNCATE of {relation.label}")
        if relation.kind == "p":
            expected |= {
                (relation.oid, PARTITIONED),
                *((member, PARTITION) for member in relation.members),
            }
            if (relation.oid, PARTITIONED) not in watched:
                yield _addition(relation, PARTITIONED)
            yield from _adoption(conn, relation)
    for oid, schema, table, trigger, function, _, elsewhere in rows:
        if (oid, function) not in expected and not elsewhere:
            drop = sql.SQL("DROP TRIGGER IF EXISTS {} ON {}")
            purpose = "refusing UPDATE" if function == EVENTS else "recording TRUNCATE"
            lines = (f"no longer {purpose} of {schema}.{table}",) if trigger not in SECOND else ()
            yield Statement(
                drop.format(sql.Identifier(trigger), sql.Identifier(schema, table)), lines
            )


def _adoption(conn: psycopg.Connection, relation: TableFacts) -> Iterator[Statement]:
    """Add the triggers of partitions, by the function that an event trigger calls for later
    partitions, too.
    """
    leaves = conn.execute(LEAVES, {"root": relation.oid}).fetchall()
    if lines := tuple(
        f"recording TRUNCATE of partition {leaf}" for leaf, unwatched in leaves if unwatched
    ):
        adopt = sql.SQL("SELECT cdc.adopt_partitions({}::regclass)")
        yield Statement(adopt.format(sql.Literal(relation.identifier.as_string(conn))), lines)


def reset_floors(conn: psycopg.Connection) -> Iterator[Statement]:
    """Reset floors that lie beyond the end of this server's log: they are another server's."""
    if conn.execute("SELECT to_regclass('cdc.truncation')").fetchone() == (None,):
        return
    for (table,) in conn.execute(BEYOND).fetchall():
        lines = (f"reset the floor of {table}: it lay beyond the end of the server's log",)
        yield Statement(sql.SQL(RESET).format(sql.Literal(table)), lines)


def _addition(relation: TableFacts, function: str, *lines: str) -> Statement:
    """Add a trigger. It is ALWAYS enabled, because a statement that comes by replication counts,
    too.
    """
    name, event, unit = TRIGGERS[function]
    return Statement(
        sql.SQL(
            "CREATE OR REPLACE TRIGGER {trigger} {event} ON {table} FOR EACH {unit} EXECUTE FUNCTION"
            " {function}(); ALTER TABLE {table} ENABLE ALWAYS TRIGGER {trigger}"
        ).format(
            trigger=sql.Identifier(name),
            event=sql.SQL(event),
            unit=sql.SQL(unit),
            table=relation.identifier,
            function=sql.Identifier("cdc", function),
        ),
        lines,
    )
