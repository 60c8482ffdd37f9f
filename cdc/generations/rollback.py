"""Which of two generations readers see: back to the one before, and what is retained from then on."""

import time
from collections.abc import Mapping, Sequence

from cdc.errors import CdcError, SettingsError
from cdc.generations.claim import Claim, claim
from cdc.generations.registry import Registry, Retained, RollingBack
from cdc.model.table import Table
from cdc.sink.contract import Sink


def rollback(registry: Registry, sink: Sink, tables: Sequence[Table], kept_s: float) -> dict[str, Retained]:
    """Show readers again what they saw before; what they see now is retained in its place, by table.

    Goes on with one that was ended in whatever way.

    Raises:
        SettingsError: nothing is retained; another command is at work.
        SinkUnavailable: the retained generation isn't current: nobody has applied to it.
    """
    with claim(registry, sink.name) as held:
        work = held.generations.work
        names = work.names if isinstance(work, RollingBack) else held.generations.due
        if not names:
            raise SettingsError(
                f"{sink.name} has no generation to go back to: nothing is kept.",
                hint=f"make one anew: cdc -p FILE rebuild {sink.name}",
            )
        return _show(held, sink, tables, names, kept_s)


def settle_rollback(registry: Registry, sink: Sink, tables: Sequence[Table], kept_s: float) -> None:
    """End a rollback that was killed, or take it back where readers have seen nothing of it yet.

    What comes next finds a sink whose views are all of the same side, and what is retained as it is.
    """
    if not isinstance(registry.read().of(sink.name).work, RollingBack):
        return
    with claim(registry, sink.name) as held:
        work = held.generations.work
        if not isinstance(work, RollingBack):
            return
        if _shown(sink, tables, work.names):
            _show(held, sink, tables, work.names, kept_s)
        else:
            held.end()


def retain(
    held: Claim, sink: Sink, tables: Sequence[Table], names: Mapping[str, str], kept_s: float
) -> dict[str, Retained]:
    """Record what is kept beside the live views of tables from now on, and remove all else of them."""
    now = time.time()
    retained = {table: Retained(name, now + kept_s, now) for table, name in names.items() if kept_s > 0}
    held.end(retained, [table.qualified for table in tables])
    sink.drop_unreferenced(tables, {table: one.name for table, one in retained.items()})
    return retained


def before(sink: Sink, tables: Sequence[Table]) -> dict[str, str]:
    """What readers saw before a switch whose command was killed, by table: it knew, and could not say."""
    others = {table.qualified: sink.generations(table)[1:] for table in tables}
    return {name: generations[-1] for name, generations in others.items() if generations}


def _show(
    held: Claim, sink: Sink, tables: Sequence[Table], names: Mapping[str, str], kept_s: float
) -> dict[str, Retained]:
    concerned = [table for table in tables if table.qualified in names]
    held.begin(RollingBack(sink.name, names))
    try:
        seen = sink.promote(concerned, names)
    except CdcError:
        if not _shown(sink, concerned, names):
            held.end()
        raise
    lacking = [table for table in concerned if table.qualified not in seen]
    return retain(held, sink, concerned, {**before(sink, lacking), **seen}, kept_s)


def _shown(sink: Sink, tables: Sequence[Table], names: Mapping[str, str]) -> bool:
    """Whether readers see any of these generations."""
    seen = ((names[table.qualified], sink.position(table)) for table in tables if table.qualified in names)
    return any(stored is not None and stored.generation == name for name, stored in seen)
