"""`make bench` at its smallest: a line with limit and rival, on its own servers."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_line_of_the_tables(tmp_path: Path) -> None:
    words = ["--size", "S", "--only", "redis", "--out", str(tmp_path)]
    command = [sys.executable, "-m", "bench", *words]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr[-3000:]
    assert "| apply W1 to Redis, records/s " in process.stdout
    (applied,) = json.loads((tmp_path / "S-redis.json").read_text())["figures"]
    assert applied["ratio"] == applied["ours"]["median"] / applied["rival"]["median"] > 0
    assert applied["limit"]["min"] > 0
    assert applied["cpu_s_per_million"]["spark"] > 0 < applied["peak_mb"]["redis"]
    assert (tmp_path / "S-redis-rates.png").stat().st_size > 10_000
