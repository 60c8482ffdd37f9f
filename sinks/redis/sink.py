"""Redis or Valkey: a JSON document per row under <prefix>:<schema>.<table>:<id>.

One Lua call applies a chunk of a partition and moves that partition's position, so the two can't
part. Chunks go in offset order; a chunk's position is its last offset + 1, and a row above it has
not been written by then. So a crash between chunks leaves a position to go on from, and no row is
ever set back. Positions are a hash <prefix>:_cdc:<schema>.<table>: topic_id, writer, partitions,
rows, at, generation, one field a partition, and what else `ViewCheckpoint` has, as JSON. Only the
writer that it names moves it; a new one writes its name first. Another generation lies under the
same names in another database of the server; SWAPDB exchanges the two. So every call names the
generation that it is for: the other's positions and rows may lie here by now. The set <prefix>:_cdc
names the tables that lie in a database: those that aren't of the pipeline any more are brought
along when the two change places.
"""

import itertools
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import redis
import structlog

from cdc.errors import SinkRejected, SinkUnavailable
from cdc.model.address import address
from cdc.model.generation import new_generation
from cdc.model.outcome import Advance, Applied
from cdc.model.position import ViewCheckpoint, distance
from cdc.model.table import RowFormat, Table
from cdc.sink.contract import (
    Batch,
    GenerationReplaced,
    Outcome,
    require_free_space,
    wait_until_caught_up,
    would_go_back,
)
from cdc.sink.fencing import checkpoint_after, mismatch, must_apply
from cdc.sink.lane_run import reported_error, run_on_executors
from sinks.redis.checkpoint import checkpoint_of, expected_fields, extra_fields
from sinks.redis.executor import PendingAdvance, RedisWriter
from sinks.redis.scan import group_reader
from sinks.redis.scripts import EXCHANGE, FINISH, REMOVE, TAKE
from sinks.redis.server import (
    COMMANDS,
    HINTS,
    at_database,
    client,
    copy_keys,
    database,
    failure,
    forget,
    glob_literal,
    position_key,
    run_script,
    table_of_position,
    view_key,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

SCAN_ROWS = 2000
ROW = ["id", "document"]
log = structlog.get_logger()


class Redis:
    """The cache as a sink, see `cdc.sink.contract.Sink`.

    Generations change places as a whole database.
    """

    row_format: RowFormat = "documents"
    promotes_all_tables = True

    def __init__(
        self,
        name: str,
        url: str,
        prefix: str,
        spare: int | None = None,
        generation_names: Mapping[str, str] | None = None,
    ) -> None:
        """`spare` is the number of the database for other generations: the next one when None.

        Raises:
            SettingsError: the url names no server and database.
        """
        self.name, self.url, self.prefix, self._generation_names = (
            name,
            url,
            prefix,
            generation_names,
        )
        self.database = database(url)
        self.spare = self.database + 1 if spare is None else spare
        self._last_generation: dict[str, str] = {}
        allowed = " ".join(f"+{command}" for command in COMMANDS.split())
        self._hints = {
            **HINTS,
            "forbidden": f"check the url, and allow: `ACL SETUSER USER ~{prefix}:* {allowed}`",
        }

    def refusals(self, table: Table) -> list[str]:  # noqa: ARG002  # a document may have any names
        """Return nothing: a document may have any names."""
        return []

    def prepare(self, table: Table) -> None:
        """Create the position, and check that the server evicts no rows."""
        policy = self._policy()
        if policy is None:
            log.warning("eviction_unknown", sink=self.name, needed="noeviction")
        elif policy != "noeviction":
            raise SinkRejected(
                f"The cache's maxmemory-policy is {policy}: it may drop rows of {table.qualified} by itself.",
                hint="CONFIG SET maxmemory-policy noeviction",
                sink=self.name,
            )
        generation = self._generation_of(table) or new_generation()
        self._last_generation.pop(table.qualified, None)
        self._ask(lambda server: server.hsetnx(self.position_key(table), "generation", generation))
        self._ask(lambda server: server.sadd(self._names_key, table.qualified))

    def _policy(self) -> str | None:
        """Read maxmemory-policy; None where the user may read it nowhere. INFO first: managed
        servers lack CONFIG.
        """
        with suppress(SinkRejected):
            memory = self._ask(lambda server: server.info("memory"))
            if policy := memory.get("maxmemory_policy"):
                return str(policy)
        with suppress(SinkRejected):
            return str(
                self._ask(lambda server: server.config_get("maxmemory-policy"))["maxmemory-policy"]
            )
        return None

    def position(self, table: Table) -> ViewCheckpoint | None:
        """Read the hash of the position, with one HGETALL."""
        return checkpoint_of(self._read_fields(table))

    def apply(self, batch: Batch) -> Outcome:
        """Take over the positions, run the lane, and move partitions that had no rows."""
        pending = [
            step
            for advance in batch.advances
            if (step := self._pending_advance(advance, batch.writer))
        ]
        if not pending:
            return Outcome()
        writer = RedisWriter(
            self.url, self.prefix, {step.advance.table.topic: step for step in pending}
        )
        outcome = run_on_executors(
            batch.lane(writer, [step.advance for step in pending]),
            batch.records,
            self.name,
            self._hints,
        )
        for step in pending:
            self._finish(step)
        return outcome

    def clear(self, table: Table) -> None:
        """Empty the view; what another generation has left in this database makes room for it."""
        self._empty(
            table.qualified, self._generation_of(table), self._last_generation.get(table.qualified)
        )

    def _empty(
        self, name: str, generation_after: str, expected_generation: str | None = None
    ) -> None:
        """Remove rows, then the position: if this ends half-way, the position still says that it
        has to be done.

        expected_generation: of the position that was read. The table is left alone if it has
        another one by now.
        """
        key = position_key(self.prefix, name)
        script = client(self.url).register_script(REMOVE)
        generation = (
            expected_generation
            if expected_generation is not None
            else self._ask(lambda server: server.hget(key, "generation")) or ""
        )
        rows = client(self.url).scan_iter(
            match=glob_literal(view_key(self.prefix, name)) + "*", count=SCAN_ROWS
        )
        more = True
        while more:
            page = self._ask(lambda _: list(itertools.islice(rows, SCAN_ROWS)))
            more = bool(page)
            removal = ("", "") if page else ("position", generation_after)
            if not self._ask(partial(run_script, script, [key, *page], [generation, *removal])):
                raise SinkUnavailable(
                    f"Generations of {name} have changed places while one was made empty.",
                    hint="nothing to do: it is tried again",
                    sink=self.name,
                )

    def scan(
        self, table: Table, spark: "SparkSession", ids: Sequence[str] | None = None
    ) -> "DataFrame":
        """Read the rows in one task: all keys by SCAN, or those of the ids by MGET."""
        url, key_prefix = self.url, view_key(self.prefix, table.qualified)

        def rows(keys: list[str]) -> "pa.RecordBatch":
            import pyarrow as pa

            # A key that SCAN returned may have been deleted since; MGET needs one key at least.
            values = client(url).mget(keys) if keys else []
            pairs = [
                (key, value) for key, value in zip(keys, values, strict=True) if value is not None
            ]
            ids, documents = (
                [key[len(key_prefix) :] for key, _ in pairs],
                [value for _, value in pairs],
            )
            return pa.RecordBatch.from_arrays(
                [pa.array(ids, "string"), pa.array(documents, "string")], names=ROW
            )

        def read(parts: Iterator["pa.RecordBatch"]) -> Iterator["pa.RecordBatch"]:
            # Spark throws a worker away that hasn't read its input to the end: 0.7 s of imports.
            for _ in parts:
                pass
            keys = client(url).scan_iter(match=glob_literal(key_prefix) + "*", count=SCAN_ROWS)
            while page := list(itertools.islice(keys, SCAN_ROWS)):
                yield rows(page)

        def read_ids(parts: Iterator["pa.RecordBatch"]) -> Iterator["pa.RecordBatch"]:
            for part in parts:
                yield rows([key_prefix + key for key in part.column("key").to_pylist()])

        if ids is None:
            return spark.range(1, numPartitions=1).mapInArrow(read, "id string, document string")
        keys = spark.createDataFrame([(key,) for key in ids], "key string")
        return keys.mapInArrow(read_ids, "id string, document string")

    def scan_group(self, tables: Sequence[Table], spark: "SparkSession") -> "DataFrame":
        """Read the rows of many tables in one pass over all keys."""
        tables_by_prefix = {
            view_key(self.prefix, table.qualified): table.qualified for table in tables
        }
        read = group_reader(
            self.url, self.prefix, glob_literal(f"{self.prefix}:") + "*", tables_by_prefix
        )
        return spark.range(1, numPartitions=1).mapInArrow(
            read, "table string, id string, document string"
        )

    def close(self) -> None:
        """Close this process' connection."""
        forget(self.url)

    def for_generation(self, names: Mapping[str, str]) -> "Redis":
        """Build a sink of the spare database."""
        return Redis(
            self.name, at_database(self.url, self.spare), self.prefix, self.database, dict(names)
        )

    def check_capacity(self, tables: Sequence[Table]) -> None:  # noqa: ARG002  # it is always for all
        """Check memory, and that both databases are the pipeline's own, since they change places as
        a whole.
        """
        for sink in (self, self.for_generation({})):
            if key := sink._ask(sink._foreign_key):
                raise SinkRejected(
                    f"Database {sink.database} of the cache holds keys of others ({key.split(':', 1)[0]}:…), which"
                    " would change places with those of the new generation.",
                    hint="give the pipeline two databases of its own: url: redis://host:port/2 and spare: 3",
                    sink=self.name,
                )
        memory = self._ask(lambda server: server.info("memory"))
        limit = int(memory.get("maxmemory", 0)) or int(memory.get("total_system_memory", 0))
        used = int(memory["used_memory"])
        if limit:
            require_free_space(
                used, limit - used, f"the memory of the cache at {address(self.url)}", self.name
            )

    def promote(self, tables: Sequence[Table], names: Mapping[str, str]) -> Mapping[str, str]:
        """Exchange the databases in one script, if no position has moved since they were
        compared.
        """
        if all(
            (checkpoint := self.position(table)) and checkpoint.generation == names[table.qualified]
            for table in tables
        ):
            return {}
        candidate = self.for_generation(names)
        self._bring_along(candidate, {table.qualified for table in tables})
        wait_until_caught_up(lambda: self._exchanged(candidate, tables), self.name)
        retained = ((table, self.for_generation({}).position(table)) for table in tables)
        return {
            table.qualified: checkpoint.generation for table, checkpoint in retained if checkpoint
        }

    def _exchanged(self, candidate: "Redis", tables: Sequence[Table]) -> bool:
        """Exchange the databases if no view would go back; returns whether they were exchanged."""
        comparisons = []
        for live_fields, candidate_fields in zip(
            self._read_all(tables), candidate._read_all(tables), strict=True
        ):
            live_checkpoint, candidate_checkpoint = (
                checkpoint_of(live_fields),
                checkpoint_of(candidate_fields),
            )
            if live_checkpoint and (
                candidate_checkpoint is None or would_go_back(candidate_checkpoint, live_checkpoint)
            ):
                return False
            comparisons += [(self, live_fields), (candidate, candidate_fields)]
        keys = [self.position_key(table) for table in tables for _ in range(2)]
        expectations = [
            {"database": str(sink.database), "key": key, "fields": expected_fields(fields)}
            for (sink, fields), key in zip(comparisons, keys, strict=True)
        ]
        arguments = (self.database, self.spare, json.dumps(expectations))
        return bool(self._ask(lambda server: server.eval(EXCHANGE, 0, *arguments)))

    def _bring_along(self, candidate: "Redis", names: Collection[str]) -> None:
        """Copy tables that the pipeline has no more to the candidate, so that their readers keep
        them.
        """
        for name in candidate._other_tables(names):
            candidate._drop_table(name)
        for name in self._other_tables(names):
            self._copy(name, candidate)

    def _copy(self, name: str, candidate: "Redis") -> None:
        """Copy a table under another generation, so that emptying the one never empties the
        other.
        """
        key = position_key(self.prefix, name)
        candidate._ask(lambda server: server.sadd(self._names_key, name))
        self._ask(lambda server: server.copy(key, key, str(candidate.database), replace=True))
        candidate._ask(lambda server: server.hset(key, "generation", new_generation()))
        rows = client(self.url).scan_iter(
            match=glob_literal(view_key(self.prefix, name)) + "*", count=SCAN_ROWS
        )
        while page := self._ask(lambda _: list(itertools.islice(rows, SCAN_ROWS))):
            self._ask(partial(copy_keys, page, candidate.database))

    def _other_tables(self, names: Collection[str]) -> list[str]:
        """List tables in this database that aren't of these names."""
        return sorted(self._ask(lambda server: server.smembers(self._names_key)) - set(names))

    def _drop_table(self, name: str) -> None:
        self._empty(name, "")
        self._ask(lambda server: server.srem(self._names_key, name))

    def generations(self, table: Table) -> list[str]:
        """List the live generation and the one in the spare database."""
        checkpoints = (sink.position(table) for sink in (self, self.for_generation({})))
        return [stored.generation for stored in checkpoints if stored]

    def drop_unreferenced(self, tables: Sequence[Table], keep: Mapping[str, str]) -> None:
        """Empty the tables of the spare database that are not kept."""
        spare = self.for_generation({})
        for table in tables:
            if table.qualified not in keep:
                spare.clear(table)
        for name in spare._other_tables({*keep, *(table.qualified for table in tables)}):
            spare._drop_table(name)

    def _foreign_key(self, server: redis.Redis) -> str | None:
        """Find a key that isn't the pipeline's.

        Also notes the tables of its keys, which older versions didn't.
        """
        names, own_prefix = set(), f"{self.prefix}:"
        for key in server.scan_iter(count=SCAN_ROWS):
            if not key.startswith(own_prefix):
                return str(key)
            if key.startswith(f"{own_prefix}_cdc:"):
                names.add(table_of_position(self.prefix, key))
        if names:
            server.sadd(self._names_key, *names)
        return None

    @property
    def _names_key(self) -> str:
        return f"{self.prefix}:_cdc"

    def position_key(self, table: Table) -> str:
        """Return the key of the hash that holds a table's checkpoint."""
        return position_key(self.prefix, table.qualified)

    def _read_fields(self, table: Table) -> dict[str, str]:
        """Read the fields of a position; empty when there is none."""
        fields: dict[str, str] = self._ask(lambda server: server.hgetall(self.position_key(table)))
        return self._checked(table, fields)

    def _read_all(self, tables: Sequence[Table]) -> list[dict[str, str]]:
        """Read the fields of many positions in one round trip."""

        def ask(server: redis.Redis) -> list[dict[str, str]]:
            pipeline = server.pipeline(transaction=False)
            for table in tables:
                pipeline.hgetall(self.position_key(table))
            return list(pipeline.execute())

        return [
            self._checked(table, fields)
            for table, fields in zip(tables, self._ask(ask), strict=True)
        ]

    def _checked(self, table: Table, fields: dict[str, str]) -> dict[str, str]:
        self._last_generation[table.qualified] = fields.get("generation", "")
        if self._generation_names and fields.get("generation") not in (
            None,
            self._generation_of(table),
        ):
            raise GenerationReplaced(table.qualified, self._generation_of(table), self.name)
        return fields

    def _pending_advance(self, advance: Advance, writer: str) -> PendingAdvance | None:
        """Return the rest of an advance, None when it is done: an earlier try may have applied a
        part of it.
        """
        fields, start, end = self._read_fields(advance.table), advance.start_offsets, advance.end
        stored = checkpoint_of(fields)
        if (
            stored
            and stored.writer == writer
            and not advance.is_repair
            and distance(stored, end).comparable
        ):
            offsets = stored.position.offsets
            if offsets == end.offsets:
                return None
            if all(
                low <= offset <= high
                for low, offset, high in zip(start, offsets, end.offsets, strict=True)
            ):
                start = offsets
        if start == advance.start_offsets:
            must_apply(advance, stored, writer)
        generation = fields.get("generation", "")
        checkpoint = checkpoint_after(advance, stored, Applied(), writer, generation)
        pending = PendingAdvance(
            advance,
            start,
            generation,
            writer,
            () if advance.is_repair else extra_fields(checkpoint),
        )
        if fields.get("writer") != writer:
            self._take_over(pending, fields)
        return pending

    def _take_over(self, pending: PendingAdvance, fields: Mapping[str, str]) -> None:
        """Become the writer that moves this position, if it is still where it was read."""
        script, table = client(self.url).register_script(TAKE), pending.advance.table
        offsets = (
            (text, fields.get(text, "0"))
            for text in map(str, range(pending.advance.end.partition_count))
        )
        arguments = [
            pending.writer,
            pending.generation,
            fields.get("topic_id", ""),
            *itertools.chain.from_iterable(offsets),
        ]
        if not self._ask(partial(run_script, script, [self.position_key(table)], arguments)):
            checkpoint = self.position(table)
            raise mismatch(
                table,
                pending.advance.start,
                checkpoint.position if checkpoint else None,
                ours=checkpoint is None,
            )

    def _finish(self, pending: PendingAdvance) -> None:
        """Move the partitions that held transaction markers only: no row carried their position."""
        script, end = client(self.url).register_script(FINISH), pending.advance.end.offsets
        partitions = zip(range(len(end)), pending.offsets, end, strict=True)
        arguments = pending.arguments(*itertools.chain.from_iterable(partitions))
        answer = self._ask(
            partial(run_script, script, [self.position_key(pending.advance.table)], arguments)
        )
        if answer[0] != "ok":
            start = pending.offsets[int(answer[-1])]
            pending.offset(answer, start, start)

    def _generation_of(self, table: Table) -> str:
        """Return the name of this sink's generation of a table; '' for the live one, whatever its
        name.
        """
        return self._generation_names[table.qualified] if self._generation_names else ""

    def _ask(self, question: Callable[[redis.Redis], Any]) -> Any:
        try:
            return question(client(self.url))
        except redis.exceptions.RedisError as error:
            kind, message = failure(error, self.url, self.name)
            raise reported_error(kind, message, self._hints, sink=self.name) from None
