"""The server of the driver: requests about indices, in as few as fit."""

from collections.abc import Iterable, Mapping
from typing import Any

from cdc.errors import SinkError, SinkRejected
from cdc.model.address import address
from cdc.sinks.elasticsearch.client import (
    NOT_FOUND,
    Refusal,
    decode_json,
    join_names,
    send_request,
    unavailable,
)

SHARDS = "cluster.max_shards_per_node"


class Server:
    """The server of a sink.

    Raises SinkUnavailable where trying again can help, and SinkRejected where it can't.
    """

    def __init__(self, sink: str, url: str) -> None:
        self._sink, self._url = sink, url

    @property
    def name(self) -> str:
        """Name of the server in messages."""
        return f"the index at {address(self._url)}"

    def ask(
        self,
        method: str,
        path: str,
        body: object = None,
        query: Mapping[str, str] | None = None,
        *,
        absent: object = None,
    ) -> Any:
        """Send one request; returns its JSON, or `absent` for the server's own 404 when that is
        given.
        """
        try:
            answer = send_request(self._url, method, path, body, query, absent=absent is not None)
            return absent if answer.status == NOT_FOUND else decode_json(answer, self._url)
        except SinkError as error:
            error.details.setdefault("sink", self._sink)
            raise

    def ask_groups(
        self, method: str, names: Iterable[str], path: str, body: object = None, **options: Any
    ) -> list[Any]:
        """Send the same request for many indices, in groups; returns one answer per group."""
        return [self.ask(method, f"/{group}{path}", body, **options) for group in join_names(names)]

    def refresh(self, names: Iterable[str], query: Mapping[str, str] | None = None) -> None:
        """Refresh indices, so that searches see what is written."""
        for answer in self.ask_groups("POST", names, "/_refresh", query=query):
            if answer["_shards"]["failed"]:
                raise unavailable(f"Not all of {self.name} could be refreshed.")

    def switch(self, actions: Iterable[Mapping[str, Any]]) -> None:
        """Change aliases, all of them in one step, and on every node."""
        answer = self.ask("POST", "/_aliases", {"actions": list(actions)})
        if not answer["acknowledged"]:
            raise unavailable(f"Not all of {self.name} knows its new aliases yet.")

    def create(self, index: str, body: Mapping[str, Any]) -> None:
        """Create an index; does nothing when it exists."""
        try:
            self.ask("PUT", f"/{next(join_names([index]))}", body)
        except Refusal as error:
            if error.kind == "resource_already_exists_exception":
                return
            if error.kind == "validation_exception" and "shards open" in error.reason:
                raise self._full(1) from None
            raise

    def require_shards(self, needed: int) -> None:
        """Raise SinkRejected when the cluster has no room for so many more shards: it would refuse
        half-way.
        """
        health = self.ask("GET", "/_cluster/health")
        settings = self.ask(
            "GET", "/_cluster/settings", query={"include_defaults": "true", "flat_settings": "true"}
        )
        configured = (
            settings[level].get(SHARDS) for level in ("transient", "persistent", "defaults")
        )
        limit = int(
            next((limit_text for limit_text in configured if limit_text is not None), 1000)
        ) * int(health["number_of_data_nodes"])
        used = sum(
            int(health[f"{state}_shards"]) for state in ("active", "initializing", "unassigned")
        )
        if needed > 0 and used + needed > limit:
            raise self._full(needed)

    def _full(self, needed: int) -> SinkRejected:
        return SinkRejected(
            f"{self.name.capitalize()} holds as many shards as it takes: there is no room for {needed} more.",
            hint=f"raise {SHARDS}, add a node, or remove what isn't needed: cdc -p FILE generations --clean",
            sink=self._sink,
        )
