"""What the pipeline file may say of a sink of `type: redis`."""

from collections.abc import Hashable
from typing import TYPE_CHECKING, Annotated, Literal
from urllib.parse import parse_qs, urlsplit

from pydantic import AfterValidator, Field

from cdc.config.mistakes import InvalidSetting
from cdc.config.section import readable, server
from cdc.config.sink_kinds import TRIGGER, SinkSettings

if TYPE_CHECKING:
    from cdc.documents.state import StateSink
    from cdc.sink.contract import Sink

PORTS = {"redis": 6379, "rediss": 6379}


def _cache(url: str) -> str:
    scheme, separator, _ = url.partition("://")
    if not separator:
        raise InvalidSetting(
            "needs redis://, rediss:// or unix:// before its host",
            "for example: redis://localhost:6379/0",
        )
    if scheme not in ("redis", "rediss", "unix"):
        raise InvalidSetting(
            "is no cache's: it begins with another scheme",
            "write redis://, rediss:// (TLS) or unix://",
        )
    return readable(url)


class Redis(SinkSettings):
    executor = "cdc.sinks.redis.executor"
    location_setting = "prefix"
    holds_state = True
    territory_setting = "database in its url, or another spare"
    type: Literal["redis"]
    """Which kind of sink it is."""
    url: Annotated[str, AfterValidator(_cache)] = Field(examples=["redis://localhost:6379/0"])
    """The server and the number of the database, which must hold nothing else."""
    prefix: str = Field(
        pattern=r"^[^\s:]+$", description="a word without spaces and colons", examples=["shop"]
    )
    spare: int | None = Field(default=None, ge=0)
    """The number of the database where `cdc rebuild` makes the next generation: the one after the
    url's when None.
    """
    trigger_s: float = Field(default=0.2, ge=0, description=TRIGGER)

    @property
    def place(self) -> Hashable:
        return *self._server, self._number, self.prefix

    @property
    def territory(self) -> frozenset[Hashable]:
        """Two databases as a whole: a rebuild exchanges them."""
        spare = str(self.spare) if self.spare is not None else ""
        if not spare and self._number.isdecimal():
            spare = str(int(self._number) + 1)
        return frozenset((*self._server, number) for number in (self._number, spare))

    @property
    def _server(self) -> tuple[Hashable, ...]:
        parts = urlsplit(self.url)
        return "redis", *server(self.url, PORTS), parts.path if parts.scheme == "unix" else ""

    @property
    def _number(self) -> str:
        parts = urlsplit(self.url)
        path = "" if parts.scheme == "unix" else parts.path.strip("/")
        return parse_qs(parts.query).get("db", [path])[0] or "0"

    def build(self, name: str, pipeline: str) -> "Sink":  # noqa: ARG002
        from cdc.sinks.redis import sink

        return sink.Redis(name, self.url, self.prefix, self.spare)

    def build_state(self) -> "StateSink":
        from cdc.sinks.redis.documents.sink import DocumentState

        return DocumentState(self.url, self.prefix)
