"""What people are told of: each incident once, from its beginning to its end."""

from collections.abc import Iterable
from dataclasses import replace

import pytest

from cdc.config.notify_settings import NotifySettings
from cdc.model.finding import Finding, Severity, find
from cdc.notify.incidents import Incident, Phase, Watch, accepts, sees_all

BEHIND = find("sink-behind", "cache", "Kafka -> cache is slow.", "cdc -p FILE run", sink="cache")
AWAY = find("kafka-unreachable", "kafka", "Kafka is away.", "cdc -p FILE status")
UNLIMITED = find("slot-unlimited", "shop", "No limit.", "ALTER SYSTEM")


class Log:
    """The log of incidents as a list, in the order in which its entries came."""

    def __init__(self) -> None:
        self.entries: dict[str, Incident] = {}

    def add(self, incident: Incident, teller: str) -> bool:
        following = replace(incident, teller=teller)
        if not accepts(self.entries.get(incident.id), following):
            return False
        self.entries[incident.id] = following
        return True


class Teller:
    """A process that looks at findings and tells."""

    def __init__(self, name: str, log: Log, after_s: float = 60.0) -> None:
        self.name, self.log = name, log
        self.watch = Watch("status/1", Severity.DEGRADED, after_s)
        self.messages: list[tuple[float, str, str]] = []

    def observe(self, now: float, *findings: Finding) -> None:
        able = sees_all(findings)
        for claim in self.watch.claims(findings, self.log.entries, now, lambda _: able):
            if self.log.add(claim, self.name):
                self.messages.append((now, claim.phase.value, claim.code))
                if claim.phase is Phase.CLOSING:
                    del self.log.entries[claim.id]
                else:
                    assert self.log.add(replace(claim, phase=Phase.OPEN), self.name)


def run(teller: Teller, looks: Iterable[tuple[float, tuple[Finding, ...]]]) -> list[str]:
    for now, findings in looks:
        teller.observe(now, *findings)
    return [f"{now:.0f} {phase} {code}" for now, phase, code in teller.messages]


def test_a_trouble_is_told_once_it_has_lasted_and_once_it_is_over() -> None:
    looks = [(t, (BEHIND,) if t < 1000 else ()) for t in range(0, 3000, 15)]
    assert run(Teller("a", Log()), looks) == ["60 opening sink-behind", "1305 closing sink-behind"]


def test_what_passes_by_itself_is_not_told() -> None:
    looks = [(t, (BEHIND,) if t < 45 else ()) for t in range(0, 3000, 15)]
    assert run(Teller("a", Log()), looks) == []


@pytest.mark.parametrize("step_s", [5.2, 8.4])
@pytest.mark.parametrize("after_s", [0.0, 1.0, 5.0])
def test_looks_may_be_farther_apart_than_a_trouble_has_to_last(
    after_s: float, step_s: float
) -> None:
    teller = Teller("a", Log(), after_s)
    run(teller, [(number * step_s, (BEHIND,)) for number in range(5)])
    assert [moment for moment, _, _ in teller.messages] == [step_s if after_s else 0.0]


def test_while_nobody_looks_nothing_is_absent() -> None:
    looks = [(0.0, (BEHIND,)), (140.0, (BEHIND,))]
    assert run(Teller("a", Log()), looks) == ["140 opening sink-behind"]


def test_a_trouble_that_was_away_for_longer_begins_anew() -> None:
    looks = [(t, (BEHIND,) if t in (0, 45, 50) else ()) for t in range(0, 100, 5)]
    assert run(Teller("a", Log(), 1.0), looks) == ["50 opening sink-behind"]


def test_a_remark_is_not_told() -> None:
    assert run(Teller("a", Log(), 0), [(t, (UNLIMITED,)) for t in range(0, 300, 15)]) == []


@pytest.mark.parametrize(
    "code",
    [
        "sink-behind",
        "heartbeat-late",
        "slot-at-risk",
        "tombstones-at-risk",
        "records-quarantined",
        "view-differs",
        "sink-failed",
    ],
)
def test_who_sets_nothing_is_told_of_troubles_and_risks(code: str) -> None:
    entry = NotifySettings(url="http://127.0.0.1/hook", after_s=0)
    watch = Watch("status/1", Severity(entry.severity), entry.after_s)
    findings = [find(code, "it", "It is so.", "cdc -p FILE status", sink="cache"), UNLIMITED]
    assert [claim.code for claim in watch.claims(findings, {}, 0.0)] == [code]


def test_a_week_of_flapping_is_one_incident() -> None:
    week = range(0, 7 * 86_400, 15)
    looks = [(t, (BEHIND,) if t % 240 < 120 else ()) for t in week]
    assert run(Teller("a", Log()), looks) == ["60 opening sink-behind"]


def test_what_comes_and_goes_lasts() -> None:
    looks = [(t, (BEHIND,) if t % 60 < 30 else ()) for t in range(0, 86_400, 15)]
    assert run(Teller("a", Log()), looks) == ["60 opening sink-behind"]


def test_nothing_is_over_while_nobody_can_look() -> None:
    looks = [(0.0, (BEHIND,)), (60.0, (BEHIND,)), *((t, (AWAY,)) for t in range(75, 2000, 15))]
    messages = run(Teller("a", Log()), looks)
    assert messages == ["60 opening sink-behind", "135 opening kafka-unreachable"]


def test_of_several_processes_one_tells() -> None:
    log = Log()
    tellers = [Teller(name, log) for name in ("a", "b", "c")]
    for t in range(0, 2000, 15):
        for teller in tellers if t % 2 else reversed(tellers):
            teller.observe(t, *((BEHIND,) if t < 1000 else ()))
    messages = [message for teller in tellers for message in teller.messages]
    assert sorted(phase for _, phase, _ in messages) == ["closing", "opening"]


def test_a_restart_tells_nothing_again() -> None:
    log = Log()
    run(Teller("a", log), [(t, (BEHIND,)) for t in range(0, 300, 15)])
    assert run(Teller("b", log), [(t, (BEHIND,)) for t in range(300, 3000, 15)]) == []
    ended = run(Teller("c", log), [(t, ()) for t in range(3000, 4000, 15)])
    assert ended == ["3300 closing sink-behind"]


@pytest.mark.parametrize("phase", [Phase.OPENING, Phase.CLOSING])
def test_a_claim_of_a_process_that_died_is_taken_over(phase: Phase) -> None:
    log, first = Log(), Teller("a", Log())
    (claim,) = [claim for t in (0.0, 60.0) for claim in first.watch.claims([BEHIND], {}, t)]
    assert log.add(claim, "a")
    if phase is Phase.CLOSING:
        assert log.add(replace(claim, phase=Phase.OPEN), "a")
        assert log.add(replace(claim, phase=Phase.CLOSING), "a")
    findings = (BEHIND,) if phase is Phase.OPENING else ()
    messages = run(Teller("b", log), [(t, findings) for t in range(60, 1000, 15)])
    assert [message.split(" ", 1)[1] for message in messages] == [f"{phase.value} sink-behind"]


@pytest.mark.parametrize("origin", ["status", "verify"])
def test_what_is_over_before_it_could_be_told_is_told_later(origin: str) -> None:
    """By any process that tells the same address, after a claim has come to nothing."""
    log = Log()
    (claim,) = Watch(f"{origin}/1", Severity.DEGRADED, 0.0).claims([BEHIND], {}, 0.0)
    assert log.add(claim, "a")
    (taken,) = [
        claim
        for t in range(0, 200, 15)
        for claim in Watch("status/1", Severity.DEGRADED, 60.0).claims([], log.entries, t)
    ]
    assert log.add(taken, "b")
    assert (taken.phase, taken.code, taken.since) == (Phase.OPENING, "sink-behind", claim.since)
    assert Watch("status/2", Severity.DEGRADED, 60.0).claims([], log.entries, 1000.0) == []


def test_the_first_claim_holds_and_only_its_teller_notes() -> None:
    (claim,) = Watch("status/1", Severity.DEGRADED, 0.0).claims([BEHIND], {}, 0.0)
    log = Log()
    assert log.add(claim, "a")
    assert not log.add(claim, "b")
    assert not log.add(replace(claim, phase=Phase.OPEN), "b")
    assert not log.add(replace(claim, phase=Phase.CLOSING), "b")
    assert log.add(replace(claim, phase=Phase.OPEN), "a")
    assert not log.add(claim, "b")


def test_incidents_of_another_watch_are_left_alone() -> None:
    (claim,) = Watch("verify/1", Severity.DEGRADED, 0.0).claims([BEHIND], {}, 0.0)
    incidents = {claim.id: replace(claim, phase=Phase.OPEN)}
    watch = Watch("status/1", Severity.DEGRADED, 0.0)
    assert [watch.claims([], incidents, t) for t in (0.0, 1000.0)] == [[], []]
