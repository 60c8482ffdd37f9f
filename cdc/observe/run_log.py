"""The progress of runs, in the topic `<pipeline>.runs`: any host can read what any run does.

The topic is compacted, and has

    ["run", SINK]           what the run of a sink last published: at once when its state or a
                            trouble changes, else every 5 s
    ["lag", SINK, MINUTE]   one sample of its lag for each minute of a day, 0 to 1439; it overwrites
                            the sample of the day before

Nothing depends on it but what people are shown: positions are in the sinks.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import structlog

from cdc.apply.progress import LIVING, Progress, RunState
from cdc.config.settings import Pipeline
from cdc.errors import CdcError
from cdc.kafka.records import Record, Records
from cdc.kafka.tail import Tail
from cdc.kafka.topics import Topics
from cdc.model.outcome import Applied

ALIVE_S = 30.0
"""A run that has published nothing for so long is dead."""
WRITE_S = 5.0
"""Seconds between two records of a sink of which only numbers change."""
CLOSE_S = 10.0
"""Seconds that the end of a run waits for its last records."""
MINUTES = 24 * 60
log = structlog.get_logger()
Entry = tuple[Sequence[str | int], Mapping[str, Any]]
"""A key and a value, before they are JSON."""


@dataclass(frozen=True)
class LagSample:
    """The lag of a sink `at` a time, in Unix seconds; None where it wasn't known."""

    at: float
    lag_seconds: float | None
    lag_records: int | None


@dataclass(frozen=True)
class RunReport:
    """What runs have published, by sink: their progress, and samples of the last day, oldest first."""

    progress: Mapping[str, Progress]
    lags: Mapping[str, Sequence[LagSample]]
    pids: Set[int] = frozenset()
    """The processes of living runs on this host."""

    @property
    def living(self) -> list[str]:
        """The sinks that a run is at work on now, or will be again by itself."""
        return [
            sink
            for sink, progress in self.progress.items()
            if progress.state in LIVING or progress.restart_at
        ]


class ProgressSelection:
    """Chooses what is to be written of each tick: news at once, numbers now and then."""

    def __init__(self) -> None:
        self._written: dict[str, tuple[object, float]] = {}
        self._sampled: dict[str, int] = {}

    def entries(
        self, progress: Sequence[Progress], compared_s: float | None, now: float
    ) -> Iterator[Entry]:
        """Yield the entries that are due at `now`, in Unix seconds."""
        for snapshot in progress:
            name = snapshot.sink
            news = (snapshot.state, snapshot.error, snapshot.aside, snapshot.restarts)
            previous, written_at = self._written.get(name, (None, 0.0))
            if news != previous or now - written_at >= WRITE_S:
                self._written[name] = news, now
                yield ["run", name], _run_entry(snapshot, compared_s, now)
            minute = int(now // 60)
            if self._sampled.get(name) != minute:
                self._sampled[name] = minute
                sample = LagSample(now, snapshot.lag_seconds, snapshot.lag_records)
                yield ["lag", name, minute % MINUTES], asdict(sample)


class RunLog:
    """Writes the progress of one run until `close`, in a thread of its own: a broker that is away
    holds up nothing.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._topic = pipeline.runs_topic
        self._records = Records(pipeline.kafka)
        self._latest: tuple[Sequence[Progress], float | None] = ((), None)
        self._news = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._write_repeatedly, name="runs", daemon=True)
        self._thread.start()

    def publish(self, progress: Sequence[Progress], compared_s: float | None = None) -> None:
        """Publish the progress of the run's sinks; returns at once. `compared_s`: see `Progress`."""
        self._latest = progress, compared_s
        self._news.set()

    def close(self) -> None:
        """Write what was published last, whatever it is, and end."""
        self._closing = True
        self._news.set()
        self._thread.join(CLOSE_S)

    def _write_repeatedly(self) -> None:
        selection = ProgressSelection()
        failed = False
        while True:
            self._news.wait()
            self._news.clear()
            closing = self._closing
            selection = ProgressSelection() if closing or failed else selection
            failed = not self._write(list(selection.entries(*self._latest, time.time())), failed)
            if closing:
                self._records.close()
                return

    def _write(self, entries: Sequence[Entry], failed_before: bool) -> bool:
        """Write entries; returns whether the broker has taken them."""
        encoded = [(json.dumps(key).encode(), json.dumps(value).encode()) for key, value in entries]
        try:
            self._records.write(self._topic, encoded)
        except CdcError as error:
            if not failed_before:
                log.warning("progress_not_published", error=error.message)
            return False
        return True


class RunTopic:
    """The topic of runs; each `read` takes what is new in it. One thread at a time uses it."""

    def __init__(self, pipeline: Pipeline, kafka: Topics) -> None:
        self._topic = pipeline.runs_topic
        self._kafka = kafka
        self._entries: dict[tuple[str | int, ...], Mapping[str, Any]] = {}
        self._tail = Tail(kafka, self._topic, begin=self._entries.clear, take=self._take)

    def read(self) -> RunReport:
        """Read what runs have published; one that has died without an end is shown as not running.

        A topic that doesn't exist is empty. Raises ConnectorError.
        """
        if self._topic not in self._kafka.existing([self._topic]):
            return RunReport({}, {})
        self._tail.read()
        return report_of(self._entries, time.time())

    def _take(self, record: Record) -> None:
        if record.key and record.value:
            self._entries[tuple(json.loads(record.key))] = json.loads(record.value)


def read_runs(pipeline: Pipeline, kafka: Topics) -> RunReport:
    """Read what runs have published, once; see `RunTopic.read`."""
    return RunTopic(pipeline, kafka).read()


def report_of(entries: Mapping[tuple[str | int, ...], Mapping[str, Any]], now: float) -> RunReport:
    """Make the report of the topic's entries as of `now`, in Unix seconds."""
    progress = dict[str, Progress]()
    lags = dict[str, list[LagSample]]()
    pids = set[int]()
    for (kind, sink, *_), value in entries.items():
        if kind == "run":
            progress[str(sink)] = _progress(value, now)
            if progress[str(sink)].state in LIVING and _is_near(value):
                pids.add(value["pid"])
        elif kind == "lag" and value["at"] > now - MINUTES * 60:
            lags.setdefault(str(sink), []).append(LagSample(**value))
    for samples in lags.values():
        samples.sort(key=lambda sample: sample.at)
    return RunReport(progress, lags, pids)


def _run_entry(snapshot: Progress, compared_s: float | None, now: float) -> dict[str, Any]:
    # The details are for this run's own port: to publish them every few seconds would be much.
    published = replace(snapshot, tables={}, phases_s={}, retries={})
    return {
        **asdict(published),
        "compared_s": compared_s,
        "host": socket.gethostname(),
        "processes": _process_space(),
        "pid": os.getpid(),
        "at": now,
    }


def _progress(value: Mapping[str, Any], now: float) -> Progress:
    names = {field.name for field in fields(Progress)}
    state = RunState(value["state"])
    content_by_field = {name: content for name, content in value.items() if name in names}
    if not _is_alive(value, now):
        state = RunState.NOT_RUNNING if state in LIVING else state
        content_by_field["restart_at"] = None
    return Progress(**{**content_by_field, "state": state, "applied": Applied(**value["applied"])})


def _is_alive(value: Mapping[str, Any], now: float) -> bool:
    """Whether a run lives: it has written lately, and its process exists or can't be checked from
    here, on another host or in another container.
    """
    if now - value["at"] >= ALIVE_S:
        return False
    if not _is_near(value):
        return True
    try:
        os.kill(value["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        # Another user's. psutil would look into /proc, which may hide it.
        return True
    return True


def _is_near(value: Mapping[str, Any]) -> bool:
    return (value["host"], value["processes"]) == (socket.gethostname(), _process_space())


def _process_space() -> int | None:
    """What distinguishes containers with the same host name; None where there is no /proc."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return None
