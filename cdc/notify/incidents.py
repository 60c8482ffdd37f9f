"""Incidents: every look finds a trouble again, but people are told of it once, and once of its end.

In:  the findings of a look; the incidents of the pipeline's log. Out: what is to be told now.
Invariant: of all processes that look, one tells an incident. Each writes its claim to the log, and
the first in the order of the log has it; a claim that has come to nothing, for its process has died
or the receiver was away, is taken over, also if the trouble is over by then. So an incident is told
once, and twice only if its teller dies between telling it and noting that.

An incident goes through these phases, of which the log has the newest entry of each:

    (none) --claimed--> opening --told--> open --claimed--> closing --told--> (none)

Pure: no server, no clock.
"""

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from cdc.model.finding import ORDER, Finding, Severity

TAKEOVER_S = 180.0
"""Seconds after which a claim has come to nothing: longer than telling may take."""
QUIET_S = 300.0
"""Seconds without a finding after which its incident is over: what comes and goes is one
incident.
"""
GAP_S = 30.0
"""Seconds without a finding that never count as its end, however short a trouble is told: looks are
five seconds apart, and nine while a server hangs.
"""
BLINDING = ("-unreachable", "-unreadable", "-silent", "another-server")
"""Ends of codes with which other findings can't be looked for, so that their absence says
nothing.
"""


class Phase(StrEnum):
    """How far people have been told of an incident."""

    OPENING = "opening"
    OPEN = "open"
    CLOSING = "closing"


@dataclass(frozen=True)
class Incident:
    """A trouble, from when it began until it is over. Stored: the fields are part of the format.

    `watch` names the `Watch` that found it: no other may declare it over. `teller` is the process
    that claims to tell, since `claimed_at`. Times are Unix seconds.
    """

    id: str
    watch: str
    code: str
    severity: str
    hop: str
    subject: str
    message: str
    fix: str
    since: float
    phase: Phase = Phase.OPENING
    teller: str = ""
    claimed_at: float = 0.0


def accepts(entry: Incident | None, following: Incident) -> bool:
    """Whether an entry of the log comes into force: the first claim holds until it is stale, and
    only its teller notes that it has told.
    """
    if following.phase is Phase.OPENING:
        return entry is None or (entry.phase is Phase.OPENING and _is_stale(entry, following))
    if entry is None:
        return False
    if following.phase is Phase.OPEN:
        return entry.phase is Phase.OPENING and entry.teller == following.teller
    return entry.phase is Phase.OPEN or (
        entry.phase is Phase.CLOSING and _is_stale(entry, following)
    )


def _is_stale(entry: Incident, following: Incident) -> bool:
    return following.claimed_at - entry.claimed_at > TAKEOVER_S


def sees_all(findings: Iterable[Finding]) -> bool:
    """Whether every server answered the look that found these: only then does the absence of a
    finding mean that its trouble is over.
    """
    return not any(finding.code.endswith(BLINDING) for finding in findings)


@dataclass
class Watch:
    """What one process has seen so far: since when each trouble is there, or absent.

    `name` is ORIGIN/ADDRESS, the same in all processes that look for the same and tell the same
    address. `after_s`:
    how long a trouble has to last before it is told; `quiet_s`: how long it has to be absent before
    it is over.
    """

    name: str
    least: Severity
    after_s: float
    quiet_s: float = QUIET_S
    _seen_since: dict[str, float] = field(default_factory=dict)
    """The first look that saw each trouble; gaps up to `after_s`, and up to GAP_S, are none."""
    _unseen_since: dict[str, float] = field(default_factory=dict)
    """The first look that no longer saw it. While nobody looks nothing is absent."""
    _absent_since: dict[str, float] = field(default_factory=dict)

    def claims(
        self,
        findings: Iterable[Finding],
        incidents: Mapping[str, Incident],
        now: float,
        judged: Callable[[Incident], bool] = lambda _: True,
    ) -> list[Incident]:
        """Return the claims to make: incidents that are due to be told, those that nobody could
        tell before they were over, and those whose end is due.

        incidents: those of the log, by id. `judged`: whether this look could have seen the trouble
        of an incident; where it couldn't, the absence of a finding says nothing.
        """
        present = {self._id(finding): finding for finding in findings}
        absent = {
            key
            for key, incident in incidents.items()
            if incident.watch == self.name and key not in present and judged(incident)
        }
        self._note_sightings(present, now)
        self._absent_since = {key: self._absent_since.get(key, now) for key in absent}
        openings = [
            self._incident(key, finding, now)
            for key, finding in present.items()
            if self._is_due(key, finding, now) and _may_claim(incidents.get(key), now)
        ]
        endings = [
            replace(incidents[key], phase=Phase.CLOSING, claimed_at=now)
            for key, moment in self._absent_since.items()
            if now - moment >= self.quiet_s and _may_close(incidents[key], now)
        ]
        return [*openings, *self._untold(incidents, present, now), *endings]

    def _untold(
        self, incidents: Mapping[str, Incident], present: Collection[str], now: float
    ) -> list[Incident]:
        """Claim what was claimed for this address, isn't told, and isn't seen by this look."""
        address = self.name.partition("/")[2]
        return [
            replace(incident, claimed_at=now)
            for key, incident in incidents.items()
            if key not in present
            and incident.watch.partition("/")[2] == address
            and _may_claim(incident, now)
        ]

    def _note_sightings(self, present: Collection[str], now: float) -> None:
        self._unseen_since = {
            key: self._unseen_since.get(key, now) for key in self._seen_since if key not in present
        }
        gap_s = max(self.after_s, GAP_S)
        for key, moment in self._unseen_since.items():
            if now - moment > gap_s:
                del self._seen_since[key]
        for key in present:
            self._seen_since.setdefault(key, now)

    def _id(self, finding: Finding) -> str:
        """Name an incident by what it is about; its message may change while it lasts."""
        parts = (self.name, finding.code, finding.hop, finding.subject)
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]

    def _is_due(self, key: str, finding: Finding, now: float) -> bool:
        bad_enough = ORDER.index(finding.severity) <= ORDER.index(self.least)
        return bad_enough and now - self._seen_since[key] >= self.after_s

    def _incident(self, key: str, finding: Finding, now: float) -> Incident:
        return Incident(
            key,
            self.name,
            finding.code,
            finding.severity.value,
            finding.hop,
            finding.subject,
            finding.message,
            finding.fix,
            finding.since or self._seen_since[key],
            claimed_at=now,
        )


def _may_claim(incident: Incident | None, now: float) -> bool:
    return incident is None or (
        incident.phase is Phase.OPENING and now - incident.claimed_at > TAKEOVER_S
    )


def _may_close(incident: Incident, now: float) -> bool:
    return incident.phase is Phase.OPEN or (
        incident.phase is Phase.CLOSING and now - incident.claimed_at > TAKEOVER_S
    )
