"""What the pipeline file may say of a sink of `type: redis`."""

from collections.abc import Hashable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal, Self
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from pydantic import AfterValidator, Field, SecretStr, model_validator

from cdc.config.durations import microseconds
from cdc.config.mistakes import InvalidSetting
from cdc.config.section import readable, server
from cdc.config.server_settings import TlsSettings, secret
from cdc.config.sink_kinds import TRIGGER, ListedTable, SinkSettings
from cdc.config.source_settings import by_name
from cdc.config.view_settings import Duration
from cdc.model.table import Projection

if TYPE_CHECKING:
    from cdc.documents.state import StateSink
    from cdc.sink.contract import Sink

PORTS = {"redis": 6379, "rediss": 6379}
SENTINEL_PORTS = {"redis": 26379}
TLS = {
    "ca": "ssl_ca_certs",
    "certificate": "ssl_certfile",
    "key": "ssl_keyfile",
    "key_password": "ssl_password",
}
"""Options of a URL, by the setting with the same meaning."""
SENTINELS = 'for example: url: "redis:///0", sentinels: [s-1:26379, s-2:26379], service: mymaster'
COMPANIONS = (
    ("sentinels", "service"),
    ("service", "sentinels"),
    ("sentinel_password", "sentinels"),
)
"""A setting, and the other one that it needs."""


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
    if _is_hostless(url):
        return url
    login, at, hosts = urlsplit(url).netloc.rpartition("@")
    for host in hosts.split(","):
        readable(urlsplit(url)._replace(netloc=login + at + host).geturl())
    return url


def _is_hostless(url: str) -> bool:
    """Whether a URL leaves the server to `sentinels`."""
    with suppress(ValueError):
        return not url.startswith("unix:") and not urlsplit(url).netloc.rpartition("@")[2]
    return False


def _sentinel(text: str) -> str:
    try:
        is_valid = not set("/?#@,") & set(readable(f"redis://{text}").removeprefix("redis://"))
    except InvalidSetting:
        is_valid = False
    if not is_valid:
        raise InvalidSetting("is no host:port", "for example: sentinels: [s-1:26379, s-2:26379]")
    return text


def _lifetime(text: str) -> str:
    if not microseconds(text):
        raise InvalidSetting("rows that expire at once are in no view", "for example: 1 day")
    return text


class CachedTable(ListedTable):
    """An entry of a cache's `tables`."""

    ttl: Annotated[Duration, AfterValidator(_lifetime)] | None = Field(
        default=None, examples=["1 day"]
    )
    """How long the cache has a row after its last change was committed; for ever without it."""
    form: Literal["json", "hash"] = "json"
    """How a row is kept: as a JSON object, or as a hash with a field for each column that isn't null."""

    @property
    def projection(self) -> Projection | None:
        projection = super().projection
        if self.form == "json":
            return projection
        return replace(projection or Projection(), form=self.form)


class Redis(TlsSettings, SinkSettings):
    executor = "cdc.sinks.redis.executor"
    location_setting = "prefix"
    holds_state = True
    territory_setting = "database in its url, or another spare"
    type: Literal["redis"]
    """Which kind of sink it is."""
    url: Annotated[str, AfterValidator(_cache)] = Field(examples=["redis://localhost:6379/0"])
    """The server and the number of the database, which must hold nothing else unless `shared`. With `sentinels` it
    has no host: redis:///0, or rediss:///0 for TLS.
    """
    user: str | None = Field(default=None, min_length=1)
    """The user (ACL); or the url has it."""
    password: SecretStr | None = None
    """The password; or the url has it."""
    sentinels: tuple[Annotated[str, AfterValidator(_sentinel)], ...] = Field(
        default=(), examples=[["s-1:26379", "s-2:26379", "s-3:26379"]]
    )
    """The Sentinels, by which the primary is found at each new connection. They have TLS if the url
    has.
    """
    service: str | None = Field(default=None, min_length=1, examples=["mymaster"])
    """The name under which the Sentinels know the primary."""
    sentinel_password: SecretStr | None = None
    """The password of the Sentinels themselves, if they ask for one."""
    tables: tuple[Annotated[CachedTable, by_name], ...] | None = Field(
        default=None, examples=["[public.orders]"]
    )
    """The captured tables that the cache has views of, as for any sink; an entry may also have `ttl` and
    `form`.
    """
    prefix: str = Field(
        pattern=r"^[^\s:]+$", description="a word without spaces and colons", examples=["shop"]
    )
    spare: int | None = Field(default=None, ge=0)
    """The number of the database where `cdc rebuild` makes the next generation: the one after the
    url's when None.
    """
    cluster: bool = False
    """Whether the url names nodes of a cluster: redis://host:port,host:port. A few are enough: they name the others.
    """
    shared: bool = False
    """Whether others use these databases, too, with other prefixes: a rebuild or a rollback then
    exchanges generations row by row.
    """
    trigger_s: float = Field(default=0.2, ge=0, description=TRIGGER)

    @model_validator(mode="after")
    def _check_cluster(self) -> Self:
        if not self.cluster:
            if "," in urlsplit(self.url).netloc.rpartition("@")[2]:
                raise InvalidSetting(
                    "names several hosts",
                    "write `cluster: true` if they are nodes of one",
                    ("url",),
                )
            return self
        for setting in ("sentinels", "spare", "shared"):
            if setting in self.model_fields_set and getattr(self, setting) not in ((), None, False):
                raise InvalidSetting(
                    "isn't for a cluster, where generations lie side by side",
                    "take it out, or `cluster: true`",
                    (setting,),
                )
        if self.url.startswith("unix:") or self._number != "0":
            raise InvalidSetting(
                "a cluster has one database, and no socket", 'url: "redis://host:6379"', ("url",)
            )
        if set("{}") & set(self.prefix):
            raise InvalidSetting(
                "has a brace, which decides in a cluster where a key is",
                "for example: prefix: shop",
                ("prefix",),
            )
        return self

    @model_validator(mode="after")
    def _check_server(self) -> Self:
        given = {name for name in type(self).model_fields if getattr(self, name)}
        for setting, other in COMPANIONS:
            if setting in given and other not in given:
                raise InvalidSetting(f"needs {other}, too", SENTINELS, (setting,))
        if twice := sorted(given.intersection(self._in_url())):
            raise InvalidSetting("is in the url, too", "take it out of the url", (twice[0],))
        if _is_hostless(self.url) != bool(self.sentinels):
            problem = (
                "has a host, but the sentinels find the server"
                if self.sentinels
                else "names no host"
            )
            hint = SENTINELS if self.sentinels else "for example: redis://localhost:6379/0"
            raise InvalidSetting(problem, hint, ("url",))
        if (for_tls := given.intersection(TLS)) and not self.url.startswith("rediss:"):
            hint = "write rediss:// in the url, and the port at which the server has TLS"
            raise InvalidSetting(
                "needs TLS, and the url doesn't begin with rediss:", hint, (min(for_tls),)
            )
        return self

    def _in_url(self) -> Iterator[str]:
        """Name the settings whose value the url has."""
        parts = urlsplit(self.url)
        options = dict(parse_qsl(parts.query))
        if parts.username or "username" in options:
            yield "user"
        if parts.password or "password" in options:
            yield "password"
        yield from (setting for setting, option in TLS.items() if option in options)

    @property
    def connection_url(self) -> str:
        """The URL for `cdc.redis.server.client`: the one of the file, and in it what other settings
        say. References to files are in it unread.
        """
        parts = urlsplit(self.url)
        login, at, host = parts.netloc.rpartition("@")
        if self.user or self.password:
            user, _, password = login.partition(":")
            user = quote(self.user, safe="") if self.user else user
            password = quote(secret(self.password) or "", safe="") or password
            login = f"{user}:{password}"
            at = "@"
        options = {
            **{option: getattr(self, setting) for setting, option in TLS.items()},
            "ssl_password": secret(self.key_password),
            "service": self.service,
            "cluster": "true" if self.cluster else None,
            "sentinel_password": secret(self.sentinel_password),
        }
        added = {name: value for name, value in options.items() if value}
        query = urlencode(dict(parse_qsl(parts.query)) | added)
        hosts = ",".join(self.sentinels) or host
        return f"{parts.scheme}://{login}{at}{hosts}{parts.path}?{query}".rstrip("?")

    @property
    def place(self) -> Hashable:
        return frozenset(self._servers), self._number, self.prefix

    @property
    def territory(self) -> frozenset[Hashable]:
        """Two databases as a whole: a rebuild exchanges them. Of a cluster the keys with the prefix."""
        spare = str(self.spare) if self.spare is not None else ""
        if not spare and self._number.isdecimal():
            spare = str(int(self._number) + 1)
        if self.cluster:
            return frozenset((*place, self.prefix) for place in self._servers)
        numbers = (self._number, spare)
        return frozenset((*place, number) for place in self._servers for number in numbers)

    @property
    def _servers(self) -> list[tuple[Hashable, ...]]:
        """The server, what each Sentinel knows it by, or nodes of the cluster."""
        if self.sentinels:
            hosts = (server(f"redis://{sentinel}", SENTINEL_PORTS) for sentinel in self.sentinels)
            return [("redis", *host, self.service) for host in hosts]
        parts = urlsplit(self.url)
        path = parts.path if parts.scheme == "unix" else ""
        nodes = parts.netloc.rpartition("@")[2].split(",")
        urls = [parts._replace(netloc=node).geturl() for node in nodes]
        return [("redis", *server(url, PORTS), path) for url in urls]

    @property
    def _number(self) -> str:
        parts = urlsplit(self.url)
        path = "" if parts.scheme == "unix" else parts.path.strip("/")
        return dict(parse_qsl(parts.query)).get("db", path) or "0"

    def build(self, name: str, pipeline: str) -> "Sink":  # noqa: ARG002
        from cdc.sinks.redis import cluster_sink, sink

        lifetimes_ms = {
            entry.table: microseconds(entry.ttl) // 1000 for entry in self.tables or () if entry.ttl
        }
        hashes = frozenset(e.table for e in self.tables or () if e.form == "hash")
        if self.cluster:
            return cluster_sink.ClusterRedis(
                name,
                self.connection_url,
                self.prefix,
                lifetimes_ms=lifetimes_ms,
                hashes=hashes,
            )
        return sink.Redis(
            name,
            self.connection_url,
            self.prefix,
            self.spare,
            shared=self.shared,
            lifetimes_ms=lifetimes_ms,
            hashes=hashes,
        )

    def refuse_as_state(self) -> None:
        if self.cluster:
            raise InvalidSetting(
                "the state can't be on a cluster: what a change makes dirty is changed with it in one step",
                "name a server without cluster mode; Sentinels or replicas keep one available",
                ("cluster",),
            )

    def build_state(self) -> "StateSink":
        from cdc.sinks.redis.documents.sink import DocumentState

        return DocumentState(self.connection_url, self.prefix)
