"""What the cache needs: memory for a second generation, databases of its own, and no eviction."""

from contextlib import suppress

import redis
import structlog

from cdc.errors import SinkRejected
from cdc.model.address import address
from cdc.sink.promotion import require_free_space
from cdc.sinks.redis.database import SCAN_ROWS, Database
from cdc.sinks.redis.server import NO_EVICTION, shell_command

log = structlog.get_logger()


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
    """Raise SinkRejected when a database holds keys of others: generations change places with all
    of it.
    """
    if key := database.ask(lambda server: _foreign_key(database, server)):
        raise SinkRejected(
            f"Database {database.number} of the cache holds keys of others ({key.split(':', 1)[0]}:…), which"
            " would change places with those of the new generation.",
            hint="give the pipeline two databases of its own: url: redis://host:port/2 and spare: 3",
            sink=database.sink,
        )


def require_memory(database: Database) -> None:
    """Raise SinkRejected when the server has no memory for as much as it holds."""
    memory = database.ask(lambda server: server.info("memory"))
    limit = int(memory.get("maxmemory", 0)) or int(memory.get("total_system_memory", 0))
    used = int(memory["used_memory"])
    if limit:
        where = f"the memory of the cache at {address(database.url)}"
        require_free_space(used, limit - used, where, database.sink)


def _policy(database: Database) -> str | None:
    """Read maxmemory-policy; None where the user may read it nowhere. INFO first: managed servers
    lack CONFIG.
    """
    with suppress(SinkRejected):
        memory = database.ask(lambda server: server.info("memory"))
        if policy := memory.get("maxmemory_policy"):
            return str(policy)
    with suppress(SinkRejected):
        settings = database.ask(lambda server: server.config_get("maxmemory-policy"))
        return str(settings["maxmemory-policy"])
    return None


def _foreign_key(database: Database, server: redis.Redis) -> str | None:
    """Find a key that isn't the pipeline's."""
    keys = server.scan_iter(count=SCAN_ROWS)
    return next((str(key) for key in keys if not key.startswith(f"{database.prefix}:")), None)
