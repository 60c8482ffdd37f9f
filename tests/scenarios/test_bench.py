"""`make bench` at its smallest: a line with limit and rival, on its own servers; with
`make properties` also how a backlog drains, beside the rival and alone, the hops of a change, and
views of time.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.budget import SCALE

ROOT = Path(__file__).parents[2]


def measure(folder: Path, *parts: str) -> str:
    """`make bench` of these parts alone; what it printed."""
    words = [word for part in parts for word in ("--only", part)]
    process = subprocess.run(
        [sys.executable, "-m", "bench", "--size", "S", *words, "--out", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return process.stdout


def written(folder: Path, *parts: str) -> dict[str, Any]:
    """What `measure` of these parts has written."""
    return dict(json.loads((folder / f"{'-'.join(('S', *parts))}.json").read_text()))


def is_plot(path: Path) -> bool:
    return path.stat().st_size > 10_000


def test_a_line_of_the_tables(tmp_path: Path) -> None:
    printed = measure(tmp_path, "redis")
    stored = written(tmp_path, "redis")
    assert "| apply W1 to Redis, records/s " in printed
    assert {"scale", "cpu", "cores", "commit", "versions", "spark"} <= stored.keys()
    (applied,) = stored["figures"]
    assert applied["ratio"] == applied["ours"]["median"] / applied["rival"]["median"] > 0
    assert applied["limit"]["min"] > 0
    assert applied["cpu_s_per_million"]["spark"] > 0 < applied["peak_mb"]["redis"]
    assert is_plot(tmp_path / "S-redis-rates.png")


if SCALE > 1:

    def test_the_whole_path(tmp_path: Path) -> None:
        parts = ("mixed", "single", "latency", "time")
        printed = measure(tmp_path, *parts)
        stored = written(tmp_path, *parts)
        assert {figure["part"] for figure in stored["figures"]} == set(parts)
        figures = {figure["name"]: figure for figure in stored["figures"]}
        mixed = figures["W1 mixed, whole path"]
        assert mixed["ratio"] == mixed["ours"]["median"] / mixed["rival"]["median"] > 0
        assert mixed["met"] in ("yes", "no")
        servers = {"connect", "elasticsearch", "postgres", "spark"}
        sustained = figures["sustained, one-row transactions"]
        assert servers <= sustained["cpu_s_per_million"].keys()
        drained = figures["W6 hot keys, whole path"]
        # One core would be more than a half; the servers' work is part of it.
        assert 0 < drained["ratio"] < 1.1
        assert servers <= drained["cpu_s_per_million"].keys()
        for name in ("Kafka", "cache", "search", "warehouse"):
            assert sum(
                (end - begin) * rate for begin, end, rate in drained["over_time"][name]
            ) == pytest.approx(3000)
        assert "| commit to visible, s " in printed
        late = [figure for figure in stored["figures"] if "durable" in figure["hops"]]
        sinks = [figure["name"].partition(" ")[0] for figure in late]
        assert sinks == 2 * ["cache", "search", "warehouse"]
        for figure in late:
            assert figure["unseen"] == 0
            medians = [figure["hops"][hop]["p50"] for hop in ("Kafka", "begun", "durable")]
            assert 0 < medians[0] < medians[1] < medians[2]
            assert medians[1] < figure["hops"]["visible"]["p50"] < medians[2] + 10
        state = figures["state after as many flights came and went"]
        assert state["ours"]["median"] == state["limit"]["median"]
        windows = [figure for name, figure in figures.items() if "window" in name]
        assert {figure["unit"] for figure in windows} == {"changes/s", "µs of CPU/change", "s"}
        assert all(figure["unseen"] == 0 for figure in windows)
        run = "-".join(("S", *parts))
        for name in ("rates", "throughput", "latency"):
            assert is_plot(tmp_path / f"{run}-{name}.png")
