"""A fenced stream looks again when readers were being shown another generation; else another writer is at work."""

import time
from types import SimpleNamespace
from typing import Any

import pytest

from cdc.generations import Build
from cdc.stand import Stand


def fenced(build: Build | None) -> bool:
    """What a stand that has seen the last switch makes of a fence, with that record of generations."""
    stand: Any = object.__new__(Stand)
    found = {"search": build} if build else {}
    stand._sink, stand.tables, stand._keeping = SimpleNamespace(name="search"), (), build.keep_until if build else 0.0
    stand._builds = SimpleNamespace(read=lambda: None, found=found)
    return bool(stand.switching())


@pytest.mark.parametrize(
    ("phase", "ago_s", "expected"),
    [("kept", 1, True), ("kept", 60, False), ("promote", 1, True), ("replay", 1, False), (None, 0, False)],
)
def test_only_around_a_switch(phase: Any, ago_s: float, expected: bool) -> None:
    now = time.time()
    build = Build("search", phase, {}, now - 100, at=now - ago_s, keep_until=now + 3600) if phase else None
    assert fenced(build) == expected
