"""The official client's typed calls, sent over the sink's own connections.

So there is one way to the server, with one reading of its errors. The client takes 0.7 s and 55 MB to
import: whoever only reads views and positions doesn't.
"""

from collections.abc import Mapping
from typing import Any

from elastic_transport import ApiResponse, ObjectApiResponse
from elasticsearch import Elasticsearch

from cdc.errors import SinkError
from cdc.sinks.elasticsearch.client import decode_json, node, send_request


class Administration(Elasticsearch):
    """The client of a sink.

    Errors: those of `send_request`, with the sink's name. Any thread may use it.
    """

    def __init__(self, sink: str, url: str) -> None:
        super().__init__([node(url)])
        self._sink, self._url = sink, url

    def perform_request(  # noqa: PLR0913
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,  # noqa: ARG002
        body: Any | None = None,
        endpoint_id: str | None = None,  # noqa: ARG002
        path_parts: Mapping[str, Any] | None = None,  # noqa: ARG002
    ) -> ApiResponse[Any]:
        """Send what a typed call has made; called by all of them."""
        query = {name: _text(value) for name, value in (params or {}).items()}
        try:
            answer = send_request(self._url, method, path, body, query)
            return ObjectApiResponse(body=decode_json(answer, self._url), meta=answer.meta)
        except SinkError as error:
            error.details.setdefault("sink", self._sink)
            raise


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(value) if isinstance(value, list | tuple) else str(value)
