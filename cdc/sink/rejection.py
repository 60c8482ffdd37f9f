"""What becomes of records that a view can't take: the batch stops, or they are put aside and the others go on.

Runs on the executors, beside the destination. Row values go to the quarantine's topic and nowhere else.
"""

import threading
import time
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

if TYPE_CHECKING:
    from cdc.kafka.records import Records

_PRODUCERS: dict[str, "Records"] = {}
_LOCK = threading.Lock()
"""A process keeps its connection to a broker: where one record is rejected, others follow."""
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


@dataclass(frozen=True)
class ToQuarantine:
    """They go to the pipeline's quarantine topic, as entries of a sink: see `cdc.quarantine` for their form."""

    bootstrap: str
    topic: str
    sink: str
    stops = False

    def put(self, records: Sequence[tuple[Rejected, Source]]) -> None:
        from cdc.kafka.records import Records

        at = round(time.time(), 3)
        with _LOCK:
            if self.bootstrap not in _PRODUCERS:
                _PRODUCERS[self.bootstrap] = Records(self.bootstrap)
            _PRODUCERS[self.bootstrap].write(self.topic, [(self._key(one), _note(one, of, at)) for one, of in records])

    def _key(self, rejected: Rejected) -> bytes:
        from cdc.quarantine.log import Entry

        return Entry(self.sink, rejected.topic, rejected.partition, rejected.offset, rejected.id).to_key()


def _note(rejected: Rejected, source: Source, at: float) -> bytes:
    note: dict[str, Any] = {"reason": rejected.reason, "at": at, "key": _text(source.key), "value": _text(source.value)}
    return msgspec.json.encode(note)


def _text(part: bytes | None) -> str | None:
    return None if part is None else b64encode(part).decode()
