"""The server of the driver: requests about indices, in as few as fit."""

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from elastic_transport import ApiResponse, ObjectApiResponse

from cdc.errors import SinkError, SinkRejected
from cdc.model.address import address
from cdc.sinks.elasticsearch.client import (
    Refusal,
    decode_json,
    join_names,
    node,
    send_request,
    unavailable,
)

if TYPE_CHECKING:
    from elasticsearch import Elasticsearch

SHARDS = "cluster.max_shards_per_node"


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

        return Administration([node(self._url)])

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
            answer = send_request(self._url, method, path, body, query)
            return ObjectApiResponse(body=decode_json(answer, self._url), meta=answer.meta)
        except SinkError as error:
            error.details.setdefault("sink", self._sink)
            raise

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
