"""Requests to the index: anything but the server's own good answer is an error. Executors send them by
`send_request`, the driver through a `Server`, which administers indices, too.

Retries are ours, since they are of single items of a bulk. An index may be blocked or closed: the
error says how that is lifted.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote, urlencode

import msgspec
from elastic_transport import ApiResponse, ObjectApiResponse

from cdc.errors import CdcError, SinkBlocked, SinkError, SinkRejected
from cdc.model.address import address
from cdc.sinks.elasticsearch.connection import (
    CAUSE_HINTS,
    FAILED,
    JSON,
    LOGIN_HINT,
    PRODUCT,
    UNAUTHORIZED,
    UNAVAILABLE_HINT,
    UNREADABLE_HINT,
    Answer,
    connections,
    unavailable,
)

if TYPE_CHECKING:
    from elasticsearch import Elasticsearch

HINTS = {
    **CAUSE_HINTS,
    "unavailable": UNAVAILABLE_HINT,
    "blocked": "it is tried again until the block is lifted",
    "rejected": "repair the row or the index's mapping, then start `cdc run` again",
    "forbidden": "give the sink's user or API key the cluster privilege `monitor`; `manage`, `read` and `write` on"
    " the indices <pipeline>-*; `create_index`, `read`, `write` and `view_index_metadata` on cdc-position",
    "login": LOGIN_HINT,
    "unreadable": UNREADABLE_HINT,
    "fenced": "run one `cdc run` per sink; start this one again when the other has ended",
}
OK = 200
FORBIDDEN = 403
NOT_FOUND = 404
TOO_LARGE = 413
BUSY = 429
SECURITY = "security_exception"
"""Error type of an item that the sink's user may not read or write."""
BLOCKED = "cluster_block_exception"
CLOSED = "index_closed_exception"
ABSENT_TYPES = ("index_not_found_exception", "invalid_index_name_exception")
"""Error types of an item when its writer's alias is gone: another writer has taken over."""
TAKEN_OVER = "Another writer has taken over the view; this one stops."
LINE_BYTES = 3000
"""Bytes of names in a request's first line; the server takes 4096 bytes of it by default."""
LINES = "application/x-ndjson"
WRITE = "index.blocks.write"
DISK_FULL = "index.blocks.read_only_allow_delete"
BLOCKS = {
    "5": "index.blocks.read_only",
    "7": "index.blocks.read",
    "8": WRITE,
    "9": "index.blocks.metadata",
    "12": DISK_FULL,
}
"""Settings that block an index, by the number that the server's reasons have."""
CLOSED_SETTING = "index.verified_before_close"
"""The setting that the server gives an index for as long as it is closed."""
BLOCK_REASON = re.compile(r"index \[([^\]]+)\] blocked by: \[\w+/(\d+)/")
ACTION = re.compile(r"action \[([\w:/*\[\]]+)\] is unauthorized")
ON = re.compile(r"on indices \[([^\]]{1,300})\]")
GRANTED = re.compile(r"granted by the (cluster|index) privileges \[([\w,]+)\]")
"""What a refusal says that a user may not do, and which privileges would allow it."""
DISK_FULL_HINT = "no change is lost; the server lifts this block when its disk has room"
SHARDS = "cluster.max_shards_per_node"

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


class Refusal(SinkRejected):
    """The server's own refusal. Its `reason` may quote values: it is inspected, never shown."""

    def __init__(
        self, message: str, *, hint: str, status: int, kind: str = "", reason: str = ""
    ) -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.kind = kind
        self.reason = reason


def send_request(
    url: str,
    method: str,
    path: str,
    body: object = None,
    query: Mapping[str, str] | None = None,
    *,
    is_repeatable: bool = True,
) -> Answer:
    """Send a request; returns the good answer. A text as body is sent as lines of JSON.

    url: of a node, or of several with commas between them. is_repeatable: whether a request may be
    sent to another node when it isn't known what became of it.

    Raises:
        SinkUnavailable: it can't be reached, is busy, has failed, or something else answers in its
        place. Refusal: the server refuses it.
    """
    is_ndjson = isinstance(body, str | bytes)
    content = body.encode() if isinstance(body, str) else body
    if not (content is None or isinstance(content, bytes)):
        content = _encode(content)
    headers = {"accept": JSON, "content-type": LINES if is_ndjson else JSON}
    target = f"{path}?{urlencode(query)}" if query else path
    nodes = connections(url)
    answer = nodes.send(method, target, content, headers, is_repeatable=is_repeatable)
    is_own = PRODUCT in answer.meta.headers or (
        _may_be_opensearch(answer) and nodes.is_opensearch()
    )
    if error := _error_of(answer, f"The index at {answer.node}", path, is_own):
        raise error
    return answer


def is_blocked(status: int, kind: str | None) -> bool:
    """Whether a block on an index refuses a request or an item of one.

    A full disk's has the status of a busy server; without a master the cluster has a block of its
    own, which is nobody's to lift.
    """
    return kind == BLOCKED and status < FAILED


def blocked_error(where: str, reason: str) -> SinkBlocked:
    """Make the error of what a block refuses. reason: the server's own; it quotes no value."""
    block = parse_reason(reason)
    if block is None:
        return SinkBlocked(f"{where} is blocked: {BLOCKED}.", hint=HINTS["blocked"])
    # One on writes may be a promotion's, which lifts it.
    hint = HINTS["blocked"] if block[1] == WRITE else lift_hint(*block)
    return SinkBlocked(block_message(*block), hint=hint)


def forbidden_error(where: str, status: int, reason: str = "") -> Refusal:
    """Make the error of a login that isn't taken, or of what the sink's user may not do.

    reason: the server's own; of an action it quotes no value.
    """
    if status == UNAUTHORIZED:
        return Refusal(
            f"{where} doesn't accept the login (status {status}).",
            hint=HINTS["login"],
            status=status,
        )
    action = ACTION.search(reason)
    granted = GRANTED.search(reason)
    indices = ON.search(reason)
    what = f"{action[1] if action else 'that'}{f' on {indices[1]}' if indices else ''}"
    needed = (
        f"; any of the {granted[1]} privileges {granted[2].replace(',', ', ')} allows it"
        if granted
        else ""
    )
    return Refusal(
        f"{where} doesn't allow the sink's user {what} (status {status}){needed}.",
        hint=HINTS["forbidden"],
        status=status,
    )


def closed_error(url: str) -> SinkBlocked:
    """Make the error of an index that is closed. The driver finds out which one it is."""
    return SinkBlocked(f"An index at {address(url)} is closed.", hint=HINTS["blocked"])


def _may_be_opensearch(answer: Answer) -> bool:
    """Whether OpenSearch may have sent an answer, not a proxy in its place: it has JSON, and an error's
    has the status, too.
    """
    if answer.meta.mimetype != JSON:
        return False
    try:
        return answer.status < 300 or _decode(answer.body)["status"] == answer.status
    except (msgspec.DecodeError, LookupError, TypeError):
        return False


def _error_of(answer: Answer, where: str, path: str, is_own: bool) -> CdcError | None:
    """Make the error of an answer that isn't good. is_own: whether the server itself has given it."""
    status = answer.status
    is_good = OK <= status < 300
    kind, reason = ("", "") if is_good else _kind(answer)
    if is_blocked(status, kind):
        return blocked_error(where, reason)
    if status == BUSY or status >= FAILED:
        return unavailable(f"{where} is busy (status {status}{kind and f': {kind}'}).")
    if status in (UNAUTHORIZED, FORBIDDEN):
        return forbidden_error(where, status, reason)
    if not is_own and status != TOO_LARGE:
        return unavailable(
            f"What answers for {where[0].lower()}{where[1:]} is no Elasticsearch and no OpenSearch"
            f" (status {status})."
        )
    if is_good:
        return None
    shown = unquote(path.partition("?")[0])[:200]
    return Refusal(
        f"{where} refuses {shown} (status {status}): {kind or '?'}.",
        hint=HINTS["rejected"],
        status=status,
        kind=kind,
        reason=reason,
    )


def _kind(answer: Answer) -> tuple[str, str]:
    """Parse the type and the reason of a refusal's error."""
    try:
        error = _decode(answer.body)["error"]
    except (msgspec.DecodeError, KeyError, TypeError):
        return "", ""
    if isinstance(error, dict):
        return str(error.get("type", "")), str(error.get("reason", ""))
    return str(error), ""


def decode_json(answer: Answer, url: str) -> Any:
    """Decode the JSON of an answer; raises SinkUnavailable for half an answer."""
    try:
        return _decode(answer.body)
    except msgspec.DecodeError:
        raise unavailable(f"The index at {address(url)} has sent half an answer.") from None


def group_names(names: Iterable[str]) -> Iterator[list[str]]:
    """Group names for requests' paths; as many at a time as fit into a line."""
    group: list[str] = []
    length = 0
    for name in names:
        name_length = len(quote(name, safe="")) + 1
        if group and length + name_length > LINE_BYTES:
            yield group
            group = []
            length = 0
        group.append(name)
        length += name_length
    if group:
        yield group


def join_names(names: Iterable[str]) -> Iterator[str]:
    """Join names by commas for a request's path, in the same groups."""
    return (",".join(quote(name, safe="@") for name in group) for group in group_names(names))


@contextmanager
def ignoring_absent() -> Iterator[None]:
    """Ignore the server's own 404: what is to be changed or removed isn't there."""
    try:
        yield
    except Refusal as error:
        if error.status != NOT_FOUND:
            raise


def blocks_of(settings: Mapping[str, object]) -> list[str]:
    """List the blocks that an index' flat settings have."""
    return [block for block in BLOCKS.values() if str(settings.get(block)) == "true"]


def parse_reason(reason: str) -> tuple[str, str] | None:
    """Parse index and setting that a refusal's reason names first; None where it names none."""
    match = BLOCK_REASON.search(reason)
    if match is None or match[2] not in BLOCKS:
        return None
    return match[1], BLOCKS[match[2]]


def block_message(index: str, block: str) -> str:
    return f"The index {index} is blocked: {block} is set."


def lift_hint(index: str, block: str) -> str:
    """Say how a block is lifted that isn't a promotion's."""
    if block == DISK_FULL:
        return DISK_FULL_HINT
    body = f"""-X PUT -H content-type:application/json -d '{{"{block}":null}}' """
    return f"no change is lost; once its reason is gone: {curl(f'/{index}/_settings', body)}"


def open_hint(index: str) -> str:
    return f"no change is lost; once its reason is gone: {curl(f'/{index}/_open', '-X POST ')}"


def curl(path: str, options: str = "") -> str:
    """Make the command that sends a request to the sink's server.

    The shell expands nothing of the path: a table's name may have any character.
    """
    return f'curl -s {options}"$CDC_ELASTICSEARCH{quote(path, safe="/@?=&*,")}"'


class Server:
    """The server of a sink.

    Raises SinkUnavailable where trying again can help, and SinkRejected where it can't.
    """

    def __init__(self, sink: str, url: str) -> None:
        self._sink = sink
        self._url = url

    @property
    def name(self) -> str:
        """Name of the server in messages."""
        return f"the index at {address(self._url)}"

    @cached_property
    def client(self) -> "Elasticsearch":
        """The official client's typed calls, which administer indices. They are sent as all other
        requests are, so that there is one reading of errors.

        The client takes 0.7 s and 55 MB to import: the first caller imports it, so that whoever only
        reads views and positions doesn't.
        """
        from elasticsearch import Elasticsearch

        request = self.request

        class Administration(Elasticsearch):
            def perform_request(
                self,
                method: str,
                path: str,
                *,
                params: Mapping[str, Any] | None = None,
                body: Any | None = None,
                **_: object,
            ) -> ApiResponse[Any]:
                """Send what a typed call has made; called by all of them."""
                query = {name: _text(value) for name, value in (params or {}).items()}
                return request(method, path, body, query)

        # It never connects itself.
        return Administration("http://unused:1")

    def ask(
        self, method: str, path: str, body: object = None, query: Mapping[str, str] | None = None
    ) -> Any:
        """Send a request that reads or writes documents, or looks up aliases; returns its JSON."""
        return self.request(method, path, body, query).body

    def request(
        self, method: str, path: str, body: object = None, query: Mapping[str, str] | None = None
    ) -> ObjectApiResponse[Any]:
        """Send a request; returns the JSON of its answer, with what HTTP says of it."""
        try:
            answer = send_request(
                self._url, method, path, body, query, is_repeatable=method == "GET"
            )
            return ObjectApiResponse(body=decode_json(answer, self._url), meta=answer.meta)
        except SinkError as error:
            error.details.setdefault("sink", self._sink)
            raise

    @property
    def product(self) -> str:
        """Name of the server's product."""
        return "OpenSearch" if connections(self._url).is_opensearch() else "Elasticsearch"

    def open_point_in_time(self, index: str, keep_alive: str) -> str:
        """Open a point in time of an index; returns its id."""
        if connections(self._url).is_opensearch():
            path = f"/{quote(index, safe='@')}/_search/point_in_time"
            return str(self.ask("POST", path, query={"keep_alive": keep_alive})["pit_id"])
        return str(self.client.open_point_in_time(index=index, keep_alive=keep_alive)["id"])

    def close_point_in_time(self, pit: str) -> None:
        with ignoring_absent():
            if connections(self._url).is_opensearch():
                self.ask("DELETE", "/_search/point_in_time", {"pit_id": [pit]})
            else:
                self.client.close_point_in_time(id=pit)

    def refresh(self, names: Iterable[str], query: Mapping[str, str] | None = None) -> None:
        """Refresh indices, so that searches see what is written."""
        for group in join_names(names):
            answer = self.ask("POST", f"/{group}/_refresh", query=query)
            if answer["_shards"]["failed"]:
                raise unavailable(f"Not all of {self.name} could be refreshed.")

    def switch(self, actions: Iterable[Mapping[str, Any]]) -> None:
        """Change aliases, all of them in one step, and on every node."""
        answer = self.client.indices.update_aliases(actions=list(actions))
        if not answer["acknowledged"]:
            raise unavailable(f"Not all of {self.name} knows its new aliases yet.")

    def create(self, index: str, body: Mapping[str, Any]) -> None:
        """Create an index with these settings, mappings and aliases, unless it exists."""
        try:
            self.client.indices.create(index=index, **body)
        except Refusal as error:
            if error.kind == "resource_already_exists_exception":
                return
            if error.kind == "validation_exception" and "shards open" in error.reason:
                raise self.full(1) from None
            raise

    def full(self, needed: int) -> SinkRejected:
        """Build the error of a cluster without room for so many more shards."""
        return SinkRejected(
            f"{self.name.capitalize()} holds as many shards as it takes: there is no room for {needed} more.",
            hint=f"raise {SHARDS}, add a node, or remove what isn't needed: cdc -p FILE generations --clean",
            sink=self._sink,
        )


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(value) if isinstance(value, list | tuple) else str(value)
