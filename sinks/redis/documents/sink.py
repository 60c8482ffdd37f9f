"""The state as the loop sees it: what applies the tables that documents are made from.

Rows get in as into the cache: one Lua call per part of a chunk, together with the position. The
state has one generation; what the file's views need of a table is noted beside its position, and a
table of which something else is needed by now is read again from offset zero.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import redis
import structlog

from cdc.config.view_settings import STATE
from cdc.documents.plan import StatePlan
from cdc.documents.state import (
    State,
    index_prefix,
    shard_prefix,
    stale_fields,
    state_failure,
    state_key,
)
from cdc.errors import SinkUnavailable
from cdc.model.finding import Finding
from cdc.model.position import ViewCheckpoint
from cdc.model.table import Table
from cdc.redis.checkpoint import checkpoint_of
from cdc.redis.server import COMMANDS, STATE_COMMANDS, Failure, forget, view_key
from cdc.sink.contract import Batch, Outcome
from cdc.sinks.redis import health
from cdc.sinks.redis.database import Database
from cdc.sinks.redis.documents.executor import FORGET, StateWriter, changing
from cdc.sinks.redis.positions import Positions
from cdc.sinks.redis.scripts import REMOVE
from cdc.sinks.redis.tables import add_name, empty_table, list_keys, other_tables, remove_keys

log = structlog.get_logger()


class _Database(Database):
    def failure(self, error: redis.exceptions.RedisError) -> Failure:
        return state_failure(error, self.url, self.sink)


class DocumentState:
    """See `cdc.documents.state.StateSink`."""

    name = STATE

    def __init__(self, url: str, prefix: str) -> None:
        """Raises SettingsError: the url names no server and database."""
        self.url = url
        self.prefix = shard_prefix(prefix)
        self.plan = StatePlan(())
        self.needs: Mapping[str, str] = {}
        self._pipeline_keys = _Database(STATE, url, prefix, f"{COMMANDS} {STATE_COMMANDS}")
        self._database = _Database(STATE, url, self.prefix)
        # A user may reach the keys of the pipeline, in whatever shard.
        self._database.hints = self._pipeline_keys.hints
        self._positions = Positions(self._database, None)

    def adopt(
        self, plan: StatePlan, needs: Mapping[str, str], waiting: Mapping[str, list[str]]
    ) -> None:
        """Take the plan. What its documents lack is forgotten first, so that a crash leaves none
        that counts as current. Then the rows of tables are removed that no view needs.
        """
        used = {view.name: view.topics.keys() for view in plan.views}
        State(self.url, self.prefix, tuple(used)).adopt(needs, used, waiting)
        self.plan = plan
        self.needs = needs
        for name in other_tables(self._database, needs):
            log.info("table_removed", sink=self.name, table=name)
            self._remove_table(name)

    def _remove_table(self, name: str) -> None:
        """Remove the position first, so that a run with another file applies no more to it; the
        name last, so that a crash leaves the table to the next start.
        """
        database = self._database
        database.ask(lambda server: server.unlink(database.position_key(name)))
        for begin in (view_key(self.prefix, name), index_prefix(self.prefix, name)):
            remove_keys(database.keys(begin), database)
        database.ask(lambda server: server.srem(database.names_key, name))

    def open_state(self) -> State:
        return State(self.url, self.prefix, tuple(view.name for view in self.plan.views))

    def examine(self, tables: Sequence[Table]) -> list[Finding]:  # noqa: ARG002  # the server's own
        return health.examine(self.name, self.url)

    def refusals(self, table: Table) -> list[str]:  # noqa: ARG002  # a row may have any names
        return []

    def prepare(self, table: Table) -> None:
        """Create the position. What is needed of the table is noted while there are no rows that were
        stored for something else: a table that waits since it couldn't be cleared has them.
        """
        health.require_no_eviction(self._database, table.qualified, "the state of documents")
        self._positions.create(table)
        add_name(self._database, table.qualified)
        needs = self.needs[table.qualified]
        if self._positions.checkpoint(table) is None:
            self._database.ask(
                lambda server: server.hset(state_key(self.prefix, "needs"), table.qualified, needs)
            )

    def position(self, table: Table) -> ViewCheckpoint | None:
        """Read the position; None also where the rows lack what is needed of the table now."""
        return self.positions([table])[table.qualified]

    def positions(self, tables: Sequence[Table]) -> Mapping[str, ViewCheckpoint | None]:
        noted = self._database.ask(lambda server: server.hgetall(state_key(self.prefix, "needs")))
        fields = self._positions.read_all(tables)
        return {
            table.qualified: checkpoint_of(stored)
            if noted.get(table.qualified) == self.needs[table.qualified]
            else None
            for table, stored in zip(tables, fields, strict=True)
        }

    def apply(self, batch: Batch) -> Outcome:
        return self._positions.apply(batch, partial(StateWriter, plan=self.plan))

    def clear(self, table: Table) -> None:
        """Undo all rows of a table, so that documents which hold them are made again; then forget
        the position, and that documents were current in it.
        """
        name = table.qualified
        key = self._database.position_key(name)
        script = self._database.script(FORGET)
        generation = self._database.ask(lambda server: server.hget(key, "generation")) or ""
        documents = state_key(self.prefix, "documents")
        notes = [f"{view.name} {table.topic}" for view in self.plan.views]
        self._database.ask(lambda server: server.hdel(documents, *notes))
        self._reopen(name)
        head = changing(self.plan, self.prefix, table)
        begin = view_key(self.prefix, name)
        for page in self._database.row_keys(name):
            rows = [part for row in page for part in (row.removeprefix(begin), "", "", "")]
            keys = [key, state_key(self.prefix, "number"), state_key(self.prefix, "pending")]
            if not script(keys, [generation, name, *head, *rows]):
                raise self._replaced(name)
        empty_table(self._database, name, "", generation)
        # Every row is undone by now, so entries that are left are of rows that went without it: of a
        # table that was half removed. Nobody writes rows until the table has a position again.
        remove = self._database.script(REMOVE)
        for page in self._database.keys(index_prefix(self.prefix, name)):
            if not remove([key, *page], ["", "", ""]):
                raise self._replaced(name)

    def _reopen(self, name: str) -> None:
        """Let windows close only once the rows of a table are there again. Which ones are final, the
        topics say, all of which are read again.
        """
        closing = [
            view.name
            for view in self.plan.views
            if view.root.table.qualified == name and view.grouping and view.grouping.closing
        ]
        if not closing:
            return
        documents = state_key(self.prefix, "documents")
        noted = self._database.ask(lambda server: server.hkeys(documents))
        others = {view.name for view in self.plan.views}.difference(closing)
        if stale := stale_fields(noted, others):
            self._database.ask(lambda server: server.hdel(documents, *stale))
        self._database.ask(lambda server: server.hdel(state_key(self.prefix, "clocks"), *closing))

    def close(self) -> None:
        forget(self.url)

    def remains(self, tables: Sequence[Table]) -> list[str]:  # noqa: ARG002  # all of its keys
        return list_keys(self._pipeline_keys)

    def remove(self, tables: Sequence[Table]) -> None:  # noqa: ARG002  # all of its keys
        remove_keys(self._pipeline_keys.own_keys(), self._pipeline_keys)

    def _replaced(self, name: str) -> SinkUnavailable:
        return SinkUnavailable(
            f"The rows of {name} have another generation by now.",
            hint="no action needed; retried automatically",
            sink=self.name,
        )
