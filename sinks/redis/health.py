"""Health of the server of the cache, or of the state of documents: facts of INFO, and what they mean
for rows.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import redis

from cdc.model.finding import Finding, find
from cdc.sinks.redis.server import NO_EVICTION, client, failure, shell_command

OLDEST = 7
FULL = 0.8
"""The share of `maxmemory` above which the cache may soon refuse writes."""
Info = Mapping[str, Any]


def examine(sink: str, url: str) -> list[Finding]:
    """Read what the server tells of itself, and judge it."""
    info = read_info(sink, url)
    return [info] if isinstance(info, Finding) else list(check_info(sink, url, info))


def read_info(sink: str, url: str) -> Info | Finding:
    """Read what the server tells of itself; a finding where it can't be asked."""
    try:
        return dict(client(url).info())
    except redis.exceptions.RedisError as error:
        message = failure(error, url, "INFO").message
        return find(
            "sink-unreachable", sink, message, "is the server up? cdc -p FILE status", sink=sink
        )


def check_info(sink: str, url: str, info: Info) -> Iterator[Finding]:
    """Judge what the server tells of itself. Pure."""

    def finding(code: str, setting: str, message: str, command: str) -> Finding:
        fix = f"{shell_command(url)} {command}"
        return find(code, setting, f"{sink}: {message}", fix, sink=sink)

    version = str(info.get("redis_version", OLDEST))
    if int(version.split(".", maxsplit=1)[0]) < OLDEST:
        message = f"the server speaks Redis {version}; {OLDEST} is the oldest that is supported."
        yield finding("sink-unfit/redis", "redis_version", message, "INFO server")
    if info.get("redis_mode") == "cluster":
        message = "the server is a cluster, whose nodes aren't asked, and whose databases can't be switched."
        yield finding("sink-unfit/cluster", "cluster-enabled", message, "INFO cluster")
    if info.get("role") == "slave":
        message = "the server is a replica, which takes no writes."
        yield finding("sink-unfit/replica", "role", message, "INFO replication")
    policy = str(info.get("maxmemory_policy", "noeviction"))
    if policy != "noeviction":
        message = f"maxmemory-policy is {policy}: rows may vanish without a word."
        yield finding("setting-differs/maxmemory-policy", "maxmemory-policy", message, NO_EVICTION)
    used, limit = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    if limit and used > FULL * limit:
        message = f"{used / limit:.0%} of maxmemory is used."
        yield finding("memory-low/cache", "maxmemory", message, "INFO memory")
    if "err" in (info.get("aof_last_write_status"), info.get("rdb_last_bgsave_status")):
        message = "the server can't save to its disk, and may refuse writes."
        yield finding("cache-save-failing", "persistence", message, "INFO persistence")
