"""Rollback: show readers the previous generation again, and retain the one that they saw."""

from collections.abc import Mapping, Sequence

import structlog

from cdc.errors import CdcError, SettingsError, SinkError
from cdc.generations.claim import Claim, claim
from cdc.generations.pause import refuse_paused
from cdc.generations.registry import Registry, RetainedView, Rollback
from cdc.model.table import Table
from cdc.sink.contract import Sink

log = structlog.get_logger()


def rollback(
    registry: Registry, sink: Sink, tables: Sequence[Table], retention_s: float
) -> dict[str, RetainedView]:
    """Show readers the retained generation, and retain the live one in its place.

    Returns the retained views by table.

    Continues a rollback that was interrupted. `retention_s`: seconds that the views are retained
    for.

    Raises:
        SettingsError: nothing is retained; another command is at work.
        SinkPaused: nothing is applied to the sink, so that readers might go back.
        SinkUnavailable: the retained generation isn't current: nobody has applied to it.
    """
    with claim(registry, sink.name) as own_claim:
        refuse_paused(own_claim.generations, sink.name)
        work = own_claim.generations.work
        names = work.names if isinstance(work, Rollback) else own_claim.generations.standby_names
        if not names:
            raise SettingsError(
                f"{sink.name} has no generation to go back to: nothing is kept.",
                hint=f"make a new one: cdc -p FILE rebuild {sink.name}",
            )
        return _promote(own_claim, sink, tables, names, retention_s)


def settle_rollback(
    registry: Registry, sink: Sink, tables: Sequence[Table], retention_s: float
) -> None:
    """Complete a rollback that was killed, or undo it where some view can't be promoted.

    It is undone, too, where it has promoted no view yet.
    Afterwards all views of the sink are of the same side, and the registry lists what is retained.
    """
    if not isinstance(registry.read().for_sink(sink.name).work, Rollback):
        return
    with claim(registry, sink.name) as own_claim:
        work = own_claim.generations.work
        if not isinstance(work, Rollback):
            return
        if not _live_tables(sink, tables, work.names):
            own_claim.complete()
            return
        try:
            _promote(own_claim, sink, tables, work.names, retention_s)
        except SinkError as error:
            if registry.read().for_sink(sink.name).work is not None:
                raise
            log.warning("rollback_undone", sink=sink.name, error=error.message)


def retain(
    own_claim: Claim,
    sink: Sink,
    tables: Sequence[Table],
    names: Mapping[str, str],
    retention_s: float,
) -> dict[str, RetainedView]:
    """Record the generations of these tables to retain, and remove all others but the live ones."""
    now = own_claim.clock.time()
    retained = {
        table: RetainedView(name, now + retention_s, now)
        for table, name in names.items()
        if retention_s > 0
    }
    own_claim.complete(retained, [table.qualified for table in tables])
    sink.drop_unreferenced(tables, {table: view.name for table, view in retained.items()})
    return retained


def promote(sink: Sink, tables: Sequence[Table], names: Mapping[str, str]) -> dict[str, str]:
    """Promote these generations. Returns those that readers saw before, by table.

    May be repeated after a kill. A view that a killed command has promoted isn't reported again by
    every sink: its previous generation is then the one that lies beside it.
    """
    previous = sink.promote(tables, names)
    older = {
        table.qualified: sink.generations(table)[1:]
        for table in tables
        if table.qualified not in previous
    }
    former = {name: generations[-1] for name, generations in older.items() if generations}
    return {**former, **previous}


def _promote(
    own_claim: Claim,
    sink: Sink,
    tables: Sequence[Table],
    names: Mapping[str, str],
    retention_s: float,
) -> dict[str, RetainedView]:
    affected = [table for table in tables if table.qualified in names]
    own_claim.announce(Rollback(sink.name, names))
    try:
        previous = promote(sink, affected, names)
    except CdcError:
        switched = _live_tables(sink, affected, names)
        if not switched:
            own_claim.complete()
        elif len(switched) < len(affected):
            _undo(own_claim, sink, switched, names, retention_s)
        raise
    return retain(own_claim, sink, affected, previous, retention_s)


def _undo(
    own_claim: Claim,
    sink: Sink,
    switched: Sequence[Table],
    names: Mapping[str, str],
    retention_s: float,
) -> None:
    """Show readers again what they saw before a rollback that other views than these can't join.

    First that is retained, so that it is kept current. Then it is promoted as a rollback of its
    own, which the next command continues if this one fails.
    """
    newer = retain(own_claim, sink, switched, promote(sink, switched, names), retention_s)
    newer_names = {table: view.name for table, view in newer.items()}
    affected = [table for table in switched if table.qualified in newer_names]
    if affected:
        own_claim.announce(Rollback(sink.name, newer_names))
        retain(own_claim, sink, affected, promote(sink, affected, newer_names), retention_s)


def _live_tables(sink: Sink, tables: Sequence[Table], names: Mapping[str, str]) -> list[Table]:
    """List the tables whose generation of these names is live."""
    views = {table: sink.position(table) for table in tables if table.qualified in names}
    return [
        table
        for table, checkpoint in views.items()
        if checkpoint is not None and checkpoint.generation == names[table.qualified]
    ]
