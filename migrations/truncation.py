"""Triggers that record TRUNCATE: of a captured table as its floor, of a partition alone in the journal.

In:  the captured tables. Runs inside the caller's transaction.
Out: a line for each thing that was changed; none when all was right already.
Invariant: every table and partition that can lose rows to a TRUNCATE has a trigger that fires whoever truncates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import psycopg
from psycopg import sql

from migrations.preflight import Relation
from migrations.role import OF_OTHER_PIPELINES

TABLE, PARTITIONED, PARTITION = "record_truncation", "begin_truncation", "record_partition_truncation"
TRIGGERS = {TABLE: ("cdc_truncation", "AFTER"), PARTITIONED: ("cdc_truncating", "BEFORE")}
"""By the function that they execute; those of partitions are made by `cdc.adopt_partitions`, later ones too."""

PRESENT = f"""
SELECT t.tgrelid, n.nspname, c.relname, t.tgname, p.proname, t.tgenabled = 'A',
       coalesce(pg_partition_root(t.tgrelid)::oid, t.tgrelid) IN ({OF_OTHER_PIPELINES})
FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid JOIN pg_namespace n ON n.oid = c.relnamespace
JOIN pg_proc p ON p.oid = t.tgfoid AND p.pronamespace = 'cdc'::regnamespace
WHERE p.proname = ANY (%(functions)s)
ORDER BY n.nspname, c.relname, t.tgname
"""
# What is left of a server that was restored or replaced: its positions start again, and every change would lie
# below such a floor.
RESET = """
UPDATE cdc.truncation SET lsn = '0/0', at = clock_timestamp()
WHERE lsn > pg_current_wal_insert_lsn() RETURNING table_name
"""


def ensure_triggers(conn: psycopg.Connection, pipeline: str, captured: Sequence[Relation]) -> Iterator[str]:
    functions = [TABLE, PARTITIONED, PARTITION]
    rows = conn.execute(PRESENT, {"pipeline": pipeline, "functions": functions}).fetchall()
    watched = {(oid, function) for oid, _, _, _, function, always, _ in rows if always}
    wanted = {(relation.oid, TABLE) for relation in captured}
    for relation in captured:
        if (relation.oid, TABLE) not in watched:
            _add(conn, relation, TABLE)
            yield f"recording TRUNCATE of {relation.label}"
        if relation.relkind == "p":
            wanted |= {(relation.oid, PARTITIONED), *((member, PARTITION) for member in relation.members)}
            if (relation.oid, PARTITIONED) not in watched:
                _add(conn, relation, PARTITIONED)
            (made,) = conn.execute("SELECT cdc.adopt_partitions(%s::oid)", [relation.oid]).fetchone() or ([],)
            yield from made
    for oid, schema, table, trigger, function, _, elsewhere in rows:
        if (oid, function) not in wanted and not elsewhere:
            statement = sql.SQL("DROP TRIGGER {} ON {}")
            conn.execute(statement.format(sql.Identifier(trigger), sql.Identifier(schema, table)))
            if function != PARTITIONED:
                yield f"no longer recording TRUNCATE of {schema}.{table}"


def reset_floors(conn: psycopg.Connection) -> Iterator[str]:
    """Take back floors that lie beyond the end of this server's log: they are another server's."""
    for (table,) in conn.execute(RESET).fetchall():
        yield f"reset the floor of {table}: it lay beyond the end of the server's log"


def _add(conn: psycopg.Connection, relation: Relation, function: str) -> None:
    """ALWAYS: a truncation that reached this table by replication, or in replica mode, counts too."""
    name, when = TRIGGERS[function]
    trigger = sql.Identifier(name)
    conn.execute(
        sql.SQL("CREATE OR REPLACE TRIGGER {} {} TRUNCATE ON {} FOR EACH STATEMENT EXECUTE FUNCTION {}()").format(
            trigger, sql.SQL(when), relation.identifier, sql.Identifier("cdc", function)
        )
    )
    conn.execute(sql.SQL("ALTER TABLE {} ENABLE ALWAYS TRIGGER {}").format(relation.identifier, trigger))
