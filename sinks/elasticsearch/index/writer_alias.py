"""The aliases through which one writer writes: whoever takes an index over removes all others."""

from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from cdc.sink.fencing import mismatch
from cdc.sinks.elasticsearch.client import Refusal
from cdc.sinks.elasticsearch.positions import PendingAdvance, Positions


class WriterAlias:
    """A writer's alias of each index, known by the token at its end.

    Threads: of the sink's, see `cdc.sink.contract.Sink`. Errors: those of `Server`.
    """

    def __init__(self, positions: Positions) -> None:
        self._positions = positions
        self._token = _token()

    def name(self, pending: PendingAdvance) -> str:
        """Return the alias through which this writer writes a step."""
        return pending.place.writer(self._token)

    def renew(self) -> None:
        """Take another token, so that nothing sent through the aliases until now can arrive after
        the next `take_over`.
        """
        self._token = _token()

    def take_over(self, pending: Sequence[PendingAdvance]) -> None:
        """Replace the writers' aliases of these indices by this writer's, if no other writer has
        done so meanwhile.

        Raises:
            Fenced: somebody has. PositionLost: an index is gone.
        """
        actions = [action for step in pending for action in self._actions(step)]
        try:
            if actions:
                self._positions.server.switch(actions)
        except Refusal as error:
            if error.status != 404:
                raise
            self._positions.require_indices(pending)
            # Of two who take over at the same time, the other has been quicker.
            advance = pending[0].advance
            raise mismatch(advance.table, advance.start, advance.start, ours=False) from None

    def _actions(self, pending: PendingAdvance) -> list[dict[str, Any]]:
        index, writers, own_alias = pending.place.index, pending.place.writers, self.name(pending)
        actions: list[dict[str, Any]] = [
            {"remove": {"index": index, "alias": alias, "must_exist": True}}
            for alias in sorted(set(writers) - {own_alias})
        ]
        if own_alias not in writers:
            actions.append({"add": {"index": index, "alias": own_alias}})
        return actions


def _token() -> str:
    return uuid4().hex[:12]
