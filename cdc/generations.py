"""Builds of views beside those that readers see: what is under way, and what is kept; shared through a topic.

The topic <pipeline>.generations holds a record for each sink with a second generation; `cdc rebuild` writes it,
`cdc run` keeps current what it says is kept, `cdc status` shows it. What readers see is only ever told by the sink.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Literal

from cdc.change import Position
from cdc.settings import Pipeline
from cdc.topics import Topics

Phase = Literal["replay", "catch up", "verify", "promote", "kept"]
STALE_S = 10.0
"""A rebuild that has written nothing for so long is dead."""


@dataclass(frozen=True)
class Build:
    """The second generation of one sink's views.

    `names`: what it is called, by table; `done` of `total` records are replayed; times are Unix seconds.
    `keep_until` is 0 for one that is being built; one that is kept has it also while a rollback promotes it.
    """

    sink: str
    phase: Phase
    names: Mapping[str, str]
    since: float
    at: float = 0.0
    done: int = 0
    total: int = 0
    rows_per_s: float = 0.0
    keep_until: float = 0.0

    @property
    def alive(self) -> bool:
        """Whether somebody is at work on it now."""
        return self.phase != "kept" and time.time() - self.at < STALE_S

    @property
    def left_s(self) -> float | None:
        """Seconds until the replay ends, at its present speed."""
        return (self.total - self.done) / self.rows_per_s if self.rows_per_s else None


class Builds:
    """The record of each sink as `read` found it; one user per thread. Every method raises ConnectorError."""

    def __init__(self, pipeline: Pipeline, kafka: Topics) -> None:
        self.topic, self._kafka = pipeline.generations_topic, kafka
        self._end: Position | None = None
        self.found: dict[str, Build] = {}

    def read(self) -> "Builds":
        if self.topic in self._kafka.existing([self.topic]):
            self._end = self._kafka.ends([self.topic])[self.topic]
            records = {record.key: record.value for record in self._kafka.all(self.topic)}
            self.found = {one.sink: one for value in records.values() if value for one in [Build(**json.loads(value))]}
        return self

    def moved(self, ends: Mapping[str, Position] | None = None) -> bool:
        """Whether somebody has written since `read`; `ends`: where the topic ends, if that was just asked."""
        return self._end is not None and (ends or self._kafka.ends([self.topic]))[self.topic] != self._end

    def write(self, build: Build) -> Build:
        """Durable on return."""
        now = replace(build, at=round(time.time(), 3))
        self._kafka.write(self.topic, [(build.sink.encode(), json.dumps(asdict(now)).encode())])
        return now

    def forget(self, sink: str) -> None:
        self._kafka.write(self.topic, [(sink.encode(), None)])
