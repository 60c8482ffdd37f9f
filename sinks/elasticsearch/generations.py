"""Generations of the index: each view's is an index of its own, and the readers' aliases say which
are live.
"""

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from cdc.model.table import Table
from cdc.sink.promotion import wait_until_caught_up, would_go_back
from cdc.sinks.elasticsearch.client import group_names
from cdc.sinks.elasticsearch.index.indices import generation_of
from cdc.sinks.elasticsearch.index.layout import Layout
from cdc.sinks.elasticsearch.index.write_block import WriteBlock
from cdc.sinks.elasticsearch.positions import Positions, Record
from cdc.sinks.elasticsearch.server import Server


def promote(
    live: Positions,
    candidate: Positions,
    tables: Sequence[Table],
    names: Mapping[str, str],
    sink: str,
) -> dict[str, str]:
    """Switch all aliases in one request; see `Sink.promote`.

    Meanwhile nobody writes to what readers see, so that it isn't ahead. A batch that is cut by this
    has shown some rows already: the new generation has to have them as well.
    """
    server = live.server
    indices = live.indices
    places = indices.find(tables)
    live_indices = {name: place.index for name, place in places.items()}
    new_indices = {table.qualified: indices.name(table, names[table.qualified]) for table in tables}
    switched = [
        table
        for table in tables
        if live_indices.get(table.qualified) != new_indices[table.qualified]
    ]
    if not switched:
        return {}
    replaced = [places[table.qualified] for table in switched if table.qualified in places]
    lagging: list[Table] = []

    def is_level(records: Mapping[str, Record]) -> bool:
        lagging[:] = _lagging(candidate, switched, records)
        return not lagging

    wait_until_caught_up(lambda: is_level(live.records(switched)), sink, lagging)
    block = WriteBlock(server)
    block.require_unblocked(replaced)
    try:
        with ThreadPoolExecutor(1) as pool:
            # Most of the new rows become visible while the block is set: it takes some 250 ms under
            # load, and this up to as long. The rest follows below.
            refresh = pool.submit(server.refresh, list(new_indices.values()))
            block.set(replaced)
        refresh.result()
        wait_until_caught_up(partial(is_level, live.records(switched)), sink, lagging)
        _prepare_for_readers(server, switched, new_indices)
        server.switch(indices.switch_actions(switched, live_indices, new_indices))
    finally:
        block.release(replaced)
    return {
        table.qualified: generation_of(live_indices[table.qualified])
        for table in switched
        if table.qualified in live_indices
    }


def _prepare_for_readers(
    server: Server, tables: Sequence[Table], indices: Mapping[str, str]
) -> None:
    """Restore the settings that made the load cheap, and let searches see the rows.

    Indices with the same settings share requests. Where none differs, as after a rollback, none is
    sent: the server would rewrite its cluster's state while nobody can write to the view.
    """
    current: dict[str, Any] = {}
    for group in group_names(indices.values()):
        current |= server.client.indices.get_settings(index=group, flat_settings=True).body
    indices_by_settings: dict[str, list[str]] = {}
    for table in tables:
        index = indices[table.qualified]
        restored = Layout.of(table).restored_settings
        if not _has_settings(current[index]["settings"], restored):
            indices_by_settings.setdefault(json.dumps(restored), []).append(index)
    for settings, names in indices_by_settings.items():
        for group in group_names(names):
            server.client.indices.put_settings(index=group, settings=json.loads(settings))
    server.refresh(indices.values())


def _has_settings(current: Mapping[str, str], restored: Mapping[str, Any]) -> bool:
    """Say whether an index has these settings; None stands for the server's default."""
    return all(
        current.get(f"index.{name}") == (None if value is None else str(value).lower())
        for name, value in restored.items()
    )


def _lagging(
    candidate: Positions, tables: Sequence[Table], live: Mapping[str, Record]
) -> list[Table]:
    """List the tables whose view of the candidate lacks what readers may have seen of the live one."""
    checkpoints = candidate.checkpoints(tables)

    def is_level(table: Table) -> bool:
        record = live.get(table.qualified)
        stored = checkpoints[table.qualified]
        if record is None or not record.visible:
            return True
        return stored is not None and not would_go_back(
            stored, record.visible_checkpoint(stored.position)
        )

    return [table for table in tables if not is_level(table)]
