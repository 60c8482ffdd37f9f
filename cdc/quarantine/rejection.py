"""Rejected records on their way to the quarantine topic, written by the executor that rejects them.

Row values go to that topic and nowhere else. Kafka's client is imported by the first rejected
record: every Python worker loads this module, and few reject one.
"""

import threading
import time
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from cdc.sink.rejection import Rejected, Source

if TYPE_CHECKING:
    from cdc.kafka.records import Records

_PRODUCERS: dict[str, "Records"] = {}
_LOCK = threading.Lock()
"""Guards _PRODUCERS. A process keeps its producers: where one record is rejected, others follow."""


@dataclass(frozen=True)
class ToQuarantine:
    """Puts rejected records into the pipeline's quarantine topic, as entries of a sink.

    `cdc.quarantine.log` describes the records.
    """

    bootstrap: str
    topic: str
    sink: str
    stops = False

    def put(self, records: Sequence[tuple[Rejected, Source]]) -> None:
        """Write an entry for each record, durable on return. Called by an executor.

        Raises ConnectorError.
        """
        from cdc.kafka.records import Records
        from cdc.quarantine.log import QuarantineKey

        now = round(time.time(), 3)
        entries = []
        for rejected, source in records:
            entry = QuarantineKey(
                self.sink, rejected.topic, rejected.partition, rejected.offset, rejected.id
            )
            note = {
                "reason": rejected.reason,
                "at": now,
                "key": _text(source.key),
                "value": _text(source.value),
            }
            entries.append((entry.to_key(), msgspec.json.encode(note)))
        with _LOCK:
            if self.bootstrap not in _PRODUCERS:
                _PRODUCERS[self.bootstrap] = Records(self.bootstrap)
            _PRODUCERS[self.bootstrap].write(self.topic, entries)


def _text(part: bytes | None) -> str | None:
    return None if part is None else b64encode(part).decode()
