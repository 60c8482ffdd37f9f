"""One request to the index, of driver and executors alike: what isn't the server's own answer is an error."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import quote

import httpx

from cdc.address import address
from cdc.causes import Cause, cause
from cdc.errors import CdcError, SinkRejected, SinkUnavailable

HINTS = {
    "unavailable": "it is tried again; is the server up?",
    "rejected": "repair the row or the index's mapping, then start `cdc run` again",
    "fenced": "run one `cdc run` per sink; start this one again when the other has ended",
}
UNTRUSTED = {
    "trust": "export SSL_CERT_FILE=/path/of/its/ca.pem, for every cdc and Spark's executors",
    "certificate": "write the host name of its certificate in the sink's url, or renew the certificate",
    "client": "clients' certificates aren't supported: give it a user and password in the sink's url",
    "plain": "write http:// in the sink's url, or the port at which it has TLS",
}
BUSY = 429
BLOCKED = "cluster_block_exception"
PRODUCT = "x-elastic-product"
"""The header by which the server's answers are told from those of a proxy."""
LINE_BYTES = 3000
"""Of names in a request's first line; the server takes 4096 bytes of it by default."""

_clients: dict[str, httpx.Client] = {}


class Refusal(SinkRejected):
    """The server's own "no". Its `reason` may quote values: it is looked at, never shown."""

    def __init__(self, message: str, *, hint: str, status: int, kind: str = "", reason: str = "") -> None:
        super().__init__(message, hint=hint)
        self.status, self.kind, self.reason = status, kind, reason


def client(url: str) -> httpx.Client:
    """The connections of this process; executors keep them across batches."""
    if url not in _clients:
        _clients[url] = httpx.Client(base_url=url, timeout=httpx.Timeout(60.0, connect=5.0))
    return _clients[url]


def forget(url: str) -> None:
    if connection := _clients.pop(url, None):
        connection.close()


def answered(
    url: str,
    method: str,
    path: str,
    body: object = None,
    query: Mapping[str, str] | None = None,
    *,
    absent: bool = False,
) -> httpx.Response:
    """The server's good answer; one that says 404, too, if `absent`. A text as body is sent as lines of JSON.

    Raises:
        SinkUnavailable: it can't be reached, is busy, has failed, or something else answers in its place.
        Refusal: it won't.
    """
    lines = isinstance(body, str | bytes)
    content = body if lines or body is None else json.dumps(body)
    headers = {"content-type": "application/x-ndjson" if lines else "application/json"}
    try:
        response = client(url).request(method, path, params=query, content=content, headers=headers)  # type: ignore[arg-type]
    except httpx.HTTPError as failure:
        raise _unreached(url, cause(f"{type(failure).__name__} {failure}")) from None
    error = _refused(response, f"The index at {address(url)}", path)
    not_there = isinstance(error, Refusal) and error.status == httpx.codes.NOT_FOUND
    if error and not (absent and not_there):
        raise error
    return response


def _unreached(url: str, why: Cause) -> CdcError:
    message = f"The index at {address(url)} can't be reached{why}."
    return unavailable(message) if why.passes else SinkRejected(message, hint=UNTRUSTED[why.kind])


def unavailable(message: str) -> SinkUnavailable:
    return SinkUnavailable(message, hint=HINTS["unavailable"])


def _refused(response: httpx.Response, where: str, path: str) -> CdcError | None:
    status = response.status_code
    if status == BUSY or response.is_server_error:
        return unavailable(f"{where} is busy (status {status}).")
    kind, reason = _kind(response)
    if kind == BLOCKED:
        return unavailable(f"{where} takes no writes: {kind}.")
    if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        return Refusal(f"{where} refuses the user (status {status}).", hint="see the sink's url", status=status)
    if PRODUCT not in response.headers and status != httpx.codes.REQUEST_ENTITY_TOO_LARGE:
        return unavailable(f"What answers for {where[0].lower()}{where[1:]} is no Elasticsearch (status {status}).")
    if response.is_success:
        return None
    shown = path.partition("?")[0][:200]
    return Refusal(
        f"{where} refuses {shown} (status {status}): {kind or '?'}.",
        hint=HINTS["rejected"],
        status=status,
        kind=kind,
        reason=reason,
    )


def _kind(response: httpx.Response) -> tuple[str, str]:
    """The type of a refusal's error, and its reason."""
    if response.is_success:
        return "", ""
    try:
        error = response.json().get("error", {})
    except (ValueError, AttributeError):
        return "", ""
    return (str(error.get("type", "")), str(error.get("reason", ""))) if isinstance(error, dict) else (str(error), "")


def decoded(response: httpx.Response, url: str) -> Any:
    """The JSON of an answer."""
    try:
        return response.json()
    except ValueError:
        raise unavailable(f"The index at {address(url)} has sent half an answer.") from None


def grouped(names: Iterable[str]) -> Iterator[str]:
    """Names for a request's path, joined by commas; as many at a time as fit into its line."""
    group: list[str] = []
    for name in names:
        escaped = quote(name, safe="@")
        if group and sum(map(len, group)) + len(group) + len(escaped) > LINE_BYTES:
            yield ",".join(group)
            group = []
        group.append(escaped)
    if group:
        yield ",".join(group)
