"""Backfills at a registration: rows that the connector wouldn't send by itself.

These are the rows of tables that join a pipeline after its first snapshot, and of tables that get
other columns or another key.

In:  the registration's connections, how tables were captured before. Out: requests for their rows;
floors.
Invariant: the connector is stopped meanwhile, so that it knows the table when it reads a request.
After a crash at any point, the next registration finds what is missing.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from cdc.control.registrations import Captured
from cdc.kafka.log_continuity import request_name
from cdc.kafka.topics import Topics
from cdc.model.position import Position
from cdc.model.table import Table
from cdc.postgres.snapshot_request import raise_floor, resend
from cdc.postgres.source import Connection


@dataclass(frozen=True)
class Backfill:
    """A table whose rows have to be sent. With `reset_floor`, the records that its topic has now
    are dead.
    """

    table: Table
    reason: str
    reset_floor: bool


def find_backfills(
    topics: Topics,
    tables: Sequence[Table],
    previous: Mapping[str, Captured],
    current: Mapping[str, Captured],
    created: Collection[str],
    events: Collection[str],
) -> list[Backfill]:
    """Find tables whose topics lack rows as they are sent from now on, and that no snapshot will
    copy.

    `previous` is how tables were captured until now. `created` are the topics created since then.
    `events` are tables of events whose topics still have all of them.
    """
    ends = topics.ends([table.topic for table in tables])
    backfills = []
    for table in tables:
        if table.topic in created or table.qualified not in previous:
            has_dead = any(ends[table.topic].offsets) and table.qualified not in events
            backfills.append(Backfill(table, "it is new here", has_dead))
        else:
            old_capture = previous[table.qualified]
            new_capture = current[table.qualified]
            if old_capture.key != new_capture.key:
                backfills.append(Backfill(table, "it has another key", True))
            elif old_capture.events != new_capture.events:
                now = "are events now" if new_capture.events else "aren't events any more"
                backfills.append(Backfill(table, f"its rows {now}", True))
            elif old_capture.unsent != new_capture.unsent:
                backfills.append(Backfill(table, "it has other columns", False))
            elif old_capture.mask != new_capture.mask:
                backfills.append(Backfill(table, "it has other masks", False))
    return backfills


def request_backfills(
    conn: Connection, topics: Topics, requests: Iterable[Backfill], reader: str
) -> dict[str, Position]:
    """Request all rows of tables.

    `reader` is the connector's role. Returns the ends of the topics whose present records are dead.
    """
    listed = list(requests)
    ends = topics.log_ends([request.table.topic for request in listed])
    for request in listed:
        end = ends[request.table.topic]
        name = request_name(request.reason, end)
        resend(conn, request.table, reader=reader, id=name, reset_floor=request.reset_floor)
    return {
        request.table.topic: ends[request.table.topic] for request in listed if request.reset_floor
    }


def set_floor_before_snapshot(
    conn: Connection, topics: Topics, tables: Sequence[Table], control_topics: Sequence[str]
) -> dict[str, Position]:
    """Set a floor before another first snapshot, because a row that was deleted since the last one
    has no record. `tables`: those whose views don't keep such a row.

    Returns the ends of the topics that have records, `control_topics` among them.
    """
    ends = topics.log_ends([*(table.topic for table in tables), *control_topics])
    filled = [table.qualified for table in tables if any(ends[table.topic].offsets)]
    if filled:
        raise_floor(conn, filled)
    return {topic: end for topic, end in ends.items() if any(end.offsets)}
