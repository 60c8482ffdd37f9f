"""Options of a stream: how often it applies, to which generation, and its work between batches."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from cdc.model.position import Position


class BackgroundWorker(Protocol):
    """Work that a stream does between its batches, in the same thread. `positions` are the positions
    that the batches have reached, by topic; None means offset zero.

    Every method may raise CdcError. The stream treats it like the error of a batch.
    """

    @property
    def sent_per_s(self) -> float | None:
        """Documents sent per second; None while there are none to send."""

    def begin(self) -> None:
        """Begin. Called whenever a plan has been loaded, before its first batch."""

    def work(self, positions: Mapping[str, Position | None]) -> bool:
        """Work for about a second at most. Returns whether there is more to do at once.

        Called after each batch, and every second while there is none; again at once while it returns
        True.
        """

    def is_current(self, positions: Mapping[str, Position | None]) -> bool:
        """Whether all documents that follow from these positions are sent. Asks no server."""


@dataclass(frozen=True)
class StreamOptions:
    """Options of a stream.

    trigger_s   the least seconds between the starts of two batches, see `sink_kinds.TRIGGER`
    names       the generation to apply to, by table, if readers don't see it
    worker      the work between batches
    """

    trigger_s: float
    names: Mapping[str, str] | None = None
    worker: BackgroundWorker | None = None
