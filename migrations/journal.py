"""The journal of definitions, where its event triggers haven't written: the first entry of each captured table.

In:  the captured tables, and which of them were published before. Runs inside the caller's transaction.
Out: a line for each thing that was changed.
Invariant: after this the newest entry of every captured table says what the table looks like now.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import psycopg

from migrations.preflight import Relation

PUBLISHED = """
SELECT prrelid FROM pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid WHERE p.pubname = %s
"""
# Without a superuser there are no event triggers, and a definition may have changed unseen.
OUTDATED = """
SELECT array_agg(c.oid), array_agg(c.oid::regclass::text)
FROM unnest(%s::oid[]) AS oid JOIN pg_class c USING (oid) JOIN pg_namespace n ON n.oid = c.relnamespace
LEFT JOIN LATERAL (SELECT d.* FROM cdc.ddl d WHERE d.relation = c.oid ORDER BY d.id DESC LIMIT 1) AS last ON true
WHERE (last.table_name, last.columns, last.partitions)
      IS DISTINCT FROM (n.nspname || '.' || c.relname, cdc.described(c.oid), cdc.partitions(c.oid))
"""


def published(conn: psycopg.Connection, pipeline: str) -> set[int]:
    """The oids of what the pipeline's publication holds; none when there is no publication."""
    return {oid for (oid,) in conn.execute(PUBLISHED, [pipeline]).fetchall()}


def ensure_journal(conn: psycopg.Connection, captured: Sequence[Relation], before: Collection[int]) -> Iterator[str]:
    """Note what each table looks like: when it is published anew, and when the journal doesn't know."""
    yield from _watch(conn)
    new = [relation.oid for relation in captured if relation.oid not in before]
    conn.execute("SELECT cdc.note('PUBLISH', %s::oid[])", [new])
    kept = [relation.oid for relation in captured if relation.oid in before]
    outdated, names = conn.execute(OUTDATED, [kept]).fetchone() or (None, None)
    if outdated:
        conn.execute("SELECT cdc.note('DESCRIBE', %s::oid[])", [outdated])
        yield f"noted the definition of {', '.join(sorted(names))}"


def _watch(conn: psycopg.Connection) -> Iterator[str]:
    notices: list[str] = []

    def keep(notice: psycopg.errors.Diagnostic) -> None:
        notices.append(notice.message_primary or "")

    conn.add_notice_handler(keep)
    try:
        (made,) = conn.execute("SELECT cdc.watch_ddl()").fetchone() or ([],)
    finally:
        conn.remove_notice_handler(keep)
    yield from (f"created event trigger {name}" for name in made)
    yield from (f"note: {notice}" for notice in notices)
