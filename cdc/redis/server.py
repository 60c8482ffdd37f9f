"""A server of Redis or Valkey: connections, its URL, names of keys, and what its errors mean."""

import re
import shlex
from typing import NamedTuple
from urllib.parse import parse_qs, urlencode, urlsplit

import redis

from cdc.errors import SettingsError
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
    "OOM": "it is out of memory",
}
"""First words of errors that may pass in a moment, perhaps on another server of that name."""
FORBIDDEN = (redis.exceptions.AuthenticationError, redis.exceptions.AuthorizationError)
COMMANDS = (
    "hgetall hget hmget hset hsetnx hincrby mget mset del unlink strlen copy sadd srem smembers scan"
    " eval evalsha script|load select swapdb info ping hello client|setinfo"
)
"""All commands that the sink uses. CONFIG isn't needed where INFO is allowed."""

HINTS = {
    "unavailable": "it is tried again; is the server up?",
    "rejected": "repair the server's setting or memory, then start `cdc run` again",
    "misplaced": "name another database in the sink's url (or as its `spare`), or raise the server's `databases`",
    "trust": "append ?ssl_ca_certs=/path/of/its/ca.pem to the sink's url",
    "certificate": "write the host name of its certificate in the sink's url, or renew the certificate",
    "client": "append ?ssl_certfile=...&ssl_keyfile=... to the sink's url",
    "plain": "write redis:// in the sink's url, or the port at which it has TLS",
    "stranger": "check host and port of the sink's url",
    "fenced": "run one `cdc run` per sink; start this one again when the other has ended",
    "rewound": "no action needed: its changes are applied again from where it stands",
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

_clients: dict[tuple[str, bool], redis.Redis] = {}
"""This process' connections, by URL and by whether answers are text."""


def client(url: str, *, is_text: bool = True) -> redis.Redis:
    """Return this process' connections to a server, for answers as text or as bytes; executors keep
    them across batches.

    Any thread may use them.
    """
    if (url, is_text) not in _clients:
        # With a pool of its own making a client closes all connections when it is collected, also
        # those in use.
        pool = redis.ConnectionPool.from_url(
            url, decode_responses=is_text, socket_timeout=30, socket_connect_timeout=5
        )
        _clients[url, is_text] = redis.Redis(connection_pool=pool)
    return _clients[url, is_text]


def forget(url: str) -> None:
    """Close this process' connections; one in use is closed once its thread lets go of it."""
    for is_text in (True, False):
        if server := _clients.pop((url, is_text), None):
            server.connection_pool.disconnect(inuse_connections=False)


def _close_idle(url: str) -> None:
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
        text = parse_qs(parts.query).get("db", [path or "0"])[0]
        is_valid = parts.scheme in ("redis", "rediss", "unix") and (parts.port or 1) > 0
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
    """Build the shell's command for the server of a URL. It asks for the password, shows none."""
    options = redis.connection.parse_url(url)  # type: ignore[no-untyped-call]
    if "path" in options:
        words = ["redis-cli", "-s", options["path"]]
    else:
        port = str(options.get("port", 6379))
        words = ["redis-cli", "-h", options.get("host", "localhost"), "-p", port]
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
    if isinstance(error, FORBIDDEN):
        return Failure("forbidden", f"{where} refuses the user or password of {what}.")
    word = first_word(error)
    if word in PASSING or isinstance(error, UNREACHABLE):
        _close_idle(url)
        if word in PASSING:
            return Failure("unavailable", f"{where} can't be used now: {PASSING[word]}.")
        why = cause(f"{error} {error.__cause__}")
        kind = "unavailable" if why.is_transient else why.kind
        return Failure(kind, f"{where} can't be reached{why}.")
    if isinstance(error, redis.exceptions.InvalidResponse):
        return Failure("stranger", f"{where} is no Redis: it answers in another way.")
    # Valkey's wording when a script has called the command.
    if isinstance(error, redis.exceptions.NoPermissionError) or "ACL failure" in str(error):
        command = re.search(r"'([a-z|]+)' command", str(error))
        missing_right = f"{command[1].upper()}" if command else "these keys"
        return Failure(
            "forbidden", f"{where} doesn't let its user use {missing_right}, for {what}."
        )
    if "DB index is out of range" in str(error) or "invalid DB index" in str(error):
        return Failure("misplaced", f"{where} has no database {database(url)}.")
    return Failure("rejected", f"{where} refuses {what}: {word}.")


def first_word(error: redis.exceptions.RedisError) -> str:
    """Return an error's kind. Older servers wrap it in a script's: `ERR ... -OOM command ...`."""
    status = error.status_code or str(error).split(" ", 1)[0]
    hidden = re.search(r"-([A-Z]{3,})\b", str(error)) if status == "ERR" else None
    return hidden[1] if hidden else status
