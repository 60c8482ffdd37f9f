"""`make bench` at its smallest: limit, rival and ours of one line, measured on servers of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(600)
def test_one_line_of_the_table(tmp_path: Path) -> None:
    words = ["--size", "S", "--only", "redis", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "bench", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "| apply to Redis, records/s |" in done.stdout
    stored = json.loads((tmp_path / "S.json").read_text())
    assert {"cpu", "cores", "commit", "versions"} <= stored.keys()
    (figure,) = stored["figures"]
    assert figure["ratio"] == figure["ours"]["median"] / figure["rival"]["median"] > 0
    assert figure["limit"]["min"] > figure["rival"]["max"]
    assert figure["cpu_s_per_million"]["spark"] > 0 < figure["peak_mb"]["redis"]
    assert (tmp_path / "S-rates.png").stat().st_size > 0
