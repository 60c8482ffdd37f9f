"""When a standby takes over: what runs publish, and the silence of a run that was listened to."""

import json
import os
import socket
from typing import Any

import pytest

from cdc.apply.progress import Progress, RunState
from cdc.kafka.records import Record
from cdc.observe import standby
from cdc.observe.run_log import ProgressSelection, claim_entry
from cdc.observe.standby import SILENT_S, OtherRuns

ELSEWHERE: dict[str, Any] = {"host": "elsewhere", "pid": 1}
HERE: dict[str, Any] = {"host": socket.gethostname(), "pid": os.getpid()}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def others(clock: Clock) -> OtherRuns:
    return OtherRuns(None, "shop.runs", ["search", "cache"], clock)  # type: ignore[arg-type]


def published(
    sink: str, state: RunState = RunState.APPLYING, origin: dict[str, Any] = ELSEWHERE
) -> Record:
    """An entry as a run writes it, of another origin."""
    ((key, value), *_) = ProgressSelection().entries([Progress(sink, state)], None, 0.0)
    entry = {**value, **origin}
    return Record(0, 0, json.dumps(key).encode(), json.dumps(entry).encode())


def listen_for(others: OtherRuns, clock: Clock, seconds: float) -> None:
    while seconds > 0:
        clock.now += min(seconds, standby.LOOK_S)
        seconds -= standby.LOOK_S
        others.listen()


def test_a_run_that_publishes_is_waited_for(others: OtherRuns, clock: Clock) -> None:
    for _ in range(10):
        others.take(published("cache"))
        listen_for(others, clock, 5)
        assert others.living() == {"cache": "elsewhere/1"}


def test_a_run_is_over_when_it_has_been_silent(others: OtherRuns, clock: Clock) -> None:
    others.take(published("cache"))
    listen_for(others, clock, SILENT_S - 1)
    assert others.living()
    listen_for(others, clock, 1)
    assert not others.living()
    others.take(published("cache"))
    assert others.living()


def test_time_in_which_nothing_could_be_heard_is_no_silence(
    others: OtherRuns, clock: Clock
) -> None:
    """A broker that was away for an hour, or a standby that stood still."""
    others.take(published("cache"))
    clock.now += 3600
    others.listen()
    assert others.living()


@pytest.mark.parametrize("state", [RunState.STOPPED, RunState.FAILED, RunState.CAUGHT_UP])
def test_a_run_that_says_that_it_has_ended_is_over_at_once(
    others: OtherRuns, state: RunState
) -> None:
    others.take(published("cache"))
    others.take(published("cache", state))
    assert others.living() == {}


def test_a_paused_sink_has_a_run(others: OtherRuns) -> None:
    others.take(published("cache", RunState.PAUSED))
    assert others.living()


def test_a_sink_that_starts_again_by_itself_has_a_run(others: OtherRuns) -> None:
    others.take(published("cache", RunState.FAILED, {**ELSEWHERE, "restart_at": 40.0}))
    assert others.living() == {"cache": "elsewhere/1"}


def test_a_process_that_has_ended_on_this_host_is_over_at_once(others: OtherRuns) -> None:
    others.take(published("cache", origin=HERE))
    assert others.living()
    # No process has a number as great as that.
    others.take(published("cache", origin={**HERE, "pid": 2**22 + 1}))
    assert others.living() == {}


def test_a_process_of_another_container_may_exist(others: OtherRuns) -> None:
    others.take(published("cache", origin={**HERE, "pid": 2**22 + 1, "processes": 1}))
    assert others.living()


def test_runs_of_other_sinks_are_nobodys_business(others: OtherRuns) -> None:
    others.take(published("warehouse"))
    assert others.living() == {}


def claimed(others: OtherRuns) -> Record:
    """The claim of a standby elsewhere."""
    key, value = claim_entry(others.claimant, ["search", "cache"])
    return Record(0, 0, json.dumps(key).encode(), json.dumps({**value, **ELSEWHERE}).encode())


def pass_claims(standbys: list[OtherRuns], order: list[OtherRuns]) -> list[OtherRuns]:
    """Let standbys claim in an order, all at once; returns those that take over."""
    for standby_ in standbys:
        for claimant in order:
            standby_.take(claimed(claimant))
    return [standby_ for standby_ in standbys if not standby_.before_claim]


def test_of_two_standbys_the_first_in_the_topic_takes_over(clock: Clock) -> None:
    standbys = [
        OtherRuns(None, "shop.runs", ["search", "cache"], clock),  # type: ignore[arg-type]
        OtherRuns(None, "shop.runs", ["cache"], clock),  # type: ignore[arg-type]
    ]
    for first, second in (standbys, standbys[::-1]):
        for standby_ in standbys:
            standby_.take(published("cache", RunState.STOPPED))
        assert pass_claims(standbys, [first, second]) == [first]
        assert second.living()["cache"] == "elsewhere/1"


def test_a_claim_that_nothing_follows_is_over(clock: Clock, others: OtherRuns) -> None:
    """Who gave way to a run, or died after its claim, keeps nobody from work."""
    another = OtherRuns(None, "shop.runs", ["cache"], clock)  # type: ignore[arg-type]
    others.take(claimed(another))
    assert others.living()
    listen_for(others, clock, SILENT_S)
    assert pass_claims([others], [others]) == [others]
