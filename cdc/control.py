"""What the pipeline's control topics say: which changes are dead, what tables looked like when, how they are sent.

In:  the topics of `cdc.truncation` and `cdc.ddl`, the registration. Out: floors, definitions, and whether they have
changed since.
Invariant: asked after the end of a batch is known, `moved` misses nothing that was committed before any change in it:
the connector writes both in commit order, and a broker that hasn't yet shown one of them is waited for.
"""

import json
import time
from collections.abc import Mapping

from cdc import registered
from cdc.change import Position
from cdc.ddl import Definition, lsn_number, parse
from cdc.errors import KafkaUnavailable
from cdc.floors import Floors
from cdc.records import Record
from cdc.registered import Registration
from cdc.settings import Pipeline
from cdc.topics import Topics

WAIT_S = 20.0
POLL_S = 0.005


class Control:
    """Reads when told to; one reader per thread."""

    def __init__(self, pipeline: Pipeline, kafka: Topics) -> None:
        self._kafka, self._pipeline = kafka, pipeline
        self._truncation, self._ddl = (pipeline.topic(f"cdc.{name}") for name in ("truncation", "ddl"))
        self.topics = [self._truncation, self._ddl, pipeline.registered_topic]
        self._seen: dict[str, Position] = {}
        self.registration = Registration()
        self.floors = Floors()
        self.definitions: tuple[Definition, ...] = ()

    def read(self) -> None:
        """Bring floors and definitions up to now. Raises ConnectorError."""
        self._seen = self._decided()
        self.registration = registered.read(self._kafka, self._pipeline) or Registration()
        lsns = dict(filter(None, map(_floor, self._current(self._truncation))))
        self.floors = Floors(self.registration.epoch, lsns)
        found = (parse(record.value or b"") for record in self._current(self._ddl))
        self.definitions = tuple(one for one in found if one)

    def _current(self, topic: str) -> list[Record]:
        """The records that are of the current server: another's LSNs and numbers mean something else."""
        start = self.registration.start(topic, self._seen[topic].topic_id)
        return [record for record in self._kafka.all(topic) if record.offset >= sum(start)]

    def moved(self, ends: Mapping[str, Position] | None = None) -> bool:
        """Whether there is something to read that `read` hasn't seen; `ends`: where the topics end, decided or not."""
        found = ends or self._ends(decided=False)
        return any(found[topic] != self._seen[topic] for topic in self.topics)

    def _decided(self) -> dict[str, Position]:
        """The topics' ends, once whatever is written there is committed or not: markers reach topics one by one."""
        written, deadline = self._ends(decided=False), time.monotonic() + WAIT_S
        while (ends := self._ends(decided=True)) != written:
            if time.monotonic() > deadline:
                raise KafkaUnavailable(
                    f"A transaction in {self._truncation} or {self._ddl} has been open for {WAIT_S:.0f} s.",
                    hint="is the connector's worker alive? it is tried again",
                )
            time.sleep(POLL_S)
            written = self._ends(decided=False)
        return ends

    def _ends(self, *, decided: bool) -> dict[str, Position]:
        return self._kafka.ends(self.topics, decided=decided)


def _floor(record: Record) -> tuple[str, int] | None:
    """The floor of one table; a later record of the same table stands for it."""
    row = (json.loads(record.value).get("after") if record.value else None) or {}
    return (row["table_name"], lsn_number(row["lsn"])) if row else None
