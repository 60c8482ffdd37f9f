"""Migrations: append-only SQL, and whatever a pipeline needs in its source database. Knows no
destination.
"""

from cdc.migrations.plan import describe_statement, plan, script
from cdc.migrations.runner import CONTROL, SAMPLE, migrate
from cdc.migrations.source import Unprivileged, heartbeat_query, prepare_source
from cdc.migrations.statement import Statement

__all__ = [
    "CONTROL",
    "SAMPLE",
    "Statement",
    "Unprivileged",
    "describe_statement",
    "heartbeat_query",
    "migrate",
    "plan",
    "prepare_source",
    "script",
]
