"""Blocks on writes. A promotion blocks writes while it switches aliases, so that writers can't
change what readers see. Anyone else's blocks stay.

A promotion marks its indices by an alias before it blocks them, so the blocks that a killed one has
left aren't taken for an operator's. The mark is an alias because every batch reads its indices'
aliases anyway.
"""

import time
from collections.abc import Iterable, Mapping, Sequence

from cdc.errors import SinkBlocked
from cdc.sink.promotion import SWITCH_S
from cdc.sinks.elasticsearch.client import group_names, ignoring_absent, unavailable
from cdc.sinks.elasticsearch.index.blocks import (
    CLOSED,
    WRITE,
    block_message,
    blocks_of,
    lift_hint,
    open_hint,
)
from cdc.sinks.elasticsearch.index.indices import WritableIndex, new_token
from cdc.sinks.elasticsearch.server import Server


class WriteBlock:
    """The write blocks of a sink's indices.

    Threads: of the sink's, see `cdc.sink.contract.Sink`. Errors: see `Server`.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._token = new_token()
        self._since_by_mark: dict[str, float] = {}

    def set(self, places: Sequence[WritableIndex]) -> None:
        """Mark indices, then block writes; on return none is under way, and none begins.

        Call `require_unblocked` before, and `release` whatever becomes of this.
        """
        if not places:
            return
        self._server.switch(
            {"add": {"index": place.index, "alias": place.promotion(self._token)}}
            for place in places
        )
        for group in group_names(place.index for place in places):
            answer = self._server.client.indices.add_block(index=",".join(group), block="write")
            if not all(index.get("blocked") for index in answer["indices"]):
                raise unavailable(f"Not all of {self._server.name} has stopped taking writes.")

    def release(self, places: Sequence[WritableIndex]) -> None:
        """Let writes in again that `set` has blocked, or an earlier promotion of these indices."""
        self._release(
            {
                place.index: sorted({*place.promotions, place.promotion(self._token)})
                for place in places
            }
        )

    def release_abandoned(self, places: Sequence[WritableIndex]) -> None:
        """Release the indices that killed promotions alone have left marked: a running one is done
        by then.
        """
        now = time.monotonic()
        for place in places:
            for mark in place.promotions:
                self._since_by_mark.setdefault(mark, now)
        self._release(
            {
                place.index: place.promotions
                for place in places
                if place.promotions
                and all(now - self._since_by_mark[mark] > 2 * SWITCH_S for mark in place.promotions)
            }
        )

    def require_unblocked(self, places: Iterable[WritableIndex], *others: str) -> None:
        """Raise SinkBlocked, with the command that lifts the block, when somebody has set one or has
        closed an index.

        The indices that a promotion has marked are passed over. others: names of further indices.
        """
        unmarked = [place.index for place in places if not place.promotions]
        for group in group_names([*others, *unmarked]):
            answer = self._server.client.indices.get_settings(
                index=group, flat_settings=True, ignore_unavailable=True
            )
            for index, body in answer.body.items():
                if body["settings"].get(CLOSED) == "true":
                    raise SinkBlocked(f"The index {index} is closed.", hint=open_hint(index))
                for block in blocks_of(body["settings"]):
                    raise SinkBlocked(block_message(index, block), hint=lift_hint(index, block))

    def _release(self, marks_by_index: Mapping[str, Sequence[str]]) -> None:
        """Lift the blocks, then remove the marks: a block without one would stay for ever."""
        if not marks_by_index:
            return
        indices = self._server.client.indices
        for group in group_names(marks_by_index):
            with ignoring_absent():
                indices.put_settings(index=group, settings={WRITE: None}, ignore_unavailable=True)
        # An index' own marks alone: of thousands of indices, each with the marks of all, the server
        # would refuse the body.
        actions = [
            {"remove": {"index": index, "aliases": marks, "must_exist": False}}
            for index, marks in marks_by_index.items()
        ]
        # An index that is gone fails all of them; the next batches of the others remove their marks.
        with ignoring_absent():
            indices.update_aliases(actions=actions)
