"""The tables of a database of the cache: named, emptied, copied and dropped."""

from collections.abc import Collection, Iterable, Sequence
from functools import partial
from operator import methodcaller

import redis

from cdc.errors import SinkUnavailable
from cdc.model.generation import generation_of_copy
from cdc.sinks.redis.database import Database
from cdc.sinks.redis.scripts import REMOVE


def add_name(database: Database, name: str) -> None:
    database.ask(lambda server: server.sadd(database.names_key, name))


def other_tables(database: Database, names: Collection[str]) -> list[str]:
    """List tables in a database that aren't of these names."""
    return sorted(database.ask(lambda server: server.smembers(database.names_key)) - set(names))


def empty_table(
    database: Database, name: str, generation_after: str, expected_generation: str | None = None
) -> None:
    """Remove rows, then the position: if this ends half-way, the position still says that it has to
    be done.

    generation_after: of the table from then on; '' for none. expected_generation: of the position
    that was read. The table is left alone if it has another one by now.

    Raises:
        SinkUnavailable: it has another one.
    """
    key = database.position_key(name)
    script = database.script(REMOVE)
    generation = expected_generation
    if generation is None:
        generation = database.ask(lambda server: server.hget(key, "generation")) or ""

    def remove(rows: Sequence[str], *position: str) -> None:
        if not script([key, *rows], [generation, *position]):
            raise SinkUnavailable(
                f"Generations of {name} have changed places while one was made empty.",
                hint="no action needed; retried automatically",
                sink=database.sink,
            )

    for page in database.row_keys(name):
        remove(page, "", "")
    remove([], "position", generation_after)


def copy_table(name: str, source: Database, target: Database) -> None:
    """Copy a table under another generation, so that emptying the one never empties the other."""
    key = source.position_key(name)
    add_name(target, name)
    source.ask(lambda server: server.copy(key, key, str(target.number), replace=True))
    generation = target.ask(lambda server: server.hget(key, "generation")) or ""
    target.ask(lambda server: server.hset(key, "generation", generation_of_copy(generation)))
    for page in source.row_keys(name):
        source.ask(partial(_copy_keys, page, target.number))


def drop_table(database: Database, name: str) -> None:
    empty_table(database, name, "")
    database.ask(lambda server: server.srem(database.names_key, name))


def list_keys(database: Database) -> list[str]:
    """Say how many keys of the pipeline a database holds: a line, or none."""
    count = len({key for page in database.own_keys() for key in page})
    return [f"{count:,} keys {database.prefix}:* in database {database.number}"] if count else []


def remove_keys(pages: Iterable[Sequence[str]], database: Database) -> None:
    for page in pages:
        database.ask(methodcaller("unlink", *page))


def _copy_keys(keys: Sequence[str], number: int, server: redis.Redis) -> None:
    """Copy keys to another database under the same names, in one round trip."""
    pipeline = server.pipeline(transaction=False)
    for key in keys:
        pipeline.copy(key, key, str(number), replace=True)
    pipeline.execute()
