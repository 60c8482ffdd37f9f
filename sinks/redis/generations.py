"""Generations of the cache: each lies in a database of its own, and two change places as a whole."""

import json
from collections.abc import Collection, Sequence

from cdc.model.table import Table
from cdc.sink.promotion import would_go_back
from cdc.sinks.redis.checkpoint import checkpoint_of, expected_fields
from cdc.sinks.redis.database import Database
from cdc.sinks.redis.positions import Positions
from cdc.sinks.redis.scripts import EXCHANGE
from cdc.sinks.redis.tables import copy_table, drop_table, empty_table, other_tables


def bring_along(names: Collection[str], live: Database, candidate: Database) -> None:
    """Copy tables that the pipeline has no more to the candidate, so that their readers keep them.

    names: the pipeline's tables.
    """
    for name in other_tables(candidate, names):
        drop_table(candidate, name)
    for name in other_tables(live, names):
        copy_table(name, live, candidate)


def exchange(
    live: Positions, candidate: Positions, tables: Sequence[Table], lagging: list[Table]
) -> bool:
    """Exchange two databases in one script, if no position has moved since they were compared.

    Returns whether they were exchanged: not while a view of the candidate would go back. `lagging` is
    filled with the tables of such views.
    """
    comparisons = []
    lagging.clear()
    for table, live_fields, candidate_fields in zip(
        tables, live.read_all(tables), candidate.read_all(tables), strict=True
    ):
        live_checkpoint, candidate_checkpoint = (
            checkpoint_of(live_fields),
            checkpoint_of(candidate_fields),
        )
        if live_checkpoint and (
            candidate_checkpoint is None or would_go_back(candidate_checkpoint, live_checkpoint)
        ):
            lagging.append(table)
        comparisons += [(live.database, live_fields), (candidate.database, candidate_fields)]
    if lagging:
        return False
    keys = [live.database.position_key(table.qualified) for table in tables for _ in range(2)]
    expectations = [
        {"database": str(database.number), "key": key, "fields": expected_fields(fields)}
        for (database, fields), key in zip(comparisons, keys, strict=True)
    ]
    arguments = (live.database.number, candidate.database.number, json.dumps(expectations))
    return bool(live.database.ask(lambda server: server.eval(EXCHANGE, 0, *arguments)))


def drop_unreferenced(spare: Database, tables: Sequence[Table], keep: Collection[str]) -> None:
    """Empty the tables of the spare database that are not kept, and drop those that are no view's
    any more.
    """
    for table in tables:
        if table.qualified not in keep:
            empty_table(spare, table.qualified, "")
    for name in other_tables(spare, {*keep, *(table.qualified for table in tables)}):
        drop_table(spare, name)
