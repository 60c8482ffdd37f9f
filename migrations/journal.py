"""Schema journal: entries that its event triggers haven't written, such as the first one of each
captured table.

In:  the captured tables, and which of them were published before. It only reads: the caller runs
each statement. Out: a statement for each thing that is to be changed.
Invariant: after this the newest entry of every captured table says what the table looks like now.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import LiteralString

import psycopg
from psycopg import sql

from cdc.migrations.statement import Statement
from cdc.readiness.facts import TableFacts

PUBLISHED = """
SELECT prrelid FROM pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid WHERE p.pubname = %s
"""
# Tables whose newest entry is wrong: without event triggers a definition may have changed unseen.
OUTDATED = """
SELECT c.oid FROM unnest(%s::oid[]) AS oid JOIN pg_class c USING (oid) JOIN pg_namespace n ON n.oid = c.relnamespace
LEFT JOIN LATERAL (SELECT d.* FROM cdc.ddl d WHERE d.relation = c.oid ORDER BY d.id DESC LIMIT 1) AS last ON true
WHERE (last.table_name, last.columns, last.partitions)
      IS DISTINCT FROM (n.nspname || '.' || c.relname, cdc.described(c.oid), cdc.partitions(c.oid))
"""
UNWATCHED = """
SELECT wanted.oid FROM unnest(%s::oid[]) AS wanted (oid) JOIN pg_class c USING (oid)
WHERE c.relkind = 'r' AND NOT cdc.has_event_triggers()
  AND NOT EXISTS (SELECT FROM cdc.storage s WHERE s.relation = c.oid)
"""
WITHDRAWN = "SELECT 1 FROM cdc.published WHERE publication = %s AND relation <> ALL (%s::oid[])"
UNREMEMBERED = """
SELECT oid FROM unnest(%s::oid[]) AS oid
WHERE oid NOT IN (SELECT relation FROM cdc.published WHERE publication = %s)
"""
# The same as in cdc.watch_ddl(). They are repeated, because an administrator shouldn't have to run
# the owner's code.
EVENT_TRIGGERS: dict[LiteralString, LiteralString] = {
    "cdc_ddl": "ddl_command_end WHEN TAG IN ('CREATE SCHEMA', 'CREATE TABLE', 'CREATE TABLE AS', 'SELECT INTO',"
    " 'ALTER TABLE') EXECUTE FUNCTION cdc.record_ddl()",
    "cdc_ddl_around": "ddl_command_end WHEN TAG IN ('ALTER SCHEMA', 'ALTER TYPE') EXECUTE FUNCTION cdc.record_ddl()",
    "cdc_drop": "sql_drop EXECUTE FUNCTION cdc.record_drop()",
    "cdc_rewrite": "table_rewrite EXECUTE FUNCTION cdc.record_rewrite()",
}
COMPARED = "no event triggers, which take a superuser: cdc run compares table definitions every few seconds instead"


def published(conn: psycopg.Connection, pipeline: str) -> set[int]:
    """Read the oids of the tables in the pipeline's publication; empty when there is no
    publication.
    """
    return {oid for (oid,) in conn.execute(PUBLISHED, [pipeline]).fetchall()}


def ensure_journal(
    conn: psycopg.Connection, captured: Sequence[TableFacts], published_before: Collection[int]
) -> Iterator[Statement]:
    """Add an entry for each table that is published for the first time, or whose newest entry is
    out of date.
    """
    unpublished = [relation for relation in captured if relation.oid not in published_before]
    if unpublished:
        yield Statement(_note(conn, "PUBLISH", unpublished))
    if not _has_journal(conn):
        return
    retained = [relation.oid for relation in captured if relation.oid in published_before]
    outdated = {oid for (oid,) in conn.execute(OUTDATED, [retained]).fetchall()}
    if changed := [relation for relation in captured if relation.oid in outdated]:
        names = ", ".join(sorted(relation.label for relation in changed))
        yield Statement(_note(conn, "DESCRIBE", changed), (f"noted the definition of {names}",))
    members = sorted({oid for relation in captured for oid in relation.members})
    if conn.execute(UNWATCHED, [members]).fetchone():
        yield Statement(sql.SQL("SELECT cdc.remember_storage()"))


def ensure_published(
    conn: psycopg.Connection, pipeline: str, captured: Sequence[TableFacts]
) -> Iterator[Statement]:
    """Remember what the publication holds. A table that the file no longer names is forgotten:
    when it comes back, `cdc register` asks for its rows.
    """
    remember = Statement(sql.SQL("SELECT cdc.remember_publications()"))
    if not _has_journal(conn):
        yield remember
        return
    oids = [relation.oid for relation in captured]
    if conn.execute(WITHDRAWN, [pipeline, oids]).fetchone():
        yield Statement(
            sql.SQL(
                "DELETE FROM cdc.published WHERE publication = {} AND relation <> ALL ({})"
            ).format(sql.Literal(pipeline), _oids(conn, captured))
        )
    if conn.execute(UNREMEMBERED, [oids, pipeline]).fetchone():
        yield remember


def ensure_event_triggers(conn: psycopg.Connection) -> Iterator[Statement]:
    """Create the event triggers that are missing, which takes a superuser."""
    present = {name for (name,) in conn.execute("SELECT evtname FROM pg_event_trigger").fetchall()}
    for name, event in EVENT_TRIGGERS.items():
        if name not in present:
            statement = (
                f"CREATE EVENT TRIGGER {name} ON {event}; ALTER EVENT TRIGGER {name} ENABLE ALWAYS"
            )
            exists = f"EXISTS (SELECT FROM pg_event_trigger WHERE evtname = '{name}')"
            yield Statement(
                sql.SQL(statement),
                (f"created event trigger {name}",),
                actor="administrator",
                done_check=sql.SQL(exists),
                skip_note=COMPARED,
            )


def _has_journal(conn: psycopg.Connection) -> bool:
    """Whether the migrations are applied; in a plan they may come before the statements of here."""
    return conn.execute("SELECT to_regclass('cdc.published')").fetchone() != (None,)


def _note(conn: psycopg.Connection, command: str, relations: Sequence[TableFacts]) -> sql.Composed:
    return sql.SQL("SELECT cdc.note({}, {})").format(sql.Literal(command), _oids(conn, relations))


def _oids(conn: psycopg.Connection, relations: Sequence[TableFacts]) -> sql.Composed:
    names = [
        sql.SQL("{}::regclass").format(sql.Literal(relation.identifier.as_string(conn)))
        for relation in relations
    ]
    return sql.SQL("ARRAY[{}]::oid[]").format(sql.SQL(", ").join(names))
