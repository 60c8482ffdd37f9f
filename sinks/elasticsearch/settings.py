"""What the pipeline file may say of a sink of `type: elasticsearch`."""

from collections.abc import Hashable
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from pydantic import Field

from cdc.config.section import Web, server
from cdc.config.sink_kinds import TRIGGER, SinkSettings

if TYPE_CHECKING:
    from cdc.sink.contract import Sink

PORTS = {"http": 80, "https": 443}


class Elasticsearch(SinkSettings):
    executor = "cdc.sinks.elasticsearch.executor"
    location_setting = "url"
    type: Literal["elasticsearch"]
    """Which kind of sink it is."""
    url: Web = Field(examples=["http://localhost:9200"])
    """The server, with user and password where it asks for them."""
    trigger_s: float = Field(default=0.2, ge=0, description=TRIGGER)

    @property
    def place(self) -> Hashable:
        """The pipeline's own aliases and positions lie there, whoever asks and in whichever way."""
        return "elasticsearch", *server(self.url, PORTS), urlsplit(self.url).path.strip("/")

    def build(self, name: str, pipeline: str) -> "Sink":
        from cdc.sinks.elasticsearch import sink

        return sink.Elasticsearch(name, self.url, pipeline)
