"""Exchange of two generations row by row, in databases that others use, too.

Positions change places first, in one script. From then on nobody writes rows until `complete` has
exchanged them all. So an exchange that is interrupted loses nothing: whoever has to write next
completes it first. Two may do so at once.
"""

import json
from collections.abc import Mapping
from typing import NamedTuple

import redis

from cdc.model.generation import new_generation
from cdc.model.position import ViewCheckpoint, distance
from cdc.redis.server import Switched, glob_literal, view_key
from cdc.sinks.redis.database import Database
from cdc.sinks.redis.scan import run_id
from cdc.sinks.redis.scripts import EXCHANGE_SOME, SETTLE

FIRST_ROWS = 50
SLICE_ROWS = 250
SLICE_BYTES = 500_000
"""Size of a call of `complete`: it takes a few milliseconds, during which the server serves nobody else."""


OVER = -1
"""The answer of the scripts to an exchange that is complete."""


class Exchange(NamedTuple):
    """An exchange that isn't complete.

    mark: distinguishes it from all others. live, other: numbers of the databases.
    """

    mark: str
    live: int
    other: int


def exchange_of(fields: Mapping[str, str]) -> Exchange | None:
    """Parse the exchange that a position is in; None where all rows are in their places."""
    mark = fields.get("exchange")
    if mark is None:
        return None
    _, live, other = json.loads(mark)
    return Exchange(mark, live, other)


def new_mark(live: Database, other: Database) -> str:
    return json.dumps([new_generation(), live.number, other.number])


def shown_offsets(live: ViewCheckpoint | None, candidate: ViewCheckpoint) -> tuple[int, ...]:
    """Choose the offsets that readers get while rows change places: every row has the changes before
    them. If the two generations can't be compared, that is offset zero.
    """
    if live and live.floor == candidate.floor and distance(live, candidate.position).comparable:
        return live.position.offsets
    return (0,) * candidate.position.partition_count


def complete(database: Database, table: str) -> None:
    """Exchange all rows of a table that haven't changed places yet; does nothing where all have.

    database: either of the two.

    Raises:
        SinkUnavailable: among others where another server has gone on meanwhile, which knows no cursor.
    """
    key = database.position_key(table)
    current = exchange_of(database.ask(lambda server: server.hgetall(key)))
    if current is None:
        return
    keys = [key, exchanged_key(key)]
    arguments = (current.mark, current.live, current.other)
    pattern = glob_literal(view_key(database.prefix, table)) + "*"
    script = database.script(EXCHANGE_SOME)
    first = database.ask(run_id)
    rows = FIRST_ROWS
    for number in (current.live, current.other):
        cursor = ""
        while cursor != "0":
            answer = script(keys, [*arguments, number, pattern, cursor or "0", rows])
            if answer == OVER:
                return
            cursor, size = answer
            rows = max(1, min(2 * rows, SLICE_ROWS, rows * SLICE_BYTES // max(size, 1)))

    def settle(server: redis.Redis) -> None:
        call = server.register_script(SETTLE)
        if not call(keys=keys, args=[*arguments, str(first or "")]):
            raise Switched("another server has gone on with a scan")

    database.ask(settle)


def exchanged_key(position_key: str) -> str:
    """Return the key of the set of rows that have changed places, in the live database."""
    return f"{position_key}:exchanged"
