"""Health of the server of the cache, or of the state of documents: facts of INFO, and what they mean
for rows.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import redis
import structlog

from cdc.errors import SinkRejected
from cdc.model.address import address
from cdc.model.finding import Finding, find
from cdc.redis.server import NO_EVICTION, Cluster, client, failure, is_cluster, shell_command
from cdc.sink.promotion import require_free_space
from cdc.sinks.redis.database import Database
from cdc.sinks.redis.scan import PAGE_ROWS

OLDEST = 7
FULL = 0.8
"""The share of `maxmemory` above which the cache may soon refuse writes."""
Info = Mapping[str, Any]
log = structlog.get_logger()


def examine(sink: str, url: str) -> list[Finding]:
    """Read what the server reports about itself, and judge it."""
    try:
        infos = read_info(client(url))
    except redis.exceptions.RedisError as error:
        message = failure(error, url, "INFO").message
        fix = "is the server up? cdc -p FILE status"
        return [find("sink-unreachable", sink, message, fix, sink=sink)]
    findings = [finding for info in infos for finding in check_info(sink, url, info)]
    # Nodes of a cluster may have the same fault.
    return list(dict.fromkeys(findings))


def read_info(server: redis.Redis, *section: str) -> list[Info]:
    """Read INFO of the server, or of each primary of a cluster."""
    if isinstance(server, Cluster):
        return [server.info(*section, target_nodes=node) for node in server.get_primaries()]
    return [server.info(*section)]


def on_primaries(server: redis.Redis, words: Sequence[str | int]) -> None:
    """Send a command to the server, or to each primary of a cluster."""
    nodes: Mapping[str, Any] = (
        {"target_nodes": server.get_primaries()} if isinstance(server, Cluster) else {}
    )
    server.execute_command(*words, **nodes)  # type: ignore[no-untyped-call]


def check_info(sink: str, url: str, info: Info) -> Iterator[Finding]:
    """Judge what the server reports about itself. Pure."""

    def finding(code: str, setting: str, message: str, command: str) -> Finding:
        fix = f"{shell_command(url)} {command}"
        return find(code, setting, f"{sink}: {message}", fix, sink=sink)

    version = str(info.get("redis_version", OLDEST))
    if int(version.split(".", maxsplit=1)[0]) < OLDEST:
        message = f"the server speaks Redis {version}; {OLDEST} is the oldest that is supported."
        yield finding("sink-unfit/redis", "redis_version", message, "INFO server")
    if info.get("redis_mode") == "cluster" and not is_cluster(url):
        message = "the server is a node of a cluster, and the sink has no `cluster: true`."
        yield finding("sink-unfit/cluster", "cluster-enabled", message, "INFO cluster")
    if info.get("role") == "slave":
        message = "the server is a replica, which takes no writes."
        yield finding("sink-unfit/replica", "role", message, "INFO replication")
    policy = str(info.get("maxmemory_policy", "noeviction"))
    if policy != "noeviction":
        message = f"maxmemory-policy is {policy}: rows may vanish without a word."
        yield finding("setting-differs/maxmemory-policy", "maxmemory-policy", message, NO_EVICTION)
    used = int(info.get("used_memory", 0))
    limit = int(info.get("maxmemory", 0))
    if limit and used > FULL * limit:
        message = f"{used / limit:.0%} of maxmemory is used."
        yield finding("memory-low/cache", "maxmemory", message, "INFO memory")
    if "err" in (info.get("aof_last_write_status"), info.get("rdb_last_bgsave_status")):
        message = "the server can't save to its disk, and may refuse writes."
        yield finding("cache-save-failing", "persistence", message, "INFO persistence")


def require_no_eviction(database: Database, table: str, holder: str = "the cache") -> None:
    """Raise SinkRejected when the server may drop rows by itself. holder: of the rows, in words."""
    policy = _policy(database)
    if policy is None:
        log.warning("eviction_unknown", sink=database.sink, needed="noeviction")
    elif policy != "noeviction":
        raise SinkRejected(
            f"maxmemory-policy is {policy} on the server of {holder}: it may drop rows of {table} by itself.",
            hint=f"{shell_command(database.url)} {NO_EVICTION}",
            sink=database.sink,
        )


def require_own(database: Database) -> None:
    """Raise SinkRejected when a database has keys of others: it changes places as a whole."""
    prefix = f"{database.prefix}:"

    def find_foreign(server: redis.Redis) -> str | None:
        keys = map(str, server.scan_iter(count=PAGE_ROWS))
        return next((key for key in keys if not key.startswith(prefix)), None)

    if key := database.ask(find_foreign):
        raise SinkRejected(
            f"Database {database.number} of the cache holds keys of others ({key.split(':', 1)[0]}:…), which"
            " would change places with the new generation's keys.",
            hint="write `shared: true` in the sink, or give it two databases that nothing else uses: 2 and `spare: 3`",
            sink=database.sink,
        )


def require_memory(database: Database) -> None:
    """Raise SinkRejected when the server has no memory for as much as it holds."""
    for memory in database.ask(lambda server: read_info(server, "memory")):
        limit = int(memory.get("maxmemory", 0)) or int(memory.get("total_system_memory", 0))
        used = int(memory["used_memory"])
        if limit:
            where = f"the memory of the cache at {address(database.url)}"
            require_free_space(used, limit - used, where, database.sink)


def _policy(database: Database) -> str | None:
    """Read maxmemory-policy; None where nobody may. INFO first: managed servers lack CONFIG."""
    with suppress(SinkRejected):
        memories = database.ask(lambda server: read_info(server, "memory"))
        policies = sorted({str(memory.get("maxmemory_policy", "")) for memory in memories})
        if all(policies):
            return next((policy for policy in policies if policy != "noeviction"), "noeviction")
    with suppress(SinkRejected):
        settings = database.ask(lambda server: server.config_get("maxmemory-policy"))
        return str(settings["maxmemory-policy"])
    return None
