"""Everything that the pages show, as it was last seen. A request asks no server."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from cdc.config.settings import Pipeline
from cdc.generations.registry import Generations, Registry
from cdc.kafka.topics import Topics
from cdc.model.finding_codes import CAPTURE
from cdc.observe.run_log import LagSample, read_runs
from cdc.observe.sampler import SILENT_S, Sample, Sampler
from cdc.observe.status import Status
from cdc.quarantine.log import QuarantinedRecord, QuarantineLog

Lags = Mapping[str, float | None]
"""Seconds of lag by hop; None where it couldn't be measured."""


@dataclass(frozen=True)
class Span:
    """A stretch of time that is plotted, in slots of `slot_s` seconds: the worst of each."""

    name: str
    length_s: int
    slot_s: int

    @property
    def slots(self) -> int:
        return self.length_s // self.slot_s


SPANS = {span.name: span for span in (Span("hour", 3600, 20), Span("day", 86_400, 240))}


@dataclass(frozen=True)
class Series:
    """The lag of a hop by slot, the oldest first, up to `until` (Unix seconds); None: unmeasured."""

    hop: str
    span: Span
    until: float
    values: Sequence[float | None]

    @property
    def worst(self) -> float | None:
        """The greatest lag; None when none was measured."""
        return max((value for value in self.values if value is not None), default=None)


def lags_of(status: Status) -> Lags:
    """Take the lag of each hop from a status."""
    beat = status.heartbeat
    captured = None if beat is None else beat.age_s if beat.late else beat.delay_s
    by_sink = {f"Kafka -> {sink.name}": sink.lag_seconds for sink in status.sinks}
    return {CAPTURE: captured, **by_sink}


class LagHistory:
    """The samples of the last day, the worst lag of each slot. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slots: dict[str, dict[int, dict[str, float | None]]] = {name: {} for name in SPANS}

    def add(self, at: float, lags: Lags) -> None:
        """Add the lags at a moment, in Unix seconds, and drop those that are too old to be plotted."""
        with self._lock:
            for name, span in SPANS.items():
                slots = self._slots[name]
                number = int(at // span.slot_s)
                slot = slots.setdefault(number, {})
                for hop, lag in lags.items():
                    measured = [value for value in (slot.get(hop), lag) if value is not None]
                    slot[hop] = max(measured, default=None)
                oldest = number - span.slots
                for old_number in [key for key in slots if key <= oldest]:
                    del slots[old_number]

    def series(self, span: Span, now: float) -> list[Series]:
        """Return the series of all hops that were ever measured within a span."""
        last = int(now // span.slot_s)
        numbers = range(last - span.slots + 1, last + 1)
        with self._lock:
            slots = {number: dict(self._slots[span.name].get(number, {})) for number in numbers}
        hops = {hop: None for slot in slots.values() for hop in slot}
        until = (last + 1) * span.slot_s
        return [
            Series(hop, span, until, [slots[number].get(hop) for number in numbers]) for hop in hops
        ]


PATIENCE_S = 5.0
"""Seconds to wait for a broker that is away."""
END_S = 8.0
"""Seconds that looks have to end: longer than one takes while a server hangs."""


@dataclass(frozen=True)
class BuildProgress:
    """A rebuild or a rollback of a sink. `alive`: a command works on it at this moment."""

    sink: str
    phase: str
    tables: tuple[str, ...]
    alive: bool
    since: float | None = None
    done: int = 0
    total: int = 0
    rows_per_s: float = 0.0


@dataclass(frozen=True)
class RetainedGeneration:
    """A generation that is kept current for a rollback, until `until` (Unix seconds)."""

    sink: str
    table: str
    name: str
    until: float


@dataclass(frozen=True)
class ControlState:
    """Records in quarantine, in the order of their places; builds; generations kept for a
    rollback.
    """

    quarantine: tuple[QuarantinedRecord, ...] = ()
    builds: tuple[BuildProgress, ...] = ()
    retained: tuple[RetainedGeneration, ...] = ()
    redrives: int = 0
    """Redrives that were requested and not tried yet."""
    lags: Mapping[str, Sequence[LagSample]] = field(default_factory=dict)
    """Samples of runs by sink, in the first state of a connection only: the page measures on."""


class ControlReader:
    """Reads the control topics through a connection that stays open. One thread uses it."""

    def __init__(self, load: Callable[[], Pipeline]) -> None:
        """`load` reads the pipeline file; it is called whenever the connection is made."""
        self._load = load
        self._open: tuple[Topics, QuarantineLog, Registry, Pipeline] | None = None

    def read(self) -> ControlState:
        """Read what is new. Raises CdcError: a broker that is away, a file with a mistake."""
        try:
            lags: Mapping[str, Sequence[LagSample]] = {}
            if self._open is None:
                pipeline = self._load()
                topics = Topics(pipeline.kafka, PATIENCE_S)
                quarantine = QuarantineLog(topics, pipeline)
                self._open = topics, quarantine, Registry(pipeline, topics), pipeline
                lags = read_runs(pipeline, topics).lags
            _, quarantine, registry, pipeline = self._open
            entries = list(quarantine.read())
            registry.read()
            by_sink = {name: registry.for_sink(name) for name in pipeline.sinks}
        except Exception:
            self.close()
            raise
        records = [record for record in entries if not record.entry.redrive]
        return ControlState(
            tuple(sorted(records, key=lambda record: record.entry.order)),
            tuple(
                build for sink, registered in by_sink.items() if (build := _build(sink, registered))
            ),
            tuple(
                RetainedGeneration(sink, table, view.name, view.until)
                for sink, registered in by_sink.items()
                for table, view in sorted(registered.retained.items())
            ),
            len(entries) - len(records),
            lags,
        )

    def close(self) -> None:
        """Close the connection; the next `read` makes another."""
        if self._open:
            self._open[0].close()
        self._open = None


def _build(sink: str, registered: Generations) -> BuildProgress | None:
    work = registered.work
    if work is None:
        return None
    tables = tuple(sorted(work.names))
    return BuildProgress(
        sink,
        work.phase,
        tables,
        registered.in_progress,
        getattr(work, "since", None),
        getattr(work, "done", 0),
        getattr(work, "total", 0),
        getattr(work, "rows_per_s", 0.0),
    )


class Dashboard:
    """The last samples, and the lag of the last day. Any thread may read it."""

    def __init__(
        self,
        pipeline: str,
        check_health: Callable[[], Status],
        read_control: Callable[[], ControlState],
        complete: Callable[[str], str],
    ) -> None:
        """`check_health` and `read_control` look at the servers; each is called in a thread of its own,
        repeatedly. `complete` completes the commands in a text, so that they can be pasted.
        """
        self.pipeline = pipeline
        self.complete = complete
        self.history = LagHistory()
        self.status: Sampler[Status] = Sampler("the servers", check_health, self._note)
        self.control: Sampler[ControlState] = Sampler(
            "the control topics", read_control, self._note_stored
        )
        self.closing = threading.Event()
        """Set when the server ends: streams of events end then."""

    def start(self) -> None:
        self.status.start()
        self.control.start()

    def close(self) -> None:
        """Look no more."""
        self.closing.set()
        self.status.close()
        self.control.close()
        deadline = time.monotonic() + END_S
        for sampler in (self.status, self.control):
            sampler.join(deadline - time.monotonic())

    @property
    def number(self) -> int:
        """A number that is greater whenever there is something new to show."""
        return self.status.number + self.control.number

    def live(self) -> tuple[bool, str]:
        """Say whether rounds of questions to the servers still end: /livez."""
        silent_s = self.status.silent_s
        return silent_s < SILENT_S, f"last look ended {silent_s:.0f} s ago"

    def ready(self) -> tuple[bool, str]:
        """Say whether there is something to show: /readyz. Servers that are away are shown, too."""
        is_ready = self.status.sample is not None
        return is_ready, "there is a first look" if is_ready else "the first look is under way"

    def _note(self, sample: Sample[Status]) -> None:
        self.history.add(sample.taken_at, lags_of(sample.value))

    def _note_stored(self, sample: Sample[ControlState]) -> None:
        """Take over what runs measured before this page began."""
        for sink, lags in sample.value.lags.items():
            for stored in lags:
                self.history.add(stored.at, {f"Kafka -> {sink}": stored.lag_seconds})
