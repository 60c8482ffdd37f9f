"""A server of Redis or Valkey: connections, its URL, names of keys, and what its errors mean."""

import os
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlencode, urlsplit

import redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode
from redis.retry import Retry
from redis.sentinel import (
    MasterNotFoundError,
    SentinelConnectionPool,
    SentinelManagedConnection,
    SentinelManagedSSLConnection,
)

from cdc.errors import SecretUnreadable, SettingsError
from cdc.model import secrets
from cdc.model.address import address
from cdc.model.causes import cause

UNREACHABLE = (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError)
PASSING = {
    "READONLY": "it is a replica now",
    "NOREPLICAS": "it has too few replicas to take writes",
    "MISCONF": "it can't save to its disk",
    "MASTERDOWN": "it is a replica without its primary",
    "LOADING": "it still loads its data",
    "BUSY": "it is busy with a script",
    "CLUSTERDOWN": "its cluster is down",
    "TRYAGAIN": "its cluster is moving keys",
    "TTL": "its nodes don't agree which of them has the keys",
    "OOM": "it is out of memory",
}
"""First words of errors that may pass in a moment, perhaps on another server of that name."""
CLUSTERED = ("MOVED", "ASK", "CROSSSLOT")
"""First words of errors that only a node of a cluster has."""
FORBIDDEN = (redis.exceptions.AuthenticationError, redis.exceptions.AuthorizationError)
COMMANDS = (
    "hgetall hget hmget hset hsetnx hincrby hdel mget mset del unlink pexpireat strlen copy exists"
    " dump pexpiretime rename move sadd srem smembers scan eval evalsha script|load select swapdb"
    " info ping hello"
)
"""All commands that the sink uses. CONFIG isn't needed where INFO is allowed. Each is known to the
oldest server, which refuses a list with one that isn't.
"""
CLUSTER_COMMANDS = f"{COMMANDS} get set command cluster|slots cluster|nodes asking"
"""All commands that the sink uses on a cluster."""
STATE_COMMANDS = (
    "get set incr hkeys hlen smembers sismember sscan zadd zrem zmscore zrange zcard"
    " zrevrange zrangebylex zrevrangebylex zrangebyscore hsetnx lpush ltrim lrange"
)
"""Commands that the state of documents uses in addition to the cache's."""

HINTS = {
    "unavailable": "it is tried again; is the server up? rediss:// needs its TLS port",
    "expired": "renew the server's certificate; it is tried again",
    "lapsed": "renew the sink's `certificate`, also on Spark's executors; it is tried again",
    "name": "check the host in the sink's url; it is tried again",
    "shut": "it is tried again; write rediss:// if the port has TLS, `certificate` and `key` if the server asks for it",
    "rejected": "repair the server's setting or memory, then start `cdc run` again",
    "misplaced": "name another database in the sink's url (or as its `spare`), or raise the server's `databases`",
    "trust": "set the sink's `ca` to the file with its CA's certificate; Spark's executors need it under the same path",
    "certificate": "write the host name of its certificate in the sink's url, or renew the certificate",
    "client": "set the sink's `certificate` and `key` to a pair that the server trusts, also on Spark's executors",
    "plain": "write redis:// in the sink's url, or the port at which it has TLS",
    "clustered": "write `cluster: true` in the sink; documents' state needs a server without cluster mode",
    "unclustered": "take `cluster: true` out of the sink, or name a node of a cluster",
    "stranger": "check host and port of the sink's url",
    "fenced": "run one `cdc run` per sink; start this one again when the other has ended",
    "rewound": "no action needed: its changes are applied again from where it stands",
    "unreadable": "check the file and who may read it; it is read again at the next connection",
    "sentinel": "check the sink's `sentinel_password`: it is `requirepass` of the Sentinels",
    "service": "write the name that `SENTINEL MASTERS` shows as the sink's `service`",
}
"""What a person can do about a failure, by its kind."""

NO_EVICTION = "CONFIG SET maxmemory-policy noeviction"
"""The command after which a server drops no rows by itself."""

SHELL_OPTIONS = {
    "ssl_ca_certs": "--cacert",
    "ssl_certfile": "--cert",
    "ssl_keyfile": "--key",
    "username": "--user",
}
"""Options of redis-cli, by the URL option with the same meaning."""

FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
"""Options of the URL that name files."""
SENTINEL_PORT = 26379
PORT = 6379
_clients: dict[tuple[str, bool], redis.Redis] = {}
"""This process' connections, by URL and by whether answers are text. A cluster's client is no subclass."""


class Switched(redis.exceptions.ConnectionError):
    """Another server has gone on with a scan. Its cursor means nothing there, so keys are skipped."""


class Cluster(redis.RedisCluster):
    """Connections to all nodes of a cluster. Raises RedisError only."""

    def execute_command(self, *args: Any, **kwargs: Any) -> Any:
        with cluster_errors():
            return super().execute_command(*args, **kwargs)  # type: ignore[no-untyped-call]


@contextmanager
def cluster_errors() -> Iterator[None]:
    """Raise the node's error that is behind one of the client's own, which are no RedisErrors."""
    try:
        yield
    except redis.exceptions.RedisClusterException as error:
        origin: BaseException | None = error
        while origin and not isinstance(origin, redis.exceptions.RedisError):
            origin = origin.__cause__ or origin.__context__
        raise origin or PartlyDown("CLUSTERDOWN") from error


class PartlyDown(redis.exceptions.ResponseError):
    """No node of a cluster serves some slots."""


@dataclass(frozen=True)
class _Login(redis.CredentialProvider):
    """A login, of which files are read at each new connection."""

    user: str
    password: str

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        try:
            password = secrets.read(self.password)
            return (secrets.read(self.user), password) if self.user else (password,)
        except SecretUnreadable as error:
            # The client discards a connection without login for its own errors only.
            raise _unread(error) from error


def _unread(error: SecretUnreadable) -> redis.exceptions.RedisError:
    return redis.exceptions.DataError(error.message)


def client(url: str, *, is_text: bool = True) -> redis.Redis:
    """Return this process' connections to a server, for answers as text or as bytes; executors keep
    them across batches.

    url: the server's, as the settings build it. With `service` in its query, its hosts are
    Sentinels, which each new connection asks for the primary.

    Any thread may use them. Raises RedisError: a file with the key's password can't be read.
    """
    if (url, is_text) not in _clients:
        # With a pool of its own making a client closes all connections when it is collected, also
        # those in use.
        if is_cluster(url):
            _clients[url, is_text] = _cluster(url, is_text)  # type: ignore[assignment]
        else:
            _clients[url, is_text] = redis.Redis(connection_pool=_pool(url, is_text))
    return _clients[url, is_text]


def is_cluster(url: str) -> bool:
    """Whether a URL, as the settings build it, names nodes of a cluster."""
    return "cluster" in parse_qs(urlsplit(url).query)


def _cluster(url: str, is_text: bool) -> Cluster:
    hosts, url_options = _options(url)
    for name in ("cluster", "db", "connection_class"):
        url_options.pop(name, None)
    options = _connection_options(url_options, is_text) | {"ssl": url.startswith("rediss:")}
    with cluster_errors():
        nodes = [ClusterNode(*host) for host in hosts]  # type: ignore[no-untyped-call]
        return Cluster(startup_nodes=nodes, **options)


def _pool(url: str, is_text: bool) -> redis.ConnectionPool:
    sentinels, url_options = _options(url)
    service = url_options.pop("service", None)
    sentinel_login = _login({"password": url_options.pop("sentinel_password", "")})
    options = _connection_options(url_options, is_text)
    if not service:
        return redis.ConnectionPool(**options)
    has_tls = urlsplit(url).scheme == "rediss"
    tls = {name: value for name, value in url_options.items() if name.startswith("ssl_")}
    options["connection_class"] = (
        SentinelManagedSSLConnection if has_tls else SentinelManagedConnection
    )
    # Of several Sentinels the next one is asked, so none is asked twice.
    patience = {"socket_timeout": 5, "socket_connect_timeout": 5, "retry": Retry(NoBackoff(), 0)}
    manager = redis.Sentinel(  # type: ignore[no-untyped-call]
        sentinels, sentinel_kwargs={**patience, "ssl": has_tls, **tls, **sentinel_login}
    )
    return SentinelConnectionPool(service, manager, **options)  # type: ignore[no-untyped-call]


def _connection_options(url_options: dict[str, Any], is_text: bool) -> dict[str, Any]:
    if key_password := url_options.get("ssl_password"):
        try:
            url_options["ssl_password"] = secrets.read(key_password)
        except SecretUnreadable as error:
            raise _unread(error) from error
    options: dict[str, Any] = {"socket_timeout": 30, "socket_connect_timeout": 5}
    # The client's name and version are sent by a command that a server before Redis 7.2 lacks.
    options |= {"decode_responses": is_text, "driver_info": None}
    options |= {**url_options, **_login(url_options)}
    options.pop("username", None)
    options.pop("password", None)
    return options


def _options(url: str) -> tuple[list[tuple[str, int]], dict[str, Any]]:
    """Read the Sentinels or the cluster's nodes that a URL names, if any, and the options of a connection."""
    parts = urlsplit(url)
    login, separator, hosts = parts.netloc.rpartition("@")
    first = hosts.split(",")[0]
    options: dict[str, Any] = redis.connection.parse_url(  # type: ignore[no-untyped-call]
        parts._replace(netloc=login + separator + first).geturl() if "," in hosts else url
    )
    if not {"service", "cluster"} & options.keys():
        return [], options
    for name in ("host", "port"):
        options.pop(name, None)
    port = SENTINEL_PORT if "service" in options else PORT
    places = [urlsplit(f"//{host}") for host in hosts.split(",")]
    return [(place.hostname or "", place.port or port) for place in places], options


def _login(options: dict[str, Any]) -> dict[str, _Login]:
    user = options.get("username", "")
    password = options.get("password", "")
    return {"credential_provider": _Login(user, password)} if user or password else {}


def forget(url: str) -> None:
    """Close this process' connections; one in use is closed once its thread lets go of it."""
    for is_text in (True, False):
        if server := _clients.pop((url, is_text), None):
            if is_cluster(url):
                server.close()
            else:
                server.connection_pool.disconnect(inuse_connections=False)


def _close_idle(url: str) -> None:
    """Close idle connections. The key's password is read with a new client only, so there is one. A
    cluster's client closes them by itself.
    """
    if "ssl_password" in _options(url)[1]:
        forget(url)
    if is_cluster(url):
        return
    for is_text in (True, False):
        if server := _clients.get((url, is_text)):
            server.connection_pool.disconnect(inuse_connections=False)


def database(url: str) -> int:
    """Return the number of the database that a URL names: its path, or `db` of its query.

    Raises:
        SettingsError: it names none, or no server.
    """
    try:
        parts = urlsplit(url)
        path = "" if parts.scheme == "unix" else parts.path.strip("/")
        query = parse_qs(parts.query)
        text = query.get("db", [path or "0"])[0]
        is_valid = parts.scheme in ("redis", "rediss", "unix")
        is_valid &= bool({"service", "cluster"} & query.keys()) or (parts.port or 1) > 0
    except ValueError:
        text = ""
        is_valid = False
    if is_valid and text.isdecimal():
        return int(text)
    raise SettingsError(
        "The cache's url names no server and database.",
        hint="url: redis://host:6379/0, rediss://host:6380/0 or unix:///path/of/the.sock?db=0",
    )


def at_database(url: str, number: int) -> str:
    """Build the URL of another database on the same server."""
    parts = urlsplit(url)
    query = {name: value for name, value in parse_qs(parts.query).items() if name != "db"}
    if parts.scheme == "unix":
        return f"unix://{parts.netloc}{parts.path}?{urlencode({**query, 'db': [str(number)]}, doseq=True)}"
    return parts._replace(path=f"/{number}", query=urlencode(query, doseq=True)).geturl()


def shell_command(url: str) -> str:
    """Build the shell's command for the server of a URL, behind Sentinels for the primary that was
    found last. It asks for the password, shows none.
    """
    places, options = _options(url)
    host = options.get("host", "localhost")
    port = options.get("port", PORT)
    if is_cluster(url):
        host, port = places[0]
    elif places:
        pool = client(url).connection_pool
        host, port = getattr(pool, "master_address", None) or ("PRIMARY", port)
    place = ["-s", options["path"]] if "path" in options else ["-h", host, "-p", str(port)]
    words = ["redis-cli", *(["-c"] if is_cluster(url) else []), *place]
    if urlsplit(url).scheme == "rediss":
        words.append("--tls")
    for name, option in SHELL_OPTIONS.items():
        words += [option, options[name]] if name in options else []
    return shlex.join([*words, *(["--askpass"] if "password" in options else [])])


def view_key(prefix: str, qualified: str) -> str:
    """Return the prefix of the keys of a table's rows; the id follows it."""
    return f"{prefix}:{_escaped(qualified)}:"


def position_key(prefix: str, qualified: str) -> str:
    """Return the key of the hash that holds a table's checkpoint."""
    return f"{prefix}:_cdc:{_escaped(qualified)}"


def _escaped(qualified: str) -> str:
    """Escape colons, since a colon begins the id: `a` with the id b:1 isn't `a:b` with the id 1."""
    return qualified.replace("%", "%25").replace(":", "%3A")


def glob_literal(text: str) -> str:
    """Escape a text for MATCH, so that it stands for itself."""
    return "".join(f"\\{char}" if char in "*?[]\\" else char for char in text)


class Failure(NamedTuple):
    """What an error means: `kind` is a key of `cdc.sink.remedy.REPORTED`."""

    kind: str
    message: str


def failure(error: redis.exceptions.RedisError, url: str, what: str) -> Failure:
    """Classify an error of the server.

    For an error that may pass, idle connections are closed: a new one may reach a better server.
    Messages quote the first word of an answer and names of commands only; the rest may quote what
    was sent.
    """
    where = f"The server at {address(url)}"
    if is_cluster(url):
        where = f"The cluster at {address(url)}"
    if service := parse_qs(urlsplit(url).query).get("service"):
        where = f"The primary of {service[0]}, which the Sentinels at {address(url)} name,"
    if isinstance(error.__cause__, SecretUnreadable):
        return Failure(
            "unreadable", f"The login of {what} can't be read: {error.__cause__.message}"
        )
    if isinstance(error, MasterNotFoundError):
        return _no_primary(url)
    if isinstance(error, FORBIDDEN):
        return Failure("forbidden", f"{where} refuses the user or password of {what}.")
    if isinstance(error, Switched):
        return Failure("unavailable", f"{where} became another server during a scan.")
    word = first_word(error)
    if word in PASSING or isinstance(error, UNREACHABLE):
        _close_idle(url)
        if word in PASSING:
            return Failure("unavailable", f"{where} can't be used now: {PASSING[word]}.")
        if unreadable := _unreadable_file(url):
            return unreadable
        why = cause(f"{error} {error.__cause__}")
        return Failure(why.kind or "unavailable", f"{where} can't be reached{why}.")
    if isinstance(error, redis.exceptions.InvalidResponse):
        return Failure("stranger", f"{where} is no Redis: it answers in another way.")
    if "unknown command 'SENTINEL'" in str(error):
        return Failure("stranger", f"A server at {address(url)} is no Sentinel.")
    # When a script has called the command: the wording since 7.2, and before, without its name.
    is_script = any(words in str(error) for words in ("ACL failure", "user executing the script"))
    if isinstance(error, redis.exceptions.NoPermissionError) or is_script:
        command = re.search(r"'([a-z|]+)' command", str(error))
        missing_right = "these keys" if "access" in str(error) else "a command"
        missing_right = command[1].upper() if command else missing_right
        return Failure(
            "forbidden", f"{where} doesn't let its user use {missing_right}, for {what}."
        )
    if "cluster support disabled" in str(error):
        return Failure("unclustered", f"{where} is no node of a cluster.")
    if word in CLUSTERED or "SELECT is not allowed in cluster mode" in str(error):
        return Failure(
            "clustered",
            f"{where} is a node of a cluster, where keys of {what} are spread over nodes.",
        )
    if "DB index is out of range" in str(error) or "invalid DB index" in str(error):
        return Failure("misplaced", f"{where} has no database {database(url)}.")
    return Failure("rejected", f"{where} refuses {what}: {word}.")


def _no_primary(url: str) -> Failure:
    """Ask each Sentinel why there is no primary."""
    pool = client(url).connection_pool
    assert isinstance(pool, SentinelConnectionPool)
    where = f"The Sentinels at {address(url)}"
    _close_idle(url)
    service = pool.service_name
    names: list[str] = []
    errors: list[redis.exceptions.RedisError] = []
    for sentinel in pool.sentinel_manager.sentinels:
        try:
            names += sentinel.sentinel_masters()
        except redis.exceptions.RedisError as error:
            errors.append(error)
    if service in names:
        return Failure("unavailable", f"{where} know of no primary of {service} that is up.")
    if names or not errors:
        known = f", but {', '.join(sorted(set(names)))}" if names else ""
        return Failure("service", f"{where} know no service {service}{known}.")
    if any(isinstance(error, (*FORBIDDEN, redis.exceptions.NoPermissionError)) for error in errors):
        return Failure("sentinel", f"{where} refuse the password in sentinel_password.")
    if unreadable := _unreadable_file(url):
        return unreadable
    why = cause(" ".join(map(str, errors)))
    return Failure(why.kind or "unavailable", f"{where} can't be reached{why}.")


def _unreadable_file(url: str) -> Failure | None:
    """Find a file of TLS that can't be read here."""
    _, options = _options(url)
    for option in FILES:
        path = options.get(option)
        if path and not os.access(path, os.R_OK):
            return Failure(
                "unreadable", f"{path} can't be read, so {address(url)} can't be reached."
            )
    return None


def first_word(error: redis.exceptions.RedisError) -> str:
    """Return an error's kind. Older servers wrap it in a script's: `ERR ... -OOM command ...`."""
    status = error.status_code or str(error).split(" ", 1)[0]
    hidden = re.search(r"-([A-Z]{3,})\b", str(error)) if status == "ERR" else None
    return hidden[1] if hidden else status
