"""The screens that README and the documentation show are what is printed, with the numbers of the
example.
"""

import io
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cdc.cli import console
from cdc.cli.status import draw_status
from cdc.model import wording
from cdc.model.outcome import Applied
from cdc.observe.diagnosis import diagnose, slow_hop
from cdc.observe.status import ConnectorStatus, HeartbeatStatus, SinkStatus, Status, ViewStatus
from cdc.readiness.facts import Slot
from docs.generate import FOLDER
from tests.support import pages

NOW = time.mktime((2026, 11, 24, 13, 4, 52, 0, 0, -1))


def screens(page: Path, begin: str) -> list[str]:
    """The lines of the block in which some text stands, as far as they are shown."""
    (block,) = (body for language, body in pages.blocks(page.read_text()) if begin in body)
    return block.splitlines()


def test_the_screen_of_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console.call, "file", Path("shop.yaml"))
    # A test before this one may have called the program with it.
    monkeypatch.setattr(console.call, "state", None)
    monkeypatch.setattr(time, "time", lambda: NOW)
    monkeypatch.setattr(wording, "clock", lambda _: "13:04:17")
    view = ViewStatus("public.orders", 0, 0.0, 2, NOW - 10, quarantined=1)
    applied = Applied(3, 2, quarantined=1)
    sink = SinkStatus("cache", "running", NOW - 35, views=(view,), rows_per_s=0.0, applied=applied)
    connector = ConnectorStatus("RUNNING", ("RUNNING",), None)
    slot = Slot(True, 7, "0/1", "0/1", "reserved", 152, 3300, None, "pgoutput", "shop", None, None)
    heartbeat = HeartbeatStatus(0.6, 0.045, 2.0)
    state = diagnose(Status("shop", connector, slot, heartbeat, (sink,)))
    shown = Console(file=io.StringIO(), width=120)
    shown.print(draw_status(state, slow_hop(state)))
    printed: Any = shown.file
    lines = [line.rstrip() for line in printed.getvalue().splitlines()]
    skipped = ("$ ", "(exit code")
    of_page = screens(FOLDER / "operate" / "status.md", "degraded:")
    assert [line for line in of_page if not line.startswith(skipped) and line not in lines] == []
