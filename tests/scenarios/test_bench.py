"""`make bench` at its smallest: a line with limit and rival, the whole path, hops and plots, on
its own servers; with `make properties` also how a backlog drains, beside the rival and alone, and
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


def is_limit(applied: dict[str, Any]) -> bool:
    """Whether what a server takes at most is more than what the rival brings it."""
    return bool(applied["limit"]["min"] > applied["rival"]["max"])


def limits_anew(folder: Path) -> bool:
    """`is_limit`, measured again."""
    measure(folder, "redis")
    (applied,) = json.loads((folder / "S-redis.json").read_text())["figures"]
    return is_limit(applied)


@pytest.mark.timeout(900)
def test_some_lines_of_the_tables(tmp_path: Path) -> None:
    more = SCALE > 1
    parts = (
        "redis",
        *(["mixed", "single"] if more else []),
        "latency",
        *(["time"] if more else []),
    )
    printed = measure(tmp_path, *parts)
    assert "| apply W1 to Redis, records/s " in printed
    assert "| commit to visible, s " in printed
    run = "-".join(("S", *parts))
    stored = json.loads((tmp_path / f"{run}.json").read_text())
    assert {"scale", "cpu", "cores", "commit", "versions", "spark"} <= stored.keys()
    figures = {figure["name"]: figure for figure in stored["figures"]}
    applied = figures["apply W1 to Redis"]
    sustained = figures["sustained, one-row transactions"]
    assert applied["ratio"] == applied["ours"]["median"] / applied["rival"]["median"] > 0
    # Both are measured once, for less than a second: the machine may be busy during one.
    assert is_limit(applied) or any(limits_anew(tmp_path) for _ in range(2))
    assert applied["cpu_s_per_million"]["spark"] > 0 < applied["peak_mb"]["redis"]
    if mixed := figures.get("W1 mixed, whole path"):
        assert mixed["ratio"] == mixed["ours"]["median"] / mixed["rival"]["median"] > 0
        assert mixed["met"] in ("yes", "no")
    assert {figure["part"] for figure in stored["figures"]} == set(parts)
    servers = {"connect", "elasticsearch", "postgres", "spark"}
    assert servers <= sustained["cpu_s_per_million"].keys()
    if drained := figures.get("W6 hot keys, whole path"):
        # One core would be more than a half; the servers' work is part of it.
        assert 0 < drained["ratio"] < 1.1
        assert servers <= drained["cpu_s_per_million"].keys()
        for name in ("Kafka", "cache", "search", "warehouse"):
            assert sum(
                (end - begin) * rate for begin, end, rate in drained["over_time"][name]
            ) == pytest.approx(3000)
    late = [figure for figure in stored["figures"] if "durable" in figure["hops"]]
    assert [figure["name"].partition(" ")[0] for figure in late] == 2 * [
        "cache",
        "search",
        "warehouse",
    ]
    for figure in late:
        assert figure["unseen"] == 0
        medians = [figure["hops"][hop]["p50"] for hop in ("Kafka", "begun", "durable")]
        assert 0 < medians[0] < medians[1] < medians[2]
        assert medians[1] < figure["hops"]["visible"]["p50"] < medians[2] + 10
    if state := figures.get("state after as many flights came and went"):
        assert state["ours"]["median"] == state["limit"]["median"]
        windows = [figure for name, figure in figures.items() if "window" in name]
        assert {figure["unit"] for figure in windows} == {"changes/s", "µs of CPU/change", "s"}
        assert all(figure["unseen"] == 0 for figure in windows)
    for name in ("rates", *(["throughput"] if drained else []), "latency"):
        assert (tmp_path / f"{run}-{name}.png").stat().st_size > 10_000
