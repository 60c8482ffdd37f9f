"""Posts to an address when a finding opens and when it closes.

In:  the findings of each look. Out: posts by a thread, so that no look waits for a receiver.
Invariant: what waits for a receiver that is away is the newest state of each finding, in the order
in which the states came. What is open is kept in memory only: the next process posts it again.
"""

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import httpx
import structlog
import tenacity

from cdc.config.settings import NotifySettings
from cdc.errors import SecretUnreadable
from cdc.model import secrets
from cdc.model.finding import ORDER, Finding, Severity
from cdc.model.wording import advice

TIMEOUT_S = 10.0
PAUSE_S = 300.0
"""The longest pause before a receiver that is away is asked again; the first is 1 s."""
BUSY = (408, 425, 429)
"""Answers of a receiver that may take the same post later; so are those from 500 on."""
BLINDING = ("-unreachable", "-unreadable", "-silent", "another-server")
"""Ends of codes with which other findings can't be looked for: their absence says nothing."""
Key = tuple[str, str, str]
log = structlog.get_logger()


class Webhook:
    """Posts to one address until `close`. One thread calls `take`."""

    def __init__(
        self, settings: NotifySettings, pipeline: str, complete: Callable[[str], str]
    ) -> None:
        """`complete` completes the commands in a text, so that they can be pasted."""
        self._settings = settings
        self._pipeline = pipeline
        self._complete = complete
        self._seen_since: dict[Key, float] = {}
        self._gone_since: dict[Key, float] = {}
        self._open: dict[Key, Finding] = {}
        self._pending: dict[Key, dict[str, Any]] = {}
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="notify", daemon=True)
        self._thread.start()

    def take(self, findings: Iterable[Finding], now: float) -> None:
        """Take the findings of a look at a moment in Unix seconds; returns at once."""
        findings = list(findings)
        found = {
            (finding.code, finding.hop, finding.subject): finding
            for finding in findings
            if ORDER.index(finding.severity) <= ORDER.index(Severity(self._settings.severity))
        }
        for key, finding in found.items():
            self._gone_since.pop(key, None)
            since = self._seen_since.setdefault(key, now)
            if now - since >= self._settings.after_s:
                if key not in self._open:
                    self._put("opened", key, finding, now)
                self._open[key] = finding
        if any(finding.code.endswith(BLINDING) for finding in findings):
            return
        for key in [key for key in self._seen_since if key not in found]:
            if now - self._gone_since.setdefault(key, now) >= self._settings.after_s:
                if key in self._open:
                    self._put("closed", key, self._open.pop(key), now)
                del self._seen_since[key]
                del self._gone_since[key]

    def close(self) -> None:
        """End, after posts that the receiver takes at once."""
        self._closing.set()
        with self._changed:
            self._changed.notify()
        self._thread.join(TIMEOUT_S)

    def _put(self, event: str, key: Key, finding: Finding, now: float) -> None:
        message = self._complete(finding.message)
        fix = self._complete(finding.fix)
        text = advice(message, fix) if event == "opened" else message
        document = {
            "pipeline": self._pipeline,
            "event": event,
            "time": now,
            "code": finding.code,
            "severity": finding.severity,
            "hop": finding.hop,
            "subject": finding.subject,
            "message": message,
            "fix": fix,
            "since": finding.since or self._seen_since[key],
            "runbook": f"docs/operate/runbooks/{finding.code}.md",
            "text": f"{self._pipeline}: {finding.severity} {event}: {text} ({finding.code})",
        }
        with self._changed:
            self._pending.pop(key, None)
            self._pending[key] = document
            self._changed.notify()

    def _work(self) -> None:
        attempts = tenacity.Retrying(
            retry=tenacity.retry_if_result(bool),
            wait=tenacity.wait_exponential(max=PAUSE_S),
            sleep=tenacity.sleep_using_event(self._closing),
            stop=tenacity.stop_when_event_set(self._closing),
        )
        with suppress(tenacity.RetryError):
            while self._has_news():
                attempts(self._post_first)

    def _has_news(self) -> bool:
        """Wait for something to post, or for the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending or self._closing.is_set())
            return bool(self._pending)

    def _post_first(self) -> bool:
        """Post what has waited longest; whether the receiver is away."""
        with self._changed:
            key, document = next(iter(self._pending.items()))
        try:
            url = httpx.URL(self._settings.url)
            login = (secrets.read(url.username), secrets.read(url.password))
            # No redirect is followed, which may lead to anybody: it counts as a refusal.
            answer = httpx.post(
                url, json=document, timeout=TIMEOUT_S, auth=login if url.userinfo else None
            )
            is_away = answer.status_code >= 500 or answer.status_code in BUSY
            reason = "" if answer.is_success else f"answer {answer.status_code}"
        except Exception as error:
            is_away = isinstance(error, httpx.TransportError | SecretUnreadable)
            # Without the message, which may quote the address, and so a secret.
            reason = type(error).__name__
        if reason:
            log.error("notification_not_delivered", code=key[0], reason=reason, again=is_away)
        with self._changed:
            if not is_away and self._pending[key] is document:
                del self._pending[key]
        return is_away
