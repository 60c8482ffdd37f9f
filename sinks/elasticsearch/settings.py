"""What the pipeline file may say of a sink of `type: elasticsearch`."""

from collections.abc import Hashable
from dataclasses import replace
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, model_validator

from cdc.config.mistakes import InvalidSetting
from cdc.config.section import Web, server
from cdc.config.server_settings import TlsSettings, secret
from cdc.config.sink_kinds import TRIGGER, SinkSettings
from cdc.model.login import Address

if TYPE_CHECKING:
    from cdc.sink.contract import Sink

PORTS = {"http": 80, "https": 443}


class Elasticsearch(TlsSettings, SinkSettings):
    executor = "cdc.sinks.elasticsearch.executor"
    location_setting = "url"
    type: Literal["elasticsearch"]
    """Which kind of sink it is."""
    url: Web | None = Field(default=None, examples=["http://localhost:9200"])
    """The server, with user and password where it asks for them."""
    nodes: tuple[Web, ...] = Field(
        default=(), examples=[["https://es-1:9200", "https://es-2:9200"]]
    )
    """Nodes of one cluster, instead of `url`: a request goes to the next one where one is away."""
    user: str | None = None
    """The user, where it isn't in the `url`."""
    password: SecretStr | None = Field(default=None, examples=["${file:/run/secrets/index}"])
    """The password of the user."""
    api_key: SecretStr | None = Field(default=None, examples=["${file:/run/secrets/api-key}"])
    """An API key instead of a user: `encoded` of the answer with which Elasticsearch creates one."""
    trigger_s: float = Field(default=0.2, ge=0, description=TRIGGER)

    @model_validator(mode="after")
    def _check_address(self) -> "Elasticsearch":
        if (self.url is None) == (not self.nodes):
            raise InvalidSetting(
                "needs a url or nodes, and takes one of them",
                "url: http://localhost:9200, or nodes: [https://es-1:9200, https://es-2:9200]",
            )
        if len({_place(node) for node in self.nodes}) < len(self.nodes):
            raise InvalidSetting("names a node twice", "take one of them out", ("nodes",))
        if any("@" in urlsplit(node).netloc for node in self.nodes):
            raise InvalidSetting(
                "has a login in a node", "write it as the sink's user and password", ("nodes",)
            )
        schemes = {urlsplit(node).scheme for node in self._urls}
        if len(schemes) > 1:
            raise InvalidSetting("mixes http:// and https://", "write https://", ("nodes",))
        if (self.ca or self.certificate) and schemes == {"http"}:
            raise InvalidSetting(
                "ca and certificate have no effect with http://",
                "write https:// in the url or nodes, or take them out",
            )
        return self

    @model_validator(mode="after")
    def _check_login(self) -> "Elasticsearch":
        if (self.user is None) != (self.password is None):
            raise InvalidSetting("user and password go together", "name both, or neither")
        has_login = "@" in urlsplit(self.url or "").netloc
        if sum((has_login, self.user is not None, self.api_key is not None)) > 1:
            raise InvalidSetting(
                "has two logins", "take one out: the one in url, user and password, or api_key"
            )
        return self

    @property
    def _urls(self) -> tuple[str, ...]:
        return (self.url,) if self.url else self.nodes

    @property
    def place(self) -> Hashable:
        """The pipeline's own aliases and positions lie there, whoever asks and in whichever way.

        The first node in the order of the alphabet, so that the order of the list doesn't count.
        Lists that share only other nodes aren't found out here: the positions' fence stops one of the
        sinks.
        """
        return "elasticsearch", *min(_place(url) for url in self._urls)

    @property
    def address(self) -> Address:
        """The nodes, with commas between them, and how clients log in."""
        login = replace(
            self.tls_login,
            user=self.user,
            password=secret(self.password),
            api_key=secret(self.api_key),
        )
        return Address(",".join(url.rstrip("/") for url in self._urls), login)

    def build(self, name: str, pipeline: str) -> "Sink":
        from cdc.sinks.elasticsearch import sink

        return sink.Elasticsearch(name, self.address, pipeline)


def _place(url: str) -> tuple[str, int, str]:
    return *server(url, PORTS), urlsplit(url).path.strip("/")
