"""Which of two generations readers see: back to the one before, and what is kept from then on."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from cdc.change import Table
from cdc.errors import CdcError, SettingsError
from cdc.generations import Build, Builds
from cdc.sink import Sink


def rollback(builds: Builds, sink: Sink, tables: Sequence[Table], kept_s: float) -> Build:
    """Show readers again what they saw before; what they see now is kept in its place.

    Raises:
        SettingsError: nothing is kept.
        SinkUnavailable: the kept generation isn't current: nobody has applied to it.
    """
    found = builds.read().found.get(sink.name)
    if found is None or not found.keep_until or found.alive:
        under_way = f"another command is at work ({found.phase})" if found else "nothing is kept"
        raise SettingsError(
            f"{sink.name} has no generation to go back to: {under_way}.",
            hint=f"make one anew: cdc -p FILE rebuild {sink.name}",
        )
    mine = [table for table in tables if table.qualified in found.names]
    builds.write(replace(found, phase="promote"))
    try:
        kept = sink.promote(mine, found.names)
    except CdcError:
        builds.write(found)
        raise
    return keep(builds, sink, mine, kept, kept_s)


def keep(builds: Builds, sink: Sink, tables: Sequence[Table], names: Mapping[str, str], kept_s: float) -> Build:
    """Record what is kept beside the live views from now on, and remove all else."""
    now = time.time()
    build = Build(sink.name, "kept", dict(names), now, keep_until=now + kept_s)
    if names and kept_s > 0:
        build = builds.write(build)
        sink.sweep(tables, names)
    else:
        retire(builds, sink, tables)
    return build


def retire(builds: Builds, sink: Sink, tables: Sequence[Table]) -> None:
    """Forget the second generation, then remove it: what is left of it when that fails is a leftover, no way back."""
    builds.forget(sink.name)
    sink.sweep(tables, {})
