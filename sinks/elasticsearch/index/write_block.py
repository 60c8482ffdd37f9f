"""The block that keeps writers from what readers see, while aliases are switched."""

import time
from collections.abc import Iterable

from cdc.errors import SinkUnavailable
from cdc.sink.contract import SWITCH_S
from cdc.sinks.elasticsearch.client import BLOCKED, unavailable
from cdc.sinks.elasticsearch.server import Server


class WriteBlock:
    """The write blocks of a sink's indices: those that its `promote` sets, and those of others that
    its batches run into.

    Threads: of the sink's, see `cdc.sink.contract.Sink`. Errors: those of `Server`.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._blocked_since = 0.0

    def set(self, indices: Iterable[str]) -> None:
        """Block writes; on return none is under way, and none begins."""
        for answer in self._server.ask_groups("PUT", indices, "/_block/write"):
            if not all(index.get("blocked") for index in answer["indices"]):
                raise unavailable(f"Not all of {self._server.name} has stopped taking writes.")

    def release(self, indices: Iterable[str]) -> None:
        """Let writes in again."""
        query = {"ignore_unavailable": "true"}
        self._server.ask_groups(
            "PUT", indices, "/_settings", {"index.blocks.write": None}, query=query, absent={}
        )

    def release_abandoned(self, error: SinkUnavailable, indices: Iterable[str]) -> None:
        """Release indices that a killed `promote` has left blocked: a running one is done by
        then.

        error: of a batch to these indices; one that has nothing to do with a block is ignored.
        """
        if BLOCKED not in error.message:
            return
        self._blocked_since = self._blocked_since or time.monotonic()
        if time.monotonic() - self._blocked_since > 2 * SWITCH_S:
            self.release(indices)

    def note_written(self) -> None:
        """Note that a batch was written: no index is blocked."""
        self._blocked_since = 0.0
