"""A task of a lane has a chunk in memory, whatever is in its log: a process for each case."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cdc.sink.lane import ChunkLimits
from cdc.sinks.delta.executor import LIMITS as WAREHOUSE
from cdc.sinks.redis.executor import CHUNK as CACHE
from tests.support.budget import SCALE
from tests.support.lane_memory import CASES

ROOT = Path(__file__).parents[2]
IN_FULL = SCALE > 1
SINKS = {"cache": (CACHE, "documents"), "warehouse": (WAREHOUSE, "values")}
RECORDS = {
    "rows of 10 MB": (20, 300),
    "one row": (60_000, 1_000_000),
    "one row that misses values": (60_000, 1_000_000),
    "1,000 partitions": (20_000, 1_000_000),
    "a backlog": (60_000, 10_000_000),
}
"""How many, and with `make properties`."""
COPIES, SPARE_BYTES = 10, 8_000_000
"""Of a record there are several forms at once, each of which may be a copy: from Arrow's to that of
the sink.
"""
CPU_S = 5.0 if not IN_FULL else 400.0


def measure(case: str, records: int, limits: ChunkLimits, form: str) -> Mapping[str, Any]:
    """Run a lane in a process of its own."""
    words = [case, str(records), str(limits.rows), str(limits.bytes), form]
    command = [sys.executable, "-m", "tests.support.lane_memory", *words]
    output = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True).stdout
    result: Mapping[str, Any] = json.loads(output)
    print(case, form, result)
    return result


def bound(case: str, sink: str) -> int:
    """The memory that a task may need besides what any has."""
    return 2 * SINKS[sink][0].bytes + COPIES * len(CASES[case].text) + SPARE_BYTES


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("sink", SINKS)
def test_a_task_has_a_chunk_in_memory(case: str, sink: str) -> None:
    records = RECORDS[case][IN_FULL]
    result = measure(case, records, *SINKS[sink])
    assert result["read"] == records
    assert result["memory_bytes"] < bound(case, sink)
    assert result["cpu_s"] < CPU_S


@pytest.mark.parametrize("case", ["rows of 10 MB", "one row that misses values", "a backlog"])
def test_planted_lane_without_a_limit_is_noticed(case: str) -> None:
    result = measure(case, RECORDS[case][0], ChunkLimits(10**9, 10**12), "documents")
    assert result["memory_bytes"] > bound(case, "cache")
