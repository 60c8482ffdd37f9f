"""Requests of one at a time: indices, aliases, positions; what the server refuses becomes an error with a hint."""

import json
from collections.abc import Mapping
from typing import Any

import httpx

from cdc.address import address
from cdc.errors import SinkError, SinkRejected, SinkUnavailable
from sinks.elasticsearch_bulk import BUSY, client

HINTS = {
    "unavailable": "it is tried again; is the server up?",
    "rejected": "repair the row or the index's mapping, then start `cdc run` again",
    "fenced": "run one `cdc run` per sink; start this one again when the other has ended",
}


class Server:
    """The server of a sink. Raises SinkUnavailable where trying again can help, and SinkRejected where it can't."""

    def __init__(self, sink: str, url: str) -> None:
        self._sink, self._url = sink, url

    def create(self, index: str, body: Mapping[str, Any]) -> None:
        try:
            self.ask("PUT", f"/{index}", body)
        except SinkRejected as error:
            if "resource_already_exists_exception" not in error.message:
                raise

    def ask(self, method: str, path: str, body: object = None, absent: object = None, *, partly: bool = False) -> Any:
        """One request. A 404 answers `absent` when that is given, and what it holds when `partly`."""
        content = body if isinstance(body, str) else json.dumps(body) if body is not None else None
        kind = "application/x-ndjson" if isinstance(body, str) else "application/json"
        try:
            response = client(self._url).request(method, path, content=content, headers={"content-type": kind})
        except httpx.TransportError:
            raise SinkUnavailable(
                f"The index at {address(self._url)} can't be reached.", hint=HINTS["unavailable"], sink=self._sink
            ) from None
        if response.status_code == 404 and absent is not None:
            return absent
        if response.is_success or (response.status_code == 404 and partly):
            return response.json()
        raise self._refused(response, path)

    def _refused(self, response: httpx.Response, path: str) -> SinkError:
        status, where = response.status_code, f"The index at {address(self._url)}"
        if status in BUSY:
            return SinkUnavailable(f"{where} is busy (status {status}).", hint=HINTS["unavailable"], sink=self._sink)
        if status in (401, 403):
            return SinkRejected(f"{where} refuses the user.", hint="see the sink's url", sink=self._sink)
        error = response.json().get("error", {})
        kind = error.get("type", "?") if isinstance(error, dict) else str(error)
        return SinkRejected(f"{where} refuses {path} (status {status}): {kind}.", hint=HINTS["rejected"])
