"""Check Postgres before the connector is registered. Only reads."""

import time
from collections.abc import Sequence
from dataclasses import replace

from cdc.config.settings import Pipeline
from cdc.model.table import Table
from cdc.postgres import row_identity, table_survey
from cdc.postgres.source import Connection
from cdc.readiness.checks import check_source, refuse
from cdc.readiness.facts import bounded_locks, read_source
from cdc.readiness.replication_slot import Slot, slot

RELEASE_S = 10.0
"""Seconds until Postgres notices that a deleted connector is gone."""


def require_ready(
    conn: Connection, pipeline: Pipeline, tables: Sequence[Table], *, connected: bool
) -> Slot | None:
    """Check the source. Returns the slot if it exists.

    `connected`: Connect has a connector with the pipeline's name.

    Raises:
        SourceError: the first fault that stops a registration, with its repair.
    """
    deadline = time.monotonic() + RELEASE_S
    while (
        not connected
        and time.monotonic() < deadline
        and (existing := slot(conn, pipeline.pipeline))
        and existing.active
    ):
        time.sleep(0.25)
    captured = [(table.schema, table.name) for table in tables]
    with bounded_locks(conn):
        facts = read_source(
            conn,
            replace(table_survey.requirements(pipeline), tables=captured),
            refused={},
            unidentified=row_identity.unidentified(conn, tables),
            connected=connected,
        )
    refuse(fault for fault in check_source(facts) if fault.stops)
    return facts.slot
