"""Client of Kafka Connect's REST interface: check, put, watch, restart and delete a connector.

In:  the worker's address. Out: plain values; ConnectorError with the next command.
Invariant: what a password field of a configuration holds never appears in a message.
"""

import re
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from urllib.parse import unquote, urlsplit

import httpx
from tenacity import (
    RetryError,
    Retrying,
    retry_if_result,
    stop_after_delay,
    wait_random_exponential,
)

from cdc.errors import ConnectorError
from cdc.model import secrets
from cdc.model.causes import cause
from cdc.model.login import Login, login_of, ssl_context

TIMEOUT_S = 10.0
"""Seconds to wait for an answer. Checking a configuration connects to Postgres, which may be slow
to fail.
"""
REBALANCE_S = 30.0
"""Seconds that a rebalance of the workers, or stopping a connector, may take."""
REBALANCING = 409
TRACE_CHARACTERS = 300
UNAUTHORIZED = (401, 403)
TLS_HINTS = {
    "trust": "name the certificate of its CA in the pipeline file: connect: {url: ..., ca: FILE}",
    "certificate": "write the host name of its certificate in `connect`, or renew the certificate",
    "client": "name a client's certificate in the pipeline file: connect: {url: ..., certificate: FILE, key: FILE}",
    "plain": "write http:// in `connect`, or the port at which it has TLS",
}
"""Hints by the kind of a `Cause`."""
SECRET = re.compile(r"password|secret|token|credential|jaas", re.IGNORECASE)
IN_TEXT = re.compile(
    r"(?i)(password\"?\s*[=:]\s*)(\"[^\"]*\"|[^\s,;&]+)|(://[^/\s:@]*:)[^@\s]+(?=@)"
)


@dataclass(frozen=True)
class ConnectorState:
    """State of a connector and its tasks in Connect's words: RUNNING, FAILED, PAUSED, STOPPED;
    MISSING when there is none.
    """

    connector: str
    tasks: tuple[str, ...] = ()
    trace: str | None = None
    """Of the part that has failed: the first line of its trace and, where that says more, the last
    cause.
    """
    causes: str = ""
    """The whole trace without its calls: what has failed, and why. Too long for messages."""

    @property
    def running(self) -> bool:
        """Whether the connector and all of its tasks run."""
        return self.connector == "RUNNING" and bool(self.tasks) and set(self.tasks) == {"RUNNING"}

    @property
    def failed(self) -> bool:
        """Whether the connector or one of its tasks has failed."""
        return "FAILED" in (self.connector, *self.tasks)


@cache
def _system_authorities() -> ssl.SSLContext:
    """Read the certificates once in a process: that takes longer than a request."""
    return ssl.create_default_context()


def _context(login: Login) -> ssl.SSLContext:
    return ssl_context(login) if login.ca or login.certificate else _system_authorities()


def _authorization(url: str) -> dict[str, Any]:
    """Return httpx' arguments for a user or a token, by what files hold now."""
    login = login_of(url)
    parts = urlsplit(url)
    user = login.user or unquote(parts.username or "")
    password = login.password or unquote(parts.password or "")
    if login.token:
        return {"headers": {"authorization": f"Bearer {secrets.read(login.token)}"}}
    return {"auth": (secrets.read(user), secrets.read(password))} if user or password else {}


class Connect:
    """A Connect cluster, reached through one of its workers. Every method may raise
    ConnectorError.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConnectorError(
                "`connect` isn't a URL.", hint="write it as http://host:8083 in the pipeline file"
            )
        self.server = f"{parts.hostname}:{parts.port or parts.scheme}"
        self._client = httpx.Client(
            base_url=parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl(),
            timeout=TIMEOUT_S,
            verify=parts.scheme == "https" and _context(login_of(url)),
            **_authorization(url),
        )

    def __enter__(self) -> "Connect":
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def validate(self, config: Mapping[str, str]) -> None:
        """Have the plugin check the configuration, with a login to Postgres. Creates nothing."""
        plugin = config["connector.class"].rsplit(".", 1)[-1]
        body = self._call("PUT", f"/connector-plugins/{plugin}/config/validate", config)
        faults = {
            entry["value"]["name"]: [redacted(text, config) for text in entry["value"]["errors"]]
            for entry in body["configs"]
            if entry["value"]["errors"]
        }
        if faults:
            raise _invalid(config["name"], faults)

    def plugins(self) -> dict[str, str]:
        """Read the worker's connectors: the version by class."""
        listed = self._call("GET", "/connector-plugins")
        return {plugin["class"]: plugin.get("version", "") for plugin in listed}

    def config(self, name: str) -> dict[str, str] | None:
        """Read the configuration as it was put, passwords included; None when there is no such
        connector.
        """
        return self._call("GET", f"/connectors/{name}/config", missing=None)  # type: ignore[no-any-return]

    def put(self, name: str, config: Mapping[str, str]) -> None:
        """Create the connector or give it this configuration; tasks restart only when it
        differs.
        """
        self._call("PUT", f"/connectors/{name}/config", config)

    def state(self, name: str) -> ConnectorState:
        """Read the state of a connector and its tasks."""
        body = self._call("GET", f"/connectors/{name}/status", missing=None)
        if body is None:
            return ConnectorState("MISSING")
        parts = [body["connector"], *body["tasks"]]
        trace = next((part.get("trace") for part in parts if part["state"] == "FAILED"), None)
        tasks = tuple(task["state"] for task in body["tasks"])
        return ConnectorState(
            body["connector"]["state"],
            tasks,
            _summarize_trace(trace) if trace else None,
            _remove_calls(trace or ""),
        )

    def restart_failed(self, name: str) -> None:
        """Restart the connector and its tasks where they have failed."""
        self._call("POST", f"/connectors/{name}/restart?includeTasks=true&onlyFailed=true")

    def restart(self, name: str) -> None:
        """Restart the connector and its tasks."""
        self._call("POST", f"/connectors/{name}/restart?includeTasks=true")

    def delete(self, name: str) -> None:
        """Delete the connector but not its offsets: put again, it continues from them. A missing
        one is no error.
        """
        self._call("DELETE", f"/connectors/{name}", missing=None)

    def create_stopped(self, name: str, config: Mapping[str, str]) -> None:
        """Create the connector without starting it: its offsets can be read before it does
        anything.
        """
        self._call(
            "POST",
            "/connectors",
            config,
            {"name": name, "config": dict(config), "initial_state": "STOPPED"},
        )

    def offsets(self, name: str) -> list[dict[str, Any]]:
        """Read the connector's stored source offsets; empty when it has never sent a record."""
        body = self._call("GET", f"/connectors/{name}/offsets")
        return [entry["offset"] for entry in body["offsets"] if entry["offset"]]

    def stop(self, name: str) -> None:
        """Stop the connector's tasks. The records it has sent by then are committed."""
        self._call("PUT", f"/connectors/{name}/stop")
        self._wait_until_stopped(name)

    def pause(self, name: str) -> None:
        """Pause the connector: it reads nothing more, and its tasks stay."""
        self._call("PUT", f"/connectors/{name}/pause")

    def _wait_until_stopped(self, name: str) -> None:
        deadline = time.monotonic() + REBALANCE_S
        while (state := self.state(name)).connector != "STOPPED" or state.tasks:
            if time.monotonic() > deadline:
                raise ConnectorError(
                    f"The connector {name} didn't stop within {REBALANCE_S:.0f} s.",
                    hint="look at the workers' logs, then run the command again",
                    connector=name,
                )
            time.sleep(0.1)

    def resume(self, name: str) -> None:
        """Start a stopped or paused connector again."""
        self._call("PUT", f"/connectors/{name}/resume")

    def delete_offsets(self, name: str) -> None:
        """Delete the offsets of a stopped connector: resumed, it takes a new snapshot."""
        self._call("DELETE", f"/connectors/{name}/offsets")

    def reset(self, name: str) -> None:
        """Delete the connector and its offsets: put again, it takes a new snapshot. A missing one is
        no error, even while the workers still report its state, which outlives it for a moment.
        """
        if self._call("PUT", f"/connectors/{name}/stop", missing=None) is None:
            return
        self._wait_until_stopped(name)
        self.delete_offsets(name)
        self.delete(name)

    def _call(
        self,
        method: str,
        path: str,
        config: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        *,
        missing: Any = ...,
    ) -> Any:
        retrying = Retrying(
            retry=retry_if_result(_passes),
            stop=stop_after_delay(REBALANCE_S),
            wait=wait_random_exponential(multiplier=0.2, max=2),
        )
        try:
            response: httpx.Response = retrying(self._send, method, path, body or config)
        except RetryError as error:
            response = error.last_attempt.result()
        if response.status_code == REBALANCING:
            raise ConnectorError(
                f"Kafka Connect at {self.server} has been rebalancing for {REBALANCE_S:.0f} s.",
                hint="look at the workers' logs, then run the command again",
            )
        if response.status_code == 404 and missing is not ...:
            return missing
        if response.is_error:
            raise self._refused(response, config or {})
        return response.json() if response.content else {}

    def _send(self, method: str, path: str, body: Mapping[str, Any] | None) -> httpx.Response:
        try:
            return self._client.request(method, path, json=dict(body) if body is not None else None)
        except httpx.HTTPError as error:
            why = cause(str(error))
            raise ConnectorError(
                f"Kafka Connect at {self.server} can't be reached{str(why) or f': {type(error).__name__}'}.",
                finding_key="connect-unreachable",
                hint=TLS_HINTS.get(
                    why.kind,
                    "check `connect` in the pipeline file; the local stack is started by: cdc -p FILE up",
                ),
                server=self.server,
            ) from None

    def _refused(self, response: httpx.Response, config: Mapping[str, str]) -> ConnectorError:
        try:
            text = str(response.json()["message"])
        except (ValueError, KeyError, TypeError):
            text = response.reason_phrase
        if response.status_code in UNAUTHORIZED:
            return ConnectorError(
                f"Kafka Connect at {self.server} refuses the user or the token (status {response.status_code}).",
                finding_key="connect-unreachable",
                hint="check user and password, or token, of `connect` in the pipeline file",
                server=self.server,
            )
        missing = "the worker lacks the plugin or the connector: GET /connector-plugins and /connectors show which"
        return ConnectorError(
            f"Kafka Connect at {self.server} answers {response.status_code}: {redacted(text, config)}",
            hint=missing if response.status_code == 404 else "look at the worker's log",
            server=self.server,
        )


def _passes(response: httpx.Response) -> bool:
    """Whether the same request may succeed in a moment: the workers are rebalancing, or one couldn't write to
    its own topic, as after another was killed.
    """
    is_unwritten = response.status_code == 500 and "safely retried" in response.text
    return response.status_code == REBALANCING or is_unwritten


def takes_snapshot(offsets: Sequence[Mapping[str, object]]) -> bool:
    """Whether a connector with these offsets begins with a snapshot, because it has never finished
    one.
    """
    # A blocking snapshot was requested after the first one, and isn't restarted.
    return not any(
        offset.get("snapshot") in (None, "BLOCKING") or offset.get("snapshot_completed")
        for offset in offsets
    )


def redacted(text: str, config: Mapping[str, str] | None = None) -> str:
    """Remove the configuration's secrets from a text, and whatever looks like a secret."""
    for name, value in (config or {}).items():
        if len(value) > 3 and SECRET.search(name):
            text = text.replace(value, "***")
    return IN_TEXT.sub(lambda match: f"{match.group(1) or match.group(3)}***", text)


def _summarize_trace(trace: str) -> str:
    first, *lines = trace.strip().splitlines()
    causes = [line.removeprefix("Caused by: ") for line in lines if line.startswith("Caused by: ")]
    summary = f"{first} (caused by {causes[-1]})" if causes and causes[-1] not in first else first
    # Debezium prints its whole offset, which would push the cause beyond the length that is shown.
    return redacted(re.sub(r"\w+OffsetContext \[.*\]", "its offset", summary))[:TRACE_CHARACTERS]


def _remove_calls(trace: str) -> str:
    return "\n".join(line for line in trace.splitlines() if not re.match(r"\s+(at|\.\.\.) ", line))


def _invalid(name: str, faults: Mapping[str, list[str]]) -> ConnectorError:
    texts = [f"{field}: {' '.join(errors)}" for field, errors in faults.items()]
    everything = " ".join(texts)
    hint = "correct the pipeline file, then run: cdc -p FILE register"
    if "password authentication failed" in everything or "does not exist" in everything:
        hint = "check source.replication_user and source.replication_password, then: cdc -p FILE migrate"
    return ConnectorError(
        f"The connector {name} would not start. {'; '.join(texts)}.", hint=hint, connector=name
    )
