"""A database of the cache's server, as the driver asks it: the pipeline's keys, scripts, errors."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import redis

from cdc.redis.server import (
    COMMANDS,
    HINTS,
    Failure,
    at_database,
    client,
    database,
    failure,
    position_key,
    view_key,
)
from cdc.sink.lane_run import reported_error
from cdc.sinks.redis.scan import key_pages

Script = Callable[[Sequence[str], Sequence[str | int | bytes]], Any]
"""A script of the server: takes KEYS and ARGV, returns its answer."""


class Database:
    """The pipeline's keys in one database of the server, for one sink.

    sink: name of the sink in messages. prefix: what the pipeline's keys begin with. hints: what a
    person can do about a failure, by its kind.

    Any thread may use it. What asks the server raises SinkUnavailable where trying again can help,
    and SinkRejected where it can't.
    """

    def __init__(self, sink: str, url: str, prefix: str, commands: str = COMMANDS) -> None:
        """`commands` are those that the user has to be allowed.

        Raises:
            SettingsError: the url names no server and database.
        """
        self.sink = sink
        self.url = url
        self.prefix = prefix
        self.number = database(url)
        allowed = " ".join(f"+{command}" for command in commands.split())
        self.hints = {
            **HINTS,
            "forbidden": f"check the sink's `user` and `password`, and allow: `ACL SETUSER USER ~{prefix}:* {allowed}`",
        }

    @property
    def names_key(self) -> str:
        """Key of the set that names the tables in this database."""
        return f"{self.prefix}:_cdc"

    def at(self, number: int) -> "Database":
        return Database(self.sink, at_database(self.url, number), self.prefix)

    def position_key(self, table: str) -> str:
        return position_key(self.prefix, table)

    def ask(self, question: Callable[[redis.Redis], Any]) -> Any:
        try:
            return question(client(self.url))
        except redis.exceptions.RedisError as error:
            kind, message = self.failure(error)
            raise reported_error(kind, message, self.hints, sink=self.sink) from None

    def failure(self, error: redis.exceptions.RedisError) -> Failure:
        return failure(error, self.url, self.sink)

    def script(self, source: str) -> Script:
        """Register a script; returns the function that calls it."""
        script = self.ask(lambda server: server.register_script(source))
        return lambda keys, arguments: self.ask(lambda _: script(keys=keys, args=arguments))

    def row_keys(self, table: str) -> Iterator[list[str]]:
        """Scan the keys of a table's rows, in pages of up to `PAGE_ROWS`."""
        return self.keys(view_key(self.prefix, table))

    def own_keys(self) -> Iterator[list[str]]:
        """Scan all keys of the pipeline, in pages of up to `PAGE_ROWS`; one may come twice."""
        return self.keys(f"{self.prefix}:")

    def keys(self, begin: str) -> Iterator[list[str]]:
        """Scan the keys that begin with a text, as `own_keys` does."""
        pages = key_pages(self.url, begin)
        while page := self.ask(lambda _: next(pages, None)):
            yield page
