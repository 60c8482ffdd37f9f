"""Post messages to an address, with retries and a signature.

The signature is made as Stripe and others make it: `t=TIME,v1=HEX`, where HEX is the HMAC-SHA256 of
`TIME.BODY` with the secret. A receiver computes the same and refuses an old TIME.
"""

import hashlib
import hmac
import json
import time
from typing import Any

import httpx
from tenacity import (
    Retrying,
    retry_if_exception,
    stop_after_delay,
    wait_exponential,
)

from cdc.config.notify_settings import NotifySettings
from cdc.model.wording import advice
from cdc.notify.incidents import Incident, Phase

TIMEOUT_S = 10.0
PATIENCE_S = 60.0
"""Seconds for which one message is tried again, before its receiver counts as away."""
BUSY = (408, 425, 429)
"""Answers of a receiver that may take the same message later; those from 500 on as well."""


def document(pipeline: str, incident: Incident) -> dict[str, Any]:
    """What a receiver gets in the format `json`."""
    return {
        "pipeline": pipeline,
        "event": "recovered" if incident.phase is Phase.CLOSING else "opened",
        "id": incident.id,
        "code": incident.code,
        "severity": incident.severity,
        "hop": incident.hop,
        "subject": incident.subject,
        "message": incident.message,
        "fix": incident.fix,
        "since": incident.since,
        "runbook": f"docs/operate/runbooks/{incident.code}.md",
    }


def text(pipeline: str, incident: Incident) -> str:
    """The same as a sentence or two."""
    if incident.phase is Phase.CLOSING:
        return f"{pipeline}: over: {incident.message} ({incident.code})"
    return f"{pipeline}: {incident.severity}: {advice(incident.message, incident.fix)} ({incident.code})"


def signature(secret: str, body: bytes, moment: int) -> str:
    """Sign a body at a moment in Unix seconds."""
    digest = hmac.new(secret.encode(), f"{moment}.".encode() + body, hashlib.sha256).hexdigest()
    return f"t={moment},v1={digest}"


def may_pass(error: BaseException) -> bool:
    """Whether a receiver may take the same message later."""
    if isinstance(error, httpx.HTTPStatusError):
        code = error.response.status_code
        return code >= 500 or code in BUSY
    return isinstance(error, httpx.TransportError)


def post(settings: NotifySettings, pipeline: str, incident: Incident) -> None:
    """Tell an incident, or its end if it is closing; it is tried again for PATIENCE_S.

    Raises:
        httpx.HTTPError: the receiver can't be reached, or doesn't take it.
        httpx.InvalidURL, UnicodeError: the address names no host.
    """
    content = (
        {"text": text(pipeline, incident)}
        if settings.format == "slack"
        else document(pipeline, incident)
    )
    body = json.dumps(content).encode()
    attempts = Retrying(
        retry=retry_if_exception(may_pass),
        wait=wait_exponential(0.5, max=15),
        stop=stop_after_delay(PATIENCE_S),
        reraise=True,
    )
    attempts(_post_once, settings, body)


def _post_once(settings: NotifySettings, body: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    if settings.secret:
        headers["X-Cdc-Signature"] = signature(settings.secret, body, int(time.time()))
    # A redirect may lead to anybody, so none is followed: the answer then counts as a refusal.
    answer = httpx.post(
        settings.url, content=body, headers=headers, timeout=TIMEOUT_S, follow_redirects=False
    )
    if not answer.is_success:
        raise httpx.HTTPStatusError(
            f"answer {answer.status_code}", request=answer.request, response=answer
        )
