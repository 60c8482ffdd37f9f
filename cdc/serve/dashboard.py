"""Everything that the pages show, as it was last seen. A request asks no server."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from cdc.config.settings import Pipeline
from cdc.generations.registry import Generations, Registry
from cdc.kafka.topics import Topics
from cdc.observe.run_log import LagSample, read_runs
from cdc.observe.sampler import SILENT_S, Sample, Sampler
from cdc.observe.status import Status
from cdc.quarantine.log import QuarantinedRecord, QuarantineLog
from cdc.serve.lag_history import LagHistory, lags_of

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
        """Begin to look."""
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
