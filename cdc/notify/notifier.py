"""Sends messages about the findings of repeated looks to the addresses in the pipeline file.

In:  the findings of each look. Out: messages, by `cdc.notify.webhook`.
Invariant: a message that can't be delivered is logged, and ends nobody who looks; while its receiver
is away it stays to be told, by whichever process can. While the log of incidents is away, which is an
incident itself, each process tells what it sees and notes it later.
"""

import hashlib
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Literal

import httpx
import structlog

from cdc.config.notify_settings import NotifySettings
from cdc.config.settings import Pipeline
from cdc.errors import CdcError
from cdc.kafka.topics import Topics
from cdc.model.finding import Finding, Severity
from cdc.notify import webhook
from cdc.notify.incident_log import IncidentLog
from cdc.notify.incidents import QUIET_S, Incident, Phase, Watch, sees_all

Origin = Literal["status", "verify"]
LOG_AWAY = "kafka-unreachable"
"""The code of a look that couldn't ask the broker, which has the log of incidents."""
REST_S = 120.0
"""Seconds for which a receiver that was away isn't asked: others wait while it is."""
log = structlog.get_logger()


class Notifier:
    """Notifies all addresses of `notify`. One thread calls it, as often as it has findings."""

    def __init__(self, pipeline: Pipeline, origin: Origin, quiet_s: float = QUIET_S) -> None:
        """origin: what looks. `status` looks again and again; a `verify` proves what it finds, so it
        is told at once.
        """
        teller = f"{socket.gethostname()}/{os.getpid()}/{uuid.uuid4().hex[:8]}"
        self._pipeline, self._teller = pipeline, teller
        self._kafka: Topics | None = None
        self._log: IncidentLog | None = None
        self._incidents: dict[str, Incident] = {}
        self._unnoted: set[str] = set()
        self._rests_until: dict[str, float] = {}
        """By address, by the monotonic clock."""
        proves = origin == "verify"
        self._watches = [
            (
                entry,
                Watch(
                    _watch_name(origin, entry),
                    Severity(entry.severity),
                    0.0 if proves else entry.after_s,
                    0.0 if proves else quiet_s,
                ),
            )
            for entry in pipeline.notify
        ]

    def close(self) -> None:
        """Close the connection to the log."""
        if self._kafka is not None:
            self._kafka.close()

    def notify(
        self, findings: Iterable[Finding], judged: Callable[[Incident], bool] = lambda _: True
    ) -> None:
        """Take the findings of one look; tell what has begun, and what is over. `judged`: see
        `Watch.claims`.
        """
        current, now = list(findings), time.time()
        can_judge = sees_all(current)
        # To ask a broker that hangs for the log as well would take as long again.
        is_away = any(finding.code == LOG_AWAY for finding in current)
        incidents = None if is_away else self._read()
        for entry, watch in self._watches:
            claims = watch.claims(
                current, self._incidents, now, lambda incident: can_judge and judged(incident)
            )
            for claim in claims:
                if self._rests(entry) and claim.id in self._incidents:
                    continue
                if incidents:
                    self._settle(incidents, entry, claim)
                else:
                    self._settle_alone(entry, claim)

    def _read(self) -> IncidentLog | None:
        """Read the log, and note in it what was told while it was away; None while it is."""
        try:
            incidents = self._connected_log()
            logged = incidents.read()
            for key in self._unnoted - logged.keys():
                incident = self._incidents[key]
                claimed = incidents.claim(replace(incident, phase=Phase.OPENING))
                if claimed and incident.phase is Phase.OPEN:
                    incidents.note_told(incident)
            self._unnoted.clear()
            self._incidents = incidents.read()
        except CdcError as error:
            log.warning("incidents_not_read", error=error.message)
            return None
        return incidents

    def _connected_log(self) -> IncidentLog:
        if self._kafka is None:
            self._kafka = Topics(self._pipeline.kafka)
        if self._log is None:
            self._log = IncidentLog(self._kafka, self._pipeline.incidents_topic, self._teller)
        return self._log

    def _settle(self, incidents: IncidentLog, entry: NotifySettings, claim: Incident) -> None:
        """Tell a claim, if this process has it."""
        # Others before it may have taken a minute each.
        claim = replace(claim, claimed_at=time.time())
        try:
            if incidents.claim(claim) and self._tell(entry, claim):
                incidents.note_told(claim)
        except CdcError as error:
            log.warning("incident_not_noted", code=claim.code, error=error.message)

    def _settle_alone(self, entry: NotifySettings, claim: Incident) -> None:
        """Tell a claim that nobody else can be asked about."""
        is_done = self._tell(entry, claim)
        if claim.phase is Phase.OPENING:
            self._incidents[claim.id] = replace(claim, phase=Phase.OPEN) if is_done else claim
            self._unnoted.add(claim.id)
        elif is_done:
            del self._incidents[claim.id]
            self._unnoted.discard(claim.id)

    def _rests(self, entry: NotifySettings) -> bool:
        return time.monotonic() < self._rests_until.get(entry.url, 0.0)

    def _tell(self, entry: NotifySettings, incident: Incident) -> bool:
        """Tell an incident, unless its receiver rests; whether that is done with. A refusal is final,
        a receiver that is away is asked again later.
        """
        if self._rests(entry):
            return False
        try:
            webhook.post(entry, self._pipeline.pipeline, incident)
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            away = webhook.may_pass(error)
            # The address may hold a secret, so the entry's place in the file has to do. What names no
            # host, which is no HTTPError, is quoted in part.
            text = (
                f": {error}"
                if isinstance(error, httpx.HTTPError)
                else ": the address names no host"
            )
            reason = f"{type(error).__name__}{text}".replace(entry.url, "the address")
            log.error("notification_not_delivered", code=incident.code, reason=reason, again=away)
            if away:
                self._rests_until[entry.url] = time.monotonic() + REST_S
            return not away
        return True


def _watch_name(origin: Origin, entry: NotifySettings) -> str:
    """Name what is looked for and who is told, so that another order in the file changes nothing."""
    digest = hashlib.sha256(f"{entry.url} {entry.format} {entry.severity}".encode()).hexdigest()
    return f"{origin}/{digest[:12]}"
