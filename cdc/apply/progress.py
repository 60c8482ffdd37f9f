"""The progress of a sink's stream as its owner publishes it: an immutable snapshot that any thread
may read.
"""

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path

from cdc.model.outcome import Applied

ALIVE_S = 30.0
"""A run that has published nothing for so long is dead: a live one publishes every second."""


class RunState(StrEnum):
    """The states of a stream; the words are those that `cdc status` prints."""

    LOADING = "starting"
    APPLYING = "running"
    RETRYING = "waiting"
    STOPPED = "stopped"
    CAUGHT_UP = "caught up"
    FAILED = "failed"
    NOT_RUNNING = "not running"
    """A run that has died without publishing an end; never published."""


WORKING = (RunState.LOADING, RunState.APPLYING, RunState.RETRYING)


@dataclass(frozen=True)
class Progress:
    """What a sink has done since `cdc run` started, as of `published_at`, in Unix seconds."""

    sink: str
    state: RunState = RunState.LOADING
    applied: Applied = field(default_factory=Applied)
    rows_per_s: float = 0.0
    lag_records: int | None = None
    """Records that remain, at least; None: unknown, because the topics' ends aren't known or are
    too old.
    """
    lag_seconds: float | None = None
    """For how long records have remained, at least; None as above."""
    looked_s: float = 0.0
    """Seconds since lag was measured; long if the sink doesn't answer."""
    compared_s: float | None = None
    """Seconds since its run compared table definitions; None if unknown."""
    batches: int = 0
    aside: dict[str, list[str]] = field(default_factory=dict)
    """Tables that wait for a command, by name: the problem, and the hint."""
    error: str | None = None
    hint: str | None = None
    state_since: float | None = None
    """When the stream came into its state, in Unix seconds."""
    aside_since: Mapping[str, float] = field(default_factory=dict)
    """When this run first saw that a table waits, by name, in Unix seconds."""
    since: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    restarts: Mapping[str, int] = field(default_factory=dict)
    """Restarts of the query by reason, see `cdc.apply.machine.Reason`."""
    restarted: str | None = None
    """The reason of the last restart, with its table."""
    published_at: float = field(default_factory=time.time)
    busy: bool = False
    """A batch is at hand: no snapshot is published until it ends."""

    def aged(self, now: float) -> "Progress":
        """The snapshot as of `now`: a stream that is behind stays so, and its silence counts."""
        age_s = max(0.0, now - self.published_at)
        behind = self.lag_records and self.lag_seconds is not None
        return replace(
            self,
            looked_s=0.0 if self.busy or self.state not in WORKING else round(age_s, 1),
            lag_seconds=self.lag_seconds + age_s
            if behind and self.lag_seconds is not None
            else self.lag_seconds,
        )


def publish(folder: Path, progress: Sequence[Progress], compared_s: float | None = None) -> None:
    """Write each sink's progress to a file that `cdc status` on this machine reads; nothing else
    depends on it.

    `compared_s`: see `Progress.compared_s`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for snapshot in progress:
        path = folder / f"{snapshot.sink}.json"
        fresh = path.with_suffix(".new")
        record = {
            **asdict(snapshot),
            "compared_s": compared_s,
            "pid": os.getpid(),
            "at": time.time(),
        }
        fresh.write_text(json.dumps(record), encoding="utf-8")
        fresh.replace(path)


def load_published(folder: Path) -> dict[str, Progress]:
    """The progress that runs on this machine have published, by sink; a dead run is shown as not
    running.
    """
    names = {field.name for field in fields(Progress)}
    progress = {}
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        values = {name: value for name, value in record.items() if name in names}
        state = RunState(record["state"])
        if state in WORKING and not _alive(record["pid"], record["at"]):
            state = RunState.NOT_RUNNING
        progress[record["sink"]] = Progress(
            **{**values, "state": state, "applied": Applied(**record["applied"])}
        )
    return progress


def _alive(pid: int, written_at: float) -> bool:
    """Whether the run lives: its process exists, and has written lately, since the pid may be
    another process's.
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return time.time() - written_at < ALIVE_S
