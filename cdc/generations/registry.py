"""Generations of views beside those that readers see: who makes one, what is retained; shared through a topic.

The topic <pipeline>.generations holds, each under a key of its own:

    ["work", SINK]            what a command is about, while it is: `Building` or `RollingBack`; outlives its command
    ["kept", SINK, TABLE]     `Retained`: what readers saw before; `cdc run` keeps it current until its time is over
    ["claim", SINK, COMMAND]  that a command works on a sink, or waits to; the first in the topic holds the sink
    ["tick", SINK, COMMAND]   once a second: that it is alive, and how far it is

What readers see is only ever told by the sink.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from cdc.config.settings import Pipeline
from cdc.kafka.records import Record
from cdc.kafka.tail import Tail
from cdc.kafka.topics import Topics
from cdc.model.position import Position

Phase = Literal["replay", "catch up", "verify", "promote"]
STALE_S = 10.0
"""A command that has written nothing for so long is dead."""


@dataclass(frozen=True)
class Building:
    """A generation that `cdc rebuild` makes. The same command, and only that, goes on with it after a crash.

    `names`: what it is called, by table; `done` of `total` records are replayed; times are Unix seconds.
    """

    sink: str
    phase: Phase
    names: Mapping[str, str]
    since: float
    done: int = 0
    total: int = 0
    rows_per_s: float = 0.0

    @property
    def left_s(self) -> float | None:
        """Seconds until the replay ends, at its present speed."""
        return (self.total - self.done) / self.rows_per_s if self.rows_per_s else None


@dataclass(frozen=True)
class RollingBack:
    """What was retained is being shown to readers by `cdc rollback`. Whoever comes next ends it or takes it back."""

    sink: str
    names: Mapping[str, str]
    phase: Literal["rolling back"] = "rolling back"


Work = Building | RollingBack


@dataclass(frozen=True)
class Retained:
    """A view as readers saw it before: kept current `until` then; `at`: since when. Unix seconds."""

    name: str
    until: float
    at: float


@dataclass(frozen=True)
class Progress:
    """How far a command is, as it says every second: small, whatever it is at work on."""

    at: float
    done: int = 0
    total: int = 0
    rows_per_s: float = 0.0


@dataclass
class Generations:
    """Of one sink, as the topic was read last."""

    work: Work | None = None
    retained: dict[str, Retained] = field(default_factory=dict)
    """By table."""
    claims: dict[str, int] = field(default_factory=dict)
    """By command, where in the topic it is: the first holds the sink."""
    alive_at: dict[str, float] = field(default_factory=dict)
    changed_at: int = -1
    """Where in the topic the last change of `work` or `retained` is: ticks are none."""

    @property
    def due(self) -> dict[str, str]:
        """What is to be kept current now, by table; also until a rollback that shows it to readers has ended."""
        shown = self.work.names if isinstance(self.work, RollingBack) else {}
        now = time.time()
        return {table: one.name for table, one in self.retained.items() if one.until > now or table in shown}

    @property
    def overdue(self) -> list[str]:
        """Tables whose retained view isn't needed any more."""
        due = self.due
        return [table for table in self.retained if table not in due]

    @property
    def busy(self) -> bool:
        """Whether a command is at work on the sink now."""
        return any(time.time() - self.alive_at.get(command, 0.0) < STALE_S for command in self.claims)

    @property
    def showing(self) -> bool:
        """Whether readers are being shown another generation at this moment."""
        return self.work is not None and self.work.phase in ("promote", "rolling back") and self.busy

    def needed(self) -> dict[str, str]:
        """The generation beside the live one that a table needs, if any."""
        retained = {table: one.name for table, one in self.retained.items()}
        return {**retained, **(self.work.names if isinstance(self.work, Building) else {})}

    @property
    def holder(self) -> str | None:
        return min(self.claims, key=lambda command: self.claims[command], default=None)


class Registry:
    """What the topic says of each sink, as of the last `read`; one user per thread.

    Every method raises ConnectorError.
    """

    def __init__(self, pipeline: Pipeline, kafka: Topics) -> None:
        self.topic, self._kafka = pipeline.generations_topic, kafka
        self._sinks: dict[str, Generations] = {}
        self._tail = Tail(kafka, self.topic, begin=self._sinks.clear, take=self._take)

    def read(self) -> "Registry":
        if self.topic in self._kafka.existing([self.topic]):
            self._tail.read()
        return self

    def moved(self, ends: Mapping[str, Position] | None = None) -> bool:
        """Whether somebody has written since `read`; `ends`: where the topic ends, if that was just asked."""
        return self._tail.moved(ends)

    def of(self, sink: str) -> Generations:
        return self._sinks.get(sink) or Generations()

    def write(self, *records: tuple[Sequence[str], Any]) -> None:
        """Values of keys, None to forget one; in this order, durable on return."""
        dumped = [(json.dumps(key).encode(), value and json.dumps(value).encode()) for key, value in records]
        self._kafka.write(self.topic, dumped)

    def retire(self, sink: str, tables: Sequence[str]) -> None:
        """Forget what was retained of these tables."""
        self.write(*((("kept", sink, table), None) for table in tables))

    def _take(self, record: Record) -> None:
        key = record.key or b""
        # One of before there were several kinds of them is the name of a sink.
        if not key.startswith(b"["):
            return
        kind, sink, *rest = json.loads(key)
        value = json.loads(record.value) if record.value else None
        if kind in TAKE:
            TAKE[kind](self._sinks.setdefault(sink, Generations()), record, value, *rest)


def _take_work(generations: Generations, record: Record, value: Any) -> None:
    generations.changed_at = record.offset
    kinds: dict[str, type[Work]] = {"rolling back": RollingBack}
    generations.work = kinds.get(value["phase"], Building)(**value) if value else None


def _take_retained(generations: Generations, record: Record, value: Any, table: str) -> None:
    generations.changed_at = record.offset
    if value:
        generations.retained[table] = Retained(**value)
    else:
        generations.retained.pop(table, None)


def _take_claim(generations: Generations, record: Record, value: Any, command: str) -> None:
    if value:
        generations.claims[command] = record.offset
        generations.alive_at[command] = value["at"]
    else:
        generations.claims.pop(command, None)
        generations.alive_at.pop(command, None)


def _take_tick(generations: Generations, _: Record, value: Any, command: str) -> None:
    # One whose claim another has ended: it was stopped for long, and will learn of it at its next step.
    if not value or command not in generations.claims:
        return
    progress = Progress(**value)
    generations.alive_at[command] = progress.at
    if isinstance(generations.work, Building) and command == generations.holder:
        told = {name: value for name, value in asdict(progress).items() if name != "at"}
        generations.work = replace(generations.work, **told)


TAKE: Mapping[str, Callable[..., None]] = {
    "work": _take_work,
    "kept": _take_retained,
    "claim": _take_claim,
    "tick": _take_tick,
}
