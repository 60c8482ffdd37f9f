"""`cdc chaos`: what it refuses, in which order it fires, and that each fault is over before anything else."""

import os
import signal
import time
from itertools import islice
from pathlib import Path

import pytest

from cdc.chaos.nemesis import HOLD_S, Nemesis, Unmended, schedule
from cdc.errors import ConnectorError, SettingsError
from cdc.sink.contract import Fault, Hold
from tests.support.pipelines import unreachable_file
from tests.support.verbs import run_here

NAMES = [f"fault {number}" for number in range(9)]
REFUSAL = ConnectorError("It isn't allowed.", hint="allow it")


def test_a_pipeline_without_the_mark_is_refused(tmp_path: Path) -> None:
    file = unreachable_file(tmp_path, "public.orders")
    refused = run_here(["-p", str(file), "--state", str(tmp_path), "chaos"])
    assert refused.returncode == SettingsError.exit_code
    assert "doesn't mark shop as a pipeline that may be broken" in refused.stderr
    assert "never where people rely on the views" in refused.stderr


def test_a_seed_fires_the_same_faults_and_each_once_before_one_comes_again() -> None:
    steps = list(islice(schedule(7, NAMES), 27))
    assert steps == list(islice(schedule(7, NAMES), 27))
    assert steps != list(islice(schedule(8, NAMES), 27))
    for start in range(0, 27, 9):
        assert sorted(name for name, _ in steps[start : start + 9]) == NAMES
    assert all(HOLD_S[0] <= held_s <= HOLD_S[1] for _, held_s in steps)


def play(**faults: Fault) -> tuple[Nemesis, list[str]]:
    events: list[str] = []
    nemesis = Nemesis(
        faults, 7, lambda: events.append("recover"), lambda: events.append("compare"), events.append
    )
    nemesis.play(0)
    return nemesis, events


def refused_at_once(hold: Hold) -> None:
    raise REFUSAL


def stays(hold: Hold) -> None:
    hold()
    raise REFUSAL


def over_at_once(hold: Hold) -> None:
    """As a kill is."""


def test_a_fault_that_is_not_allowed_is_named_and_the_others_are_fired() -> None:
    nemesis, events = play(kill=over_at_once, refused=refused_at_once)
    assert nemesis.skipped == {"refused": "It isn't allowed."}
    assert dict(nemesis.fired) == {"kill": 1}
    # A fault that is refused may have begun all the same.
    after = [event for event in events if event in ("recover", "compare")]
    assert after == ["recover", "recover", "compare"]
    assert any("refused: skipped. It isn't allowed." in event for event in events)


def test_a_fault_that_can_not_be_undone_ends_the_run() -> None:
    with pytest.raises(Unmended, match="'stays' couldn't be undone"):
        play(stays=stays)


def test_a_signal_ends_the_run_once_the_fault_is_undone() -> None:
    events: list[str] = []

    def interrupted(hold: Hold) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        hold()
        events.append("undone")

    nemesis = Nemesis(
        {"freeze": interrupted}, 7, lambda: events.append("recover"), lambda: None, lambda _: None
    )
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        nemesis.fire("freeze", 600)
    assert events == ["undone"]
    assert time.monotonic() - began < 300
