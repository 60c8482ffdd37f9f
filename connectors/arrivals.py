"""Tables whose rows the connector wouldn't send by itself: added to a pipeline that has its first snapshot behind it.

In:  the registration's connections, what there was before it. Out: requests for their rows; floors.
Invariant: nothing here runs while the connector does, so that a request is read by a connector that knows the table,
and a crash at any point leaves something by which the next registration sees what is missing.
"""

import re
from collections.abc import Collection, Mapping, Sequence

from psycopg import sql

from cdc.change import Table
from cdc.source import Connection
from cdc.topics import Topics
from connectors.floor import raise_floor
from connectors.resend import resend


def takes_snapshot(offsets: Sequence[Mapping[str, object]]) -> bool:
    """Whether a connector with these offsets begins with a copy of every table: it never finished one."""

    def finished(offset: Mapping[str, object]) -> bool:
        # A blocking snapshot is one on request, after the first, and isn't begun again.
        return offset.get("snapshot") in (None, "BLOCKING") or bool(offset.get("snapshot_completed"))

    return not any(finished(offset) for offset in offsets)


def included(config: Mapping[str, str], table: Table) -> bool:
    """Whether a connector with this configuration captures the table."""
    patterns = re.split(r"(?<!\\),", config.get("table.include.list", ""))
    return any(re.fullmatch(pattern.replace(r"\,", ","), table.qualified) for pattern in patterns)


def new_tables(
    conn: Connection,
    topics: Topics,
    tables: Sequence[Table],
    before: Mapping[str, str] | None,
    created: Collection[str],
) -> list[Table]:
    """Tables that the next start doesn't copy, yet whose rows aren't in their topics.

    `before` is the connector's last configuration, `created` the topics that were made just now.
    """
    ends = topics.ends([table.topic for table in tables])

    def is_new(table: Table) -> bool:
        if table.topic in created:
            return True
        if before is not None:
            return not included(before, table)
        # The connector was deleted, and what it captured with it: a registration may have ended half way.
        return not any(ends[table.topic].offsets) and _has_rows(conn, table)

    return [table for table in tables if is_new(table)]


def send(conn: Connection, topics: Topics, tables: Sequence[Table]) -> None:
    """Ask for the rows of new tables. What a topic holds from an earlier time in the pipeline is dead from now on."""
    ends = topics.ends([table.topic for table in tables])
    for table in tables:
        end = ends[table.topic]
        name = f"new-{end.topic_id}-{sum(end.offsets)}"
        resend(conn, table, id=name, cleanse=any(end.offsets))


def bury(conn: Connection, topics: Topics, tables: Sequence[Table]) -> list[str]:
    """Before another first snapshot: set a floor, for rows that were deleted since the last one have no event."""
    ends = topics.ends([table.topic for table in tables])
    known = [table.qualified for table in tables if any(ends[table.topic].offsets)]
    if known:
        raise_floor(conn, known)
    return known


def _has_rows(conn: Connection, table: Table) -> bool:
    query = sql.SQL("SELECT EXISTS (SELECT FROM {})").format(sql.Identifier(table.schema, table.name))
    return conn.execute(query).fetchone() == (True,)
