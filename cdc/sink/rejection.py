"""What becomes of records that a view can't take: the batch stops, or they are put aside and the others go on.

Runs on the executors, beside the destination. `cdc.quarantine.rejection` is the way to put them aside.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

DECODE, UNHOLDABLE, REFUSED = "decode", "unholdable", "refused"
"""Kinds: it isn't what the connector writes; no view of this sort can hold it; this one won't take it."""


class Rejected(msgspec.Struct, frozen=True):
    """A record that isn't applied, and why, in words that name a column at most; id: of its row, if the key tells."""

    topic: str
    partition: int
    offset: int
    id: str | None
    kind: str
    reason: str


class Source(msgspec.Struct, frozen=True, gc=False):
    """A record as the log has it."""

    offset: int
    key: bytes | None
    value: bytes | None


class Rejection(Protocol):
    """Can be pickled."""

    @property
    def stops(self) -> bool:
        """Whether one rejected record ends the batch, with nothing that comes after it applied."""

    def put(self, records: Sequence[tuple[Rejected, Source]]) -> None:
        """Keep them where they are safe, durable on return. Raises ConnectorError."""


@dataclass(frozen=True)
class Stop:
    """The batch fails. For `on_error: stop`."""

    stops = True

    def put(self, records: Sequence[tuple[Rejected, Source]]) -> None:
        """They are still in the log, ahead of the position."""


@dataclass(frozen=True)
class Skip:
    """They are left out, and reported: for views whose rejected records are another one's matter."""

    stops = False

    def put(self, records: Sequence[tuple[Rejected, Source]]) -> None:
        """They are known already, or of no concern."""
