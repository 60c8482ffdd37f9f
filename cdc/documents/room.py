"""The memory that the state of a plan takes, estimated before its rows are read: rows as many and as
long as Postgres' statistics say, and what the server adds to each key and each member.

Sizes are in bytes. What the server adds was measured on Valkey 9.1. For the sample's tables and views
the estimate is 0.91 of what is taken once all documents are sent.
"""

from collections.abc import Collection, Mapping
from typing import NamedTuple

from cdc.config.view_settings import STATE
from cdc.documents.plan import StatePlan, Values
from cdc.documents.state import StateSizes, StateTooLarge
from cdc.model.address import address
from cdc.model.finding import Finding, find
from cdc.model.pg_types import base_type
from cdc.model.table import RowEstimate, Table
from cdc.redis.server import shell_command, view_key

KEY = 80
"""Bytes that the server takes for a key with its value, in addition to the bytes of both."""
MEMBER = 12
"""Bytes that it takes for a member of an index."""
MARK = 60
"""Bytes of a document's mark. None is sent before all rows are there, so each is marked then."""
TEXTS = {"timestamp with time zone": 29, "timestamp without time zone": 16, "uuid": 38}
"""Lengths of values that are longer in a record than in Postgres, which has them in 8 or 16 bytes."""
EXCESS = 1.5
"""How many times all of the server's memory an estimate has to be for a refusal: statistics may be old,
and count rows that are gone.
"""
RESERVE = 1.5
"""What is recommended: so many times what is missing."""


class Forecast(NamedTuple):
    """needed: by the whole state, once all is read. growth: what of it isn't there yet."""

    needed: int
    growth: int


def forecast(
    plan: StatePlan,
    prefix: str,
    sizes: StateSizes,
    again: Collection[str],
    estimates: Mapping[str, RowEstimate],
) -> Forecast:
    """Estimate what a state will take. Tables that are read `again` count as Postgres estimates
    them. Other tables, and tables without an estimate, count as they are in the state.
    """
    needed = growth = 0
    for table in plan.tables:
        name = table.qualified
        members = len(plan.slots[name]) + len(plan.listings[name])
        key_bytes = len(view_key(prefix, name)) + KEY + members * MEMBER
        expected = stored = sizes.bytes[name] + sizes.rows[name] * key_bytes
        if name in again and name in estimates:
            estimate = estimates[name]
            row_bytes = key_bytes + _row_bytes(plan, table, estimate)
            expected = estimate.rows * (row_bytes + MARK * len(plan.roots(name)))
            # What is measured lacks the texts of indexes.
            stored = max(stored, sizes.rows[name] * row_bytes)
        needed += expected
        growth += expected - stored
    return Forecast(needed, growth)


def require_room(url: str, expected: Forecast, sizes: StateSizes) -> Finding | None:
    """Compare a forecast with the memory of the server. A server without `maxmemory`, or one that
    doesn't report it, has room for all.

    Raises:
        StateTooLarge: it is more than `EXCESS` times all of the memory.
    """
    limit = sizes.limit_bytes
    used = sizes.used_bytes
    if limit is None or used is None or used + expected.growth <= limit:
        return None
    recommended = used + round(RESERVE * expected.growth)
    command = f"{shell_command(url)} CONFIG SET maxmemory {recommended}"
    figures = (
        f"by Postgres' statistics its rows take about {expected.needed:,} bytes, of which"
        f" {expected.growth:,} aren't there yet, and {max(0, limit - used):,} of {limit:,} bytes"
        " (maxmemory) are free."
    )
    if expected.needed > EXCESS * limit:
        message = f"The state of documents doesn't fit into the server at {address(url)}: {figures}"
        raise StateTooLarge(message, hint=command, sink=STATE)
    message = f"The state of documents may not fit into the server at {address(url)}: {figures}"
    return find("state-too-large/estimate", STATE, message, command, sink=STATE)


def _row_bytes(plan: StatePlan, table: Table, estimate: RowEstimate) -> int:
    """Estimate a row of the state with its id and what its indexes have of it: see
    `cdc.documents.rows`. Lists and numbers that leave rows out aren't counted.
    """
    name = table.qualified
    lengths = {
        column.name: TEXTS.get(base_type(column.type), estimate.widths.get(column.name, 1))
        for column in table.columns
    }

    def text(columns: Collection[str]) -> int:
        return sum(lengths[column] for column in columns)

    def members(columns: Collection[str]) -> int:
        return 1 + sum(len(column.encode()) + 4 + lengths[column] for column in columns)

    def looked_up(values: Values) -> int:
        return 3 + text([column for value in values for column in value.columns])

    row_id = text(table.key)
    size = row_id + members(table.key) + members(lengths)
    size += sum(looked_up(values) + row_id for values in plan.slots[name])
    for listing in plan.listings[name]:
        if listing.where is None:
            order = text([order.column for order in listing.order_by])
            size += looked_up(listing.values) + 2 * order + row_id
    for tally in plan.tallies[name]:
        size += looked_up(tally.values) if tally.where is None else 0
    return size
