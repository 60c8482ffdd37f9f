"""Keep current what `cdc rebuild` has left beside the live views, for as long as it says, so that a way back is right.

In:  the records of `cdc.generations`. Out: a stream for each kept generation; those whose time is over are removed.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack

import structlog

from cdc.change import Table
from cdc.errors import CdcError
from cdc.generations import Build, Builds
from cdc.settings import Pipeline
from cdc.sink import Sink
from cdc.stream import Stream
from cdc.topics import Topics

Follow = Callable[[Sink, Build], AbstractContextManager[Stream]]
log = structlog.get_logger()


class Keeper:
    """Looked after by the loop of `cdc run`; `follow` applies changes to a generation while it is open."""

    def __init__(self, pipeline: Pipeline, sinks: Sequence[Sink], tables: Sequence[Table], follow: Follow) -> None:
        self._kafka = Topics(pipeline.kafka)
        self._builds = Builds(pipeline, self._kafka)
        self._sinks, self._tables, self._follow = {sink.name: sink for sink in sinks}, tables, follow
        self._kept: dict[str, tuple[Mapping[str, str], ExitStack]] = {}
        self._read = False

    def look(self) -> None:
        """Begin and end streams as the records say. Failures are logged: nothing that readers see depends on it."""
        try:
            if not self._read or self._builds.moved():
                self._builds.read()
                self._read = True
            for name, sink in self._sinks.items():
                self._look_at(sink, self._builds.found.get(name))
        except CdcError as error:
            log.warning("can't look at the generations", error=error.message)

    def close(self) -> None:
        for name in list(self._kept):
            self._end(name)
        self._kafka.close()

    def _look_at(self, sink: Sink, build: Build | None) -> None:
        # While a rollback shows it to readers it has to be current more than ever.
        kept = build if build and build.keep_until > time.time() else None
        if sink.name in self._kept and self._kept[sink.name][0] != (kept and kept.names):
            self._end(sink.name)
        if kept and sink.name not in self._kept:
            scope = ExitStack()
            scope.enter_context(self._follow(sink, kept))
            self._kept[sink.name] = kept.names, scope
        if build and build.phase == "kept" and not kept:
            log.info("removes the generation before", sink=sink.name)
            self._builds.forget(sink.name)
            sink.sweep([table for table in self._tables if table.qualified in build.names], {})

    def _end(self, name: str) -> None:
        self._kept.pop(name)[1].close()
