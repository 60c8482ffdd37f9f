"""Forecasts from what is measured now: when a sink has caught up, when Postgres gives the slot up, how
much memory the state of documents will take; and the finding that one of them makes.

Each assumes that things go on at the present pace. None where that pace isn't known, or leads nowhere.
"""

from collections.abc import Iterator, Sequence

from cdc.config.view_settings import STATE
from cdc.control.heartbeat import Heartbeat
from cdc.model.finding import LOOK_AGAIN, Finding, find
from cdc.observe.run_log import LagSample
from cdc.observe.status import DocumentsStatus, HeartbeatStatus, Status, ViewStatus
from cdc.readiness.facts import Slot

WINDOW_S = 600.0
"""How far back a pace is looked for: an older one says little of the next minutes."""
LEAST_ROWS = 20_000
"""Fewest rows from which the size of others is estimated."""
MOST_OVERHEAD = 4.0
"""What a state takes for a byte of its rows, at most: short rows with several indexes. A server that
holds other things as well uses more for each.
"""
LEAST_S = 60.0
"""Fewest seconds over which a pace is measured: a batch, or one large transaction, is no pace."""


def catch_up_s(
    samples: Sequence[LagSample], views: Sequence[ViewStatus], now: float
) -> float | None:
    """Return the seconds until a sink has applied all records that wait for it.

    samples: its lag, oldest first. now: Unix seconds. None also where it has caught up, or falls
    behind.
    """
    lags = [view.lag_records for view in views]
    waiting = sum(lag or 0 for lag in lags)
    if None in lags or not waiting:
        return None
    earlier = [
        sample
        for sample in samples
        if LEAST_S <= now - sample.at <= WINDOW_S and sample.lag_records is not None
    ]
    if not earlier:
        return None
    first = earlier[0]
    shrunk = (first.lag_records or 0) - waiting
    return waiting * (now - first.at) / shrunk if shrunk > 0 else None


def slot_loss_s(slot: Slot | None, heartbeat: HeartbeatStatus | None) -> float | None:
    """Return the seconds until `max_slot_wal_keep_size` is reached, while something holds the slot
    back: nobody confirms anything, or a transaction that was open before stays open.
    """
    if slot is None or heartbeat is None or slot.safe_wal_size is None:
        return None
    pace: float | None = None
    if heartbeat.late and heartbeat.age_s >= LEAST_S:
        # With each heartbeat the connector confirms what it has read. So the log that isn't
        # confirmed was written since the last one.
        pace = (slot.lag_bytes or 0) / heartbeat.age_s
    elif not heartbeat.late and (slot.oldest_transaction_s or 0.0) >= LEAST_S:
        pace = heartbeat.wal_per_s
    return max(0, slot.safe_wal_size) / pace if pace else None


def wal_pace(first: Heartbeat, last: Heartbeat) -> float | None:
    """Return the bytes of log that Postgres has written a second between two heartbeats."""
    span_s = (last.committed_ms - first.committed_ms) / 1000
    return (last.lsn - first.lsn) / span_s if span_s >= LEAST_S else None


def needed_memory_bytes(documents: DocumentsStatus) -> int | None:
    """Estimate the bytes of memory that the state's server uses with all waiting records applied.

    Assumes that new rows are as frequent among them as among the records so far. None where all are
    applied, or too few for an estimate.
    """
    rows = sum(documents.rows.values())
    used = documents.used_bytes
    waiting = documents.waiting
    if not waiting or not any(waiting.values()) or rows < LEAST_ROWS or used is None:
        return None
    size = sum(documents.bytes.values())
    missing = 0.0
    for table, records in waiting.items():
        rows_of_table = documents.rows.get(table, 0)
        applied = documents.applied.get(table, 0)
        row_bytes = documents.bytes[table] / rows_of_table if rows_of_table else size / rows
        share_new = min(1.0, rows_of_table / applied) if applied else 1.0
        missing += records * share_new * row_bytes
    return round(used + missing * min(used / size, MOST_OVERHEAD))


def find_memory_risk(status: Status) -> Iterator[Finding]:
    """Say when the state of documents, once all is applied that waits, may need more memory than its
    server has.
    """
    documents = status.documents
    if documents is None or documents.limit_bytes is None:
        return
    needed = needed_memory_bytes(documents)
    limit = documents.limit_bytes
    if needed is not None and needed > limit:
        message = (
            f"The state of documents may not fit: with the records that wait its server uses about"
            f" {needed >> 20:,} MiB, and maxmemory is {limit >> 20:,} MiB."
        )
        yield find("state-too-large/estimate", STATE, message, LOOK_AGAIN, sink=STATE)
