"""Append-only SQL and what a pipeline needs in its source database; knows Postgres, never a destination."""

from migrations.runner import CONTROL, SAMPLE, Applied, migrate
from migrations.source import heartbeat_query, prepare_source

__all__ = ["CONTROL", "SAMPLE", "Applied", "heartbeat_query", "migrate", "prepare_source"]
