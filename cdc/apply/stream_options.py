"""What a stream is told when it is made: how often it applies, to which generation, and the work that it
does besides its batches.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from cdc.model.position import Position


class BackgroundWorker(Protocol):
    """Work that a stream does besides its batches, in its own thread. `positions`, by topic, are
    those of the batches that are applied; None stands for offset zero.

    Every method may raise CdcError, which is treated as if a batch had.
    """

    @property
    def sent_per_s(self) -> float | None:
        """Documents that it sends a second; None while it has none to send."""

    def begin(self) -> None:
        """Begin anew. Called whenever a plan has been loaded, before its first batch."""

    def work(self, positions: Mapping[str, Position | None]) -> bool:
        """Work for about a second at most; returns whether there is more to do at once.

        Called after each batch, and every second while there is none.
        """

    def is_current(self, positions: Mapping[str, Position | None]) -> bool:
        """Say whether all work is done that these positions give rise to. Asks no server."""


@dataclass(frozen=True)
class StreamOptions:
    """Options of a stream.

    trigger_s   seconds from the start of a batch to that of the next, at least
    names       the generation to apply to, by table, if readers don't see it
    worker      what is done besides the batches
    """

    trigger_s: float
    names: Mapping[str, str] | None = None
    worker: BackgroundWorker | None = None
