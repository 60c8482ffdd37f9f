"""What the control topics hold besides what a status says: records in quarantine, generations, and
the lag that runs have measured over the last day.

Row values are never read. Reads only.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cdc.config.settings import Pipeline
from cdc.generations.registry import Generations, Registry
from cdc.kafka.topics import Topics
from cdc.observe.run_log import LagSample, read_runs
from cdc.quarantine.log import QuarantinedRecord, QuarantineLog

PATIENCE_S = 5.0
"""Seconds to wait for a broker that is away."""


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
    redrives: int = field(default=0)
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
                self._open = self._connect()
                lags = read_runs(self._open[3], self._open[0]).lags
            _, records, registry, pipeline = self._open
            entries = list(records.read())
            registry.read()
            by_sink = {name: registry.for_sink(name) for name in pipeline.sinks}
        except Exception:
            self.close()
            raise
        return replace(make_state(entries, by_sink), lags=lags)

    def close(self) -> None:
        """Close the connection; the next `read` makes another."""
        if self._open:
            self._open[0].close()
        self._open = None

    def _connect(self) -> tuple[Topics, QuarantineLog, Registry, Pipeline]:
        pipeline = self._load()
        topics = Topics(pipeline.kafka, PATIENCE_S)
        return topics, QuarantineLog(topics, pipeline), Registry(pipeline, topics), pipeline


def make_state(
    entries: "list[QuarantinedRecord]", by_sink: Mapping[str, Generations]
) -> ControlState:
    """Make the state of the entries of the quarantine and the generations of each sink."""
    records = [record for record in entries if not record.entry.redrive]
    return ControlState(
        tuple(sorted(records, key=lambda record: record.entry.order)),
        tuple(build for sink, registered in by_sink.items() if (build := _build(sink, registered))),
        tuple(
            RetainedGeneration(sink, table, view.name, view.until)
            for sink, registered in by_sink.items()
            for table, view in sorted(registered.retained.items())
        ),
        len(entries) - len(records),
    )


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
