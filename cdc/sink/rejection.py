"""Records that a view can't hold: the batch stops, or they are quarantined and the others go on.

Runs on the executors. `cdc.quarantine.rejection` puts records into quarantine.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

DECODE = "decode"
"""Kind of rejection: the connector doesn't write such a record."""
UNHOLDABLE = "unholdable"
"""No view of this sort can hold it."""
REFUSED = "refused"
"""This view won't take it."""


class Rejected(msgspec.Struct, frozen=True):
    """A record that isn't applied.

    id      of its row; None where the id can't be read from the key
    kind    DECODE, UNHOLDABLE or REFUSED
    reason  in words that name a column at most, never a value
    """

    topic: str
    partition: int
    offset: int
    id: str | None
    kind: str
    reason: str


class Source(msgspec.Struct, frozen=True, gc=False):
    offset: int
    key: bytes | None
    value: bytes | None


class Rejection(Protocol):
    """What is done with records that can't be applied.

    Pickled with the lane; the task's thread makes all calls.
    """

    @property
    def stops(self) -> bool:
        """Whether one rejected record ends the batch, with nothing that comes after it applied."""

    def put(self, records: Sequence[tuple[Rejected, Source]]) -> None:
        """Keep records where they are safe; durable on return, since the position moves past them
        next.

        Called up to twice per chunk, before the rows are written and after. May get the same record
        again when a task is repeated.

        Raises:
            KafkaUnavailable: the broker is away; the task ends and the batch is repeated.
            ConnectorError: they can't be kept.
        """


@dataclass(frozen=True)
class Stop:
    """The batch fails at the first such record. For `on_error: stop`."""

    stops = True

    def put(self, records: Sequence[tuple[Rejected, Source]]) -> None:
        """Keep nothing: the records are still in the log, ahead of the position."""


@dataclass(frozen=True)
class Skip:
    """Leave such records out: for a standby. The live view deals with them."""

    stops = False

    def put(self, records: Sequence[tuple[Rejected, Source]]) -> None:
        """Keep nothing: the records are in quarantine already, or of no concern."""
