"""The database that holds the state: what its errors mean. A cache that is out of memory may soon
have room again, and is waited for; a state only grows, so one that doesn't fit ends its stream.
"""

from contextlib import suppress

import redis

from cdc.model.address import address
from cdc.sinks.redis.database import Database
from cdc.sinks.redis.server import Failure, bytes_client, failure, first_word


def state_failure(error: redis.exceptions.RedisError, url: str, subject: str) -> Failure:
    """Classify an error of the state's server, as `failure` does but for a lack of memory."""
    if first_word(error) != "OOM":
        return failure(error, url, subject)
    return Failure(
        "rejected",
        f"The server at {address(url)} has no room for the state of documents{_memory(url)}.",
    )


class StateDatabase(Database):
    """The state's keys, as the driver asks for them."""

    def failure(self, error: redis.exceptions.RedisError) -> Failure:
        """See `state_failure`."""
        return state_failure(error, self.url, self.sink)


def _memory(url: str) -> str:
    """Say how much of its memory the server uses; nothing where the user may not ask."""
    with suppress(redis.exceptions.RedisError):
        memory = bytes_client(url).info("memory")
        used, limit = int(memory["used_memory"]), int(memory["maxmemory"])
        return f": {used:,} of {limit:,} bytes (maxmemory) are used"
    return ""
