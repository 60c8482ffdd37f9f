"""What of a run's progress is written to its topic, and what a reader makes of it."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from cdc.apply.progress import Progress, RunState
from cdc.model.outcome import Applied
from cdc.observe.run_log import ALIVE_S, MINUTES, WRITE_S, ProgressSelection, report_of

NOW = 1_000_000_020.0
RUNNING = Progress("cache", RunState.APPLYING, Applied(written=5), lag_seconds=0.2, lag_records=3)
Entries = dict[tuple[str | int, ...], Mapping[str, Any]]


def entries_of(
    selection: ProgressSelection, *progress: Progress, now: float = NOW, compared_s: float = 7.5
) -> Entries:
    """The entries of one tick, after a journey through JSON."""
    entries = selection.entries(progress, compared_s, now)
    return {tuple(key): json.loads(json.dumps(value)) for key, value in entries}


def kinds(entries: Entries) -> Sequence[str | int]:
    return [kind for kind, *_ in entries]


def test_what_was_written_is_read() -> None:
    report = report_of(entries_of(ProgressSelection(), RUNNING), NOW + 1)
    (progress,) = report.progress.values()
    assert progress == replace(RUNNING, compared_s=7.5, since=RUNNING.since)
    assert report.living == ["cache"]
    (sample,) = report.lags["cache"]
    assert (sample.at, sample.lag_seconds, sample.lag_records) == (NOW, 0.2, 3)


def test_news_is_written_at_once_and_numbers_now_and_then() -> None:
    selection = ProgressSelection()
    assert kinds(entries_of(selection, RUNNING)) == ["run", "lag"]
    later = replace(RUNNING, applied=Applied(written=9))
    assert kinds(entries_of(selection, later, now=NOW + 1)) == []
    assert kinds(entries_of(selection, later, now=NOW + WRITE_S)) == ["run"]
    for news in ({"error": "Full."}, {"state": RunState.RETRYING}, {"aside": {"t": ["no", "h"]}}):
        assert kinds(entries_of(selection, replace(RUNNING, **news), now=NOW + WRITE_S)) == ["run"]


def test_a_day_of_lag_is_kept_one_sample_a_minute() -> None:
    selection, entries = ProgressSelection(), Entries()
    for minute in range(MINUTES + 90):
        moment = NOW + 60 * minute
        entries |= entries_of(selection, replace(RUNNING, lag_seconds=float(minute)), now=moment)
    samples = report_of(entries, NOW + 60 * (MINUTES + 89)).lags["cache"]
    assert [sample.lag_seconds for sample in samples] == [float(n) for n in range(90, MINUTES + 90)]
    # What is older than a day is of no use, even where nothing has overwritten it.
    assert report_of(entries, NOW + 60 * (MINUTES + 88 + MINUTES)).lags.keys() <= {"cache"}
    assert report_of(entries, NOW + 60 * (3 * MINUTES)).lags == {}


@pytest.mark.parametrize("state", [RunState.APPLYING, RunState.PAUSED, RunState.RETRYING])
def test_a_run_that_has_died_is_not_running(state: RunState) -> None:
    failed = Progress("search", RunState.FAILED, error="Full.")
    entries = entries_of(ProgressSelection(), replace(RUNNING, state=state), failed)
    report = report_of(entries, NOW + ALIVE_S)
    assert {name: progress.state for name, progress in report.progress.items()} == {
        "cache": "not running",
        "search": "failed",
    }
    assert report.living == []


def test_a_sink_that_starts_again_by_itself_has_a_run_until_that_dies() -> None:
    failed = Progress("search", RunState.FAILED, error="Full.", restart_at=NOW + 40)
    entries = entries_of(ProgressSelection(), failed)
    assert report_of(entries, NOW + 1).living == ["search"]
    dead = report_of(entries, NOW + ALIVE_S)
    assert (dead.living, dead.progress["search"].restart_at) == ([], None)


def test_a_process_that_is_gone_is_dead_at_once_on_its_own_host() -> None:
    """On another host its number says nothing."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    ((key, value), *_) = entries_of(ProgressSelection(), RUNNING).items()
    assert (value["host"], value["pid"]) == (socket.gethostname(), os.getpid())
    for host, state in ((value["host"], "not running"), ("elsewhere", "running")):
        entries = {key: {**value, "host": host, "pid": process.pid}}
        assert report_of(entries, NOW + 1).progress["cache"].state == state
