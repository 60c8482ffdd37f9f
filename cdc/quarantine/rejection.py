"""Rejected records on their way to the quarantine's topic, written by the executor that met them.

Row values go to that topic and nowhere else. What writes is imported by the first record that is rejected: every Python
worker loads this module.
"""

import threading
import time
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from cdc.sink.rejection import Rejected, Source

if TYPE_CHECKING:
    from cdc.kafka.records import Records

_PRODUCERS: dict[str, "Records"] = {}
_LOCK = threading.Lock()
"""A process keeps its connection to a broker: where one record is rejected, others follow."""


@dataclass(frozen=True)
class ToQuarantine:
    """They go to the pipeline's quarantine topic, as entries of a sink: see `cdc.quarantine.store` for their form."""

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
