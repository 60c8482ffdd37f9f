"""Append-only SQL and what a pipeline needs in its source database; knows Postgres, never a destination."""

from migrations.plan import plan, script, told
from migrations.runner import CONTROL, SAMPLE, Applied, migrate
from migrations.source import Unprivileged, Wanted, heartbeat_query, prepare_source
from migrations.statement import Statement

__all__ = [
    "CONTROL",
    "SAMPLE",
    "Applied",
    "Statement",
    "Unprivileged",
    "Wanted",
    "heartbeat_query",
    "migrate",
    "plan",
    "prepare_source",
    "script",
    "told",
]
