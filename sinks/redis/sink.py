"""Redis or Valkey: a JSON document per row under <prefix>:<schema>.<table>:<id>.

One Lua call applies a chunk of a partition and moves that partition's position, so the two can't
part. Chunks go in offset order; a chunk's position is its last offset + 1, and a row above it has
not been written by then. So a crash between chunks leaves a position to go on from, and no row is
ever set back. Positions are a hash <prefix>:_cdc:<schema>.<table>: topic_id, writer, takeovers,
partitions, rows, at, generation, one field a partition, and what else `ViewCheckpoint` has, as JSON. Only the
writer that it names moves it; a new one writes its name first. Another generation lies under the
same names in another database of the server; SWAPDB exchanges the two, or, if others use the
databases, too, `exchange` does row by row. So every call names the generation that it is for: the
other's positions and rows may lie here by now. The set <prefix>:_cdc names the tables that lie in a
database: those that aren't of the pipeline any more are brought along when databases change places.
"""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from cdc.errors import SinkRejected, SinkUnavailable
from cdc.model.finding import Finding
from cdc.model.position import ViewCheckpoint
from cdc.model.table import Table
from cdc.redis.checkpoint import checkpoint_of, expected_fields
from cdc.redis.server import HINTS, at_database, forget, view_key
from cdc.sink.contract import Batch, Fault, Hold, ListIds, Outcome, ReadRows, positions
from cdc.sink.promotion import are_live, wait_until_caught_up, would_go_back
from cdc.sink.scan import GROUPED, pages, read_pages, scan_items
from cdc.sinks.redis import health, scan
from cdc.sinks.redis.database import Database
from cdc.sinks.redis.executor import RedisWriter
from cdc.sinks.redis.positions import Positions, complete, new_mark, shown_offsets
from cdc.sinks.redis.scripts import EXCHANGE_DATABASES, EXCHANGE_POSITIONS
from cdc.sinks.redis.tables import (
    add_name,
    copy_table,
    drop_table,
    empty_table,
    list_keys,
    other_tables,
    remove_keys,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


PAUSE_MS = 60_000


class Redis:
    """The cache as a sink, see `cdc.sink.contract.Sink`.

    Generations change places as a whole database, or row by row if others use it, too.
    """

    promotes_all_tables = True

    def __init__(
        self,
        name: str,
        url: str,
        prefix: str,
        spare: int | None = None,
        generation_names: Mapping[str, str] | None = None,
        *,
        shared: bool = False,
        lifetimes_ms: Mapping[str, int] | None = None,
        hashes: frozenset[str] = frozenset(),
    ) -> None:
        """`spare` is the number of the database for other generations: the next one when None.
        `shared`: others use these databases, too. `lifetimes_ms`: how long rows stay, by table with a
        `ttl`. `hashes`: the tables with `form: hash`.

        Raises:
            SettingsError: the url names no server and database.
        """
        self.name = name
        self.url = url
        self.prefix = prefix
        self._database = Database(name, url, prefix)
        self.spare = self._database.number + 1 if spare is None else spare
        self.shared = shared
        self.lifetimes_ms = dict(lifetimes_ms or {})
        self.hashes = hashes
        self._positions = Positions(self._database, generation_names)

    def examine(self, tables: Sequence[Table]) -> list[Finding]:  # noqa: ARG002  # the server's own
        return health.examine(self.name, self.url)

    def faults(self, tables: Sequence[Table]) -> Mapping[str, Fault]:  # noqa: ARG002  # the server's own
        return {
            f"{self.name} clients kill": self._kill_clients,
            f"{self.name} writes pause": self._pause_writes,
        }

    def _kill_clients(self, hold: Hold) -> None:  # noqa: ARG002  # over at once
        self._database.ask(partial(health.on_primaries, words=("CLIENT KILL", "TYPE", "normal")))

    def _pause_writes(self, hold: Hold) -> None:
        # The server ends it after PAUSE_MS, if this process is killed.
        pause = ("CLIENT PAUSE", PAUSE_MS, "WRITE")
        try:
            self._database.ask(partial(health.on_primaries, words=pause))
            hold()
        finally:
            self._database.ask(partial(health.on_primaries, words=("CLIENT UNPAUSE",)))

    def refusals(self, table: Table) -> list[str]:  # noqa: ARG002  # a document may have any names
        return []

    def prepare(self, table: Table) -> None:
        health.require_no_eviction(self._database, table.qualified)
        self._positions.create(table)
        add_name(self._database, table.qualified)

    def position(self, table: Table) -> ViewCheckpoint | None:
        return self._positions.checkpoint(table)

    def apply(self, batch: Batch) -> Outcome:
        writer = partial(RedisWriter, lifetimes_ms=self.lifetimes_ms, hashes=self.hashes)
        return self._positions.apply(batch, writer)

    def lifetime_s(self, table: Table) -> float | None:
        lifetime_ms = self.lifetimes_ms.get(table.qualified)
        return None if lifetime_ms is None else lifetime_ms / 1000

    def clear(self, table: Table) -> None:
        """Empty the view; what another generation has left in this database makes room for it."""
        complete(self._database, table.qualified)
        generation = self._positions.generation(table)
        expected = self._positions.last_generation(table)
        empty_table(self._database, table.qualified, generation, expected)

    def scan(
        self, table: Table, spark: "SparkSession", ids: Sequence[str] | None = None
    ) -> "DataFrame":
        """Read all keys by SCAN in one task, or the given ids by MGET."""
        if ids is not None:
            return scan_items(spark, self._read_ids(table), pages(ids, scan.PAGE_ROWS))
        return scan_items(
            spark, partial(scan.read_rows, self.url, self._hashed(table)), [self.key_prefix(table)]
        )

    def row_reader(self, table: Table) -> ReadRows:
        return partial(read_pages, self._read_ids(table), scan.PAGE_ROWS)

    def id_lister(self, table: Table) -> ListIds:
        return partial(scan.list_ids, self.url, view_key(self.prefix, table.qualified))

    def _read_ids(self, table: Table) -> ReadRows:
        return partial(scan.read_ids, self.url, self._hashed(table), self.key_prefix(table))

    def key_prefix(self, table: Table) -> str:
        return view_key(self.prefix, table.qualified)

    def _hashed(self, table: Table) -> Table | None:
        return table if table.qualified in self.hashes else None

    def scan_group(self, tables: Sequence[Table], spark: "SparkSession") -> "DataFrame":
        names = [table.qualified for table in tables]
        unread = [name for name in names if name in self.hashes]
        tables_by_prefix = {
            self.key_prefix(table): table.qualified
            for table in tables
            if table.qualified not in self.hashes
        }
        read = partial(scan.read_tables, self.url, tables_by_prefix, unread)
        return scan_items(spark, read, [self.prefix], GROUPED)

    def close(self) -> None:
        forget(self.url)

    def for_generation(self, names: Mapping[str, str]) -> "Redis":
        url = at_database(self.url, self.spare)
        return Redis(
            self.name,
            url,
            self.prefix,
            self._database.number,
            dict(names),
            shared=self.shared,
            lifetimes_ms=self.lifetimes_ms,
            hashes=self.hashes,
        )

    def check_capacity(self, tables: Sequence[Table]) -> None:  # noqa: ARG002  # it is always for all
        """Check memory, and that both databases are our own where they change places as a whole."""
        self._require_own()
        health.require_memory(self._database)

    def promote(self, tables: Sequence[Table], names: Mapping[str, str]) -> Mapping[str, str]:
        """Exchange databases, or positions, in one script, unless a position has moved since the
        comparison. Rows follow positions.
        """
        self._complete(tables)
        if are_live(positions(self, tables), names):
            return {}
        candidate = Positions(self._spare_database, names)
        self._require_own()
        if not self.shared:
            # Tables that the pipeline has no more are copied, so that their readers keep them.
            own_names = {table.qualified for table in tables}
            for name in other_tables(candidate.database, own_names):
                drop_table(candidate.database, name)
            for name in other_tables(self._database, own_names):
                copy_table(name, self._database, candidate.database)
        lagging: list[Table] = []
        wait_until_caught_up(
            lambda: exchange(
                self._positions, candidate, tables, lagging, are_databases_own=not self.shared
            ),
            self.name,
            lagging,
        )
        self._complete(tables)
        # The previous generation, whatever its name.
        previous = Positions(self._spare_database, None)
        checkpoints = ((table.qualified, previous.checkpoint(table)) for table in tables)
        retained = {name: stored.generation for name, stored in checkpoints if stored}
        if retained.items() & names.items():
            raise SinkUnavailable(
                f"The server of {self.name} has lost the promotion that it had confirmed: readers see what they saw.",
                hint="run the same command again",
                sink=self.name,
            )
        return retained

    def generations(self, table: Table) -> list[str]:
        spare = Positions(self._spare_database, None)
        names = (positions.name(table) for positions in (self._positions, spare))
        return [name for name in names if name]

    def drop_unreferenced(self, tables: Sequence[Table], keep: Mapping[str, str]) -> None:
        """Empty tables of the spare database that aren't kept; drop those that are no view's."""
        spare = self._spare_database
        self._complete(tables)
        for table in tables:
            if table.qualified not in keep:
                empty_table(spare, table.qualified, "")
        for name in other_tables(spare, {*keep, *(table.qualified for table in tables)}):
            drop_table(spare, name)

    def remains(self, tables: Sequence[Table]) -> list[str]:  # noqa: ARG002  # all of its keys
        return [line for database in self.databases() for line in list_keys(database)]

    def remove(self, tables: Sequence[Table]) -> None:  # noqa: ARG002  # all of its keys
        for database in self.databases():
            remove_keys(database.own_keys(), database)

    def databases(self) -> list[Database]:
        """List the databases that exist: without the spare one no generation was ever built."""
        try:
            self._spare_database.ask(lambda server: server.ping())
        except SinkRejected as error:
            if error.hint != HINTS["misplaced"]:
                raise
            return [self._database]
        return [self._database, self._spare_database]

    def _require_own(self) -> None:
        for database in () if self.shared else (self._database, self._spare_database):
            health.require_own(database)

    def _complete(self, tables: Sequence[Table]) -> None:
        """Complete exchanges of rows, this command's or another's that was killed."""
        for table in tables:
            complete(self._database, table.qualified)

    @property
    def _spare_database(self) -> Database:
        return self._database.at(self.spare)


def exchange(
    live: Positions,
    candidate: Positions,
    tables: Sequence[Table],
    lagging: list[Table],
    *,
    are_databases_own: bool,
) -> bool:
    """Exchange two databases, or the positions in them, in one script, if no position has moved since
    they were compared.

    Returns whether they were exchanged: not while a view of the candidate would go back. `lagging` is
    filled with the tables of such views.
    """
    expectations = []
    begun = []
    lagging.clear()
    for table, *both in zip(tables, live.read_all(tables), candidate.read_all(tables), strict=True):
        stored, candidate_stored = map(checkpoint_of, both)
        if stored and (candidate_stored is None or would_go_back(candidate_stored, stored)):
            lagging.append(table)
        key = live.database.position_key(table.qualified)
        expectations += [
            {"database": str(side.database.number), "key": key, "fields": expected_fields(fields)}
            for side, fields in zip((live, candidate), both, strict=True)
        ]
        shown = shown_offsets(stored, candidate_stored) if candidate_stored else ()
        begun.append({"key": key, "shown": list(map(str, shown))})
    if lagging:
        return False
    numbers = (live.database.number, candidate.database.number)
    arguments: list[int | str] = [*numbers, json.dumps(expectations)]
    script = EXCHANGE_DATABASES
    if not are_databases_own:
        script = EXCHANGE_POSITIONS
        arguments += [new_mark(live.database, candidate.database), json.dumps(begun)]
    return bool(live.database.ask(lambda server: server.eval(script, 0, *arguments)))
