"""The registry of generations: builds, retained views and claims, shared through a topic.

The topic <pipeline>.generations has, each under a key of its own:

    ["work", SINK]            the job of a command: `GenerationBuild` or `Rollback`; outlives a
                              command that is killed
    ["kept", SINK, TABLE]     `RetainedView`: the previous generation; `cdc run` keeps it current
                              until it expires
    ["claim", SINK, COMMAND]  a command works on a sink, or waits to; the first in the topic holds
                              the sink
    ["proof", SINK, TABLE]    `Proof`: through which moment the view was proved equal to its source; or
                              `Damage`: rows that differ
    ["pause", SINK]           `Pause`: `cdc run` applies nothing to the sink until the entry is removed
    ["tick", SINK, COMMAND]   once a second: the command is alive, and its progress

The registry never says which generation is live: only the sink knows.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from cdc.config.settings import Pipeline
from cdc.kafka.records import Record
from cdc.kafka.tail import Tail
from cdc.kafka.topics import Topics
from cdc.model.clock import Clock
from cdc.model.generation import FIRST
from cdc.model.position import Position, ViewCheckpoint, distance

Phase = Literal["replay", "catch up", "verify", "promote"]
STALE_S = 10.0
"""Seconds after its last tick at which a command counts as dead."""


@dataclass(frozen=True)
class GenerationBuild:
    """A generation that `cdc rebuild` builds.

    After a crash the same command, and no other, continues it.

    `names`: the generation's name, by table; `done` of `total` records are replayed; times are Unix
    seconds. Stored in the registry's topic: the fields are part of the format.
    """

    sink: str
    phase: Phase
    names: Mapping[str, str]
    since: float
    done: int = 0
    total: int = 0
    rows_per_s: float = 0.0

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the replay ends, at its present speed."""
        return (self.total - self.done) / self.rows_per_s if self.rows_per_s else None


@dataclass(frozen=True)
class Rollback:
    """A promotion of retained views by `cdc rollback`.

    When it is killed the next command completes or undoes it.

    Stored in the registry's topic: the fields are part of the format.
    """

    sink: str
    names: Mapping[str, str]
    phase: Literal["rolling back"] = "rolling back"


Work = GenerationBuild | Rollback


@dataclass(frozen=True)
class RetainedView:
    """The previous generation of a view: retained since `at`, kept current `until` then.

    Unix seconds; stored.
    """

    name: str
    until: float
    at: float


@dataclass(frozen=True)
class Sweep:
    """How far a comparison of all rows of a view has come, slice by slice. Stored.

    since   Unix seconds by Postgres' clock: every row that has been in a slice was compared later
    side    whose rows are listed next: the view's, then the source's
    cursor  where the next slice begins, as that side has it; None: with the first row
    """

    since: float
    side: Literal["view", "source", "end"] = "view"
    cursor: str | None = None


@dataclass(frozen=True)
class Proof:
    """A view was proved equal to its source `through` a moment. Every row of it was compared at
    `complete_at` or later. Both in Unix seconds, by Postgres' clock; stored.

    `generation`: the view's; `shape`: of its tables, see `cdc.verify.proof.view_shapes`; what was committed
    later than `through` lies at or above `offsets`, by partition of the topic with `topic_id`. `repaired`:
    rows that a run has repaired since `cdc verify` or a rebuild compared all of them.
    """

    generation: str
    through: float
    complete_at: float
    topic_id: str
    offsets: Sequence[int]
    shape: str = ""
    sweep: Sweep | None = None
    repaired: int = 0

    def continues(self, other: "Proof | None") -> bool:
        """Whether both go on from the same comparison of all rows."""
        return other is not None and (self.generation, self.shape, self.complete_at) == (
            other.generation,
            other.shape,
            other.complete_at,
        )

    def is_of(self, checkpoint: ViewCheckpoint | None) -> bool:
        """Whether it proves the generation that a view has."""
        return self.generation == (checkpoint.generation if checkpoint else FIRST)

    def holds(self, checkpoint: ViewCheckpoint | None) -> bool:
        """Whether a view is still proved. One that is behind what it had passed then was emptied or lost,
        and applies again what hasn't been compared.
        """
        passed = Position(self.topic_id, tuple(self.offsets))
        return self.is_of(checkpoint) and distance(checkpoint, passed).reached


@dataclass(frozen=True)
class Damage:
    """Rows of a view that differed from its source when they were compared last. Stored.

    generation  of the view
    found_at    Unix seconds
    rows        how many differed
    ids         some of them
    unrepaired  why the run, which repairs rows, hasn't repaired these; empty if it repairs none
    """

    generation: str
    found_at: float
    rows: int
    ids: Sequence[str]
    unrepaired: str = ""


@dataclass(frozen=True)
class Pause:
    """A pause of a sink: `since` when, in Unix seconds, and `by` whom. Stored."""

    since: float
    by: str


@dataclass(frozen=True)
class Progress:
    """Progress of a command, for its tick of every second.

    Small, whatever the size of the job; stored.
    """

    at: float
    done: int = 0
    total: int = 0
    rows_per_s: float = 0.0


@dataclass
class Generations:
    """The registry's entries of one sink, as of the last read."""

    work: Work | None = None
    retained: dict[str, RetainedView] = field(default_factory=dict)
    """By table."""
    proofs: dict[str, Proof] = field(default_factory=dict)
    """By table."""
    damages: dict[str, Damage] = field(default_factory=dict)
    """By table: of views that aren't proved because they differ."""
    pause: Pause | None = None
    claims: dict[str, int] = field(default_factory=dict)
    """By command, the offset of its claim: the first holds the sink."""
    alive_at: dict[str, float] = field(default_factory=dict)
    changed_at: int = -1
    """Offset of the last change of `work` or `retained`. Ticks don't count."""
    now: Callable[[], float] = time.time
    """Returns Unix seconds."""

    @property
    def standby_names(self) -> dict[str, str]:
        """The generation to keep current now, by table.

        That is a retained one that hasn't expired, or that a rollback at work promotes.
        """
        promoted = self.work.names if isinstance(self.work, Rollback) else {}
        now = self.now()
        current = {
            table: view
            for table, view in self.retained.items()
            if view.until > now or table in promoted
        }
        return {table: view.name for table, view in current.items()}

    @property
    def in_progress(self) -> bool:
        """Whether a live command works on the sink now, or waits to."""
        return any(
            self.now() - self.alive_at.get(command, 0.0) < STALE_S for command in self.claims
        )

    @property
    def promotion_in_progress(self) -> bool:
        """Whether a command is showing readers another generation at this moment."""
        return (
            self.work is not None
            and self.work.phase in ("promote", "rolling back")
            and self.in_progress
        )

    def needed_names(self) -> dict[str, str]:
        """Return the generation beside the live one that must not be removed, by table."""
        retained = {table: view.name for table, view in self.retained.items()}
        built = self.work.names if isinstance(self.work, GenerationBuild) else {}
        return {**retained, **built}

    @property
    def holder(self) -> str | None:
        """The command that holds the sink: the first in the topic."""
        return min(self.claims, key=lambda command: self.claims[command], default=None)


class Registry:
    """The registry's topic: reads and writes the entries of each sink.

    Every method raises ConnectorError.

    An instance belongs to one thread.
    """

    def __init__(self, pipeline: Pipeline, kafka: Topics, clock: Clock | None = None) -> None:
        self.clock = clock or Clock()
        self.topic = pipeline.generations_topic
        self._kafka = kafka
        self._sinks: dict[str, Generations] = {}
        self._tail = Tail(
            kafka, self.topic, begin=self._sinks.clear, take=self._apply_record, now=self.clock.time
        )

    def read(self) -> "Registry":
        """Read what is new in the topic. A topic that doesn't exist is empty."""
        if self.topic in self._kafka.existing([self.topic]):
            self._tail.read()
        return self

    def has_changed(self, ends: Mapping[str, Position] | None = None) -> bool:
        """Whether the topic has new records since `read`.

        `ends`: its end by topic, if the caller just read it.
        """
        return self._tail.has_changed(ends)

    def for_sink(self, sink: str) -> Generations:
        """Return the entries of a sink as of the last `read`."""
        return self._sinks.get(sink) or Generations(now=self.clock.time)

    def write(self, *records: tuple[Sequence[str], Any]) -> None:
        """Write (key, value) pairs, in this order, durable on return.

        None as a value deletes the entry.
        """
        dumped = [
            (json.dumps(key).encode(), value and json.dumps(value).encode())
            for key, value in records
        ]
        self._kafka.write(self.topic, dumped)

    def forget_retained(self, sink: str, tables: Sequence[str]) -> None:
        self.write(*((("kept", sink, table), None) for table in tables))

    def _apply_record(self, record: Record) -> None:
        kind, sink, *fields = json.loads(record.key or b"")
        value = json.loads(record.value) if record.value else None
        generations = self._sinks.setdefault(sink, Generations(now=self.clock.time))
        match kind:
            case "work":
                generations.changed_at = record.offset
                generations.work = _work(value) if value else None
            case "kept":
                generations.changed_at = record.offset
                generations.retained.pop(fields[0], None)
                if value:
                    generations.retained[fields[0]] = RetainedView(**value)
            case "proof":
                generations.proofs.pop(fields[0], None)
                generations.damages.pop(fields[0], None)
                if value and "rows" in value:
                    generations.damages[fields[0]] = Damage(**value)
                elif value:
                    generations.proofs[fields[0]] = _proof(value)
            case "pause":
                generations.pause = Pause(**value) if value else None
            case "claim" if value:
                generations.claims[fields[0]] = record.offset
                generations.alive_at[fields[0]] = value["at"]
            case "claim":
                generations.claims.pop(fields[0], None)
                generations.alive_at.pop(fields[0], None)
            case "tick" if value and fields[0] in generations.claims:
                # Ticks of a command whose claim another has ended are ignored: it was stopped for
                # long, and fails at its next step.
                generations.alive_at[fields[0]] = value.pop("at")
                if (
                    isinstance(generations.work, GenerationBuild)
                    and fields[0] == generations.holder
                ):
                    generations.work = replace(generations.work, **value)


def _work(value: Any) -> Work:
    return Rollback(**value) if value["phase"] == "rolling back" else GenerationBuild(**value)


def _proof(value: Any) -> Proof:
    sweep = value.pop("sweep", None)
    return Proof(**value, sweep=Sweep(**sweep) if sweep else None)
