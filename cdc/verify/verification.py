"""Compare views with their source, row by row and column by column, while others go on writing.

Postgres says what each document must be (`types.Kind.source`); the view says what it is. A look at some rows goes so:

    1. where the topic ends; then a snapshot of the source, and its rows
    2. the fence behind that snapshot; wait until the views have passed it
    3. the views' rows, compared; then what the topic has got of them since 1

What differs and has no record since is wrong: nothing that came later can be the reason. What is as one of its records
since has made it is right: a row may change more often than it can be looked at. Any other is a suspect, and is looked
at again. The first look covers the buckets that differ (`cdc.verify.bucket_hashes`), found beforehand in one pass over
each side; small tables that are equal are found before that, many in one pass (`cdc.verify.census`). Rows stay with
Spark's executors: only counts and keys come back, never values.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from psycopg import sql
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from cdc.config.settings import Pipeline
from cdc.control.control_topics import Truncations
from cdc.errors import SettingsError
from cdc.kafka.topics import Topics
from cdc.model.table import Table
from cdc.sink.contract import Sink
from cdc.verify import bucket_hashes, recent_changes
from cdc.verify.barrier import Barrier, WaitOptions, await_barrier, place_barrier, wait_until_current
from cdc.verify.census import View, drawn, small_and_equal
from cdc.verify.comparison import KNOWN, Comparison, Difference
from cdc.verify.source_rows import Reader, Sample, Snapshot, bucket, within

SUSPECTS = 20_000
"""Keys per view that are looked at again; what differs beyond is counted as undecided."""
ROUNDS = 5
Tell = Callable[[str], object]
Suspects = Mapping[str, Sequence[str]]
"""By sink, ids of rows to look at again."""


@dataclass(frozen=True)
class Options:
    """What is compared and how.

    sample      percent of the buckets of ids, drawn anew for every call; of both sides alike
    since_ms    only rows that have a record in the log since then, Unix milliseconds
    rate        rows per second that are read from the source
    timeout_s   of each wait for the views
    """

    sample: float | None = None
    since_ms: int | None = None
    rate: float | None = None
    timeout_s: float = 300.0

    @property
    def scope(self) -> str:
        """What is compared, of a table as a whole."""
        return "all rows" if self.sample is None else f"{self.sample:g} % of the rows"


def verify(
    spark: SparkSession,
    pipeline: Pipeline,
    tables: Sequence[Table],
    sinks: Sequence[Sink],
    options: Options = Options(),  # frozen
    *,
    tell: Tell = lambda _: None,
) -> list[Comparison]:
    """One comparison per table and sink: waits for the views, compares, looks again at what changed meanwhile.

    `tell` gets what is being done, and what is waited for.

    Raises:
        ConnectorError: a view isn't past the fence in time; names the hop that is late.
        SettingsError: more keys have changed than can be looked at one by one.
        SourceError, SinkError: a server can't be read.
    """
    wait_until_current(pipeline, tables, sinks, timeout_s=options.timeout_s, tell=tell)
    compared: dict[View, Comparison] = {}
    # One for all that follows: what differs in a first look must be among what the next one looks at.
    sample = drawn(options.sample) if options.sample is not None else None
    if options.since_ms is None:
        reader = Reader(spark, options.rate)
        equal = small_and_equal(reader, pipeline.source.dsn, tables, sinks, sample, tell)
        compared |= {view: replace(one, scope=options.scope) for view, one in equal.items()}
    with Topics(pipeline.kafka) as kafka:
        for number, table in enumerate(tables, start=1):
            rest = [sink for sink in sinks if (sink.name, table.qualified) not in compared]
            if not rest:
                continue
            tell(f"comparing {table.qualified} ({number} of {len(tables)}) with {', '.join(one.name for one in rest)}")
            results = _Verification(spark, pipeline, kafka, table, rest, options, sample, tell).result()
            compared |= {(one.sink, one.table): one for one in results}
    return [compared[sink.name, table.qualified] for table in tables for sink in sinks]


def look_at(
    spark: SparkSession,
    pipeline: Pipeline,
    table: Table,
    sinks: Sequence[Sink],
    options: Options,
    ids: Sequence[str],
) -> list[Comparison]:
    """`verify` of these rows of a table alone."""
    with Topics(pipeline.kafka) as kafka:
        return _Verification(spark, pipeline, kafka, table, sinks, options).result(ids)


def compare(spark: SparkSession, table: Table, dsn: str, sinks: Sequence[Sink]) -> Iterator[Comparison]:
    """One comparison per sink, while nothing writes and all is applied: every difference counts."""
    reader, found = Reader(spark), {sink.name: Comparison(sink.name, table.qualified) for sink in sinks}
    with Snapshot(dsn, table) as snapshot, ExitStack() as kept:
        if buckets := sift(reader, snapshot, sinks, found, None):
            expected = persisted(kept, _of_buckets(reader, snapshot, buckets))
            for sink in sinks:
                view = bucket_hashes.within(sink.scan(table, spark), buckets)
                book(found[sink.name], differing(kept, table, sink, expected, view))
    yield from found.values()


class _Verification:
    """One table in several views."""

    def __init__(
        self,
        spark: SparkSession,
        pipeline: Pipeline,
        kafka: Topics,
        table: Table,
        sinks: Sequence[Sink],
        options: Options,
        sample: Sample | None = None,
        tell: Tell = lambda _: None,
    ) -> None:
        self._sample, self._tell = sample, tell
        self._spark, self._pipeline, self._kafka = spark, pipeline, kafka
        self._table, self._sinks, self._options = table, sinks, options
        self._reader = Reader(spark, options.rate)
        self._truncations = Truncations(pipeline, kafka)
        self._found = {sink.name: Comparison(sink.name, table.qualified) for sink in sinks}

    def result(self, ids: Sequence[str] | None = None) -> list[Comparison]:
        if ids is not None:
            suspects: Suspects = {sink.name: ids for sink in self._sinks}
        else:
            suspects = self._since(self._options.since_ms) if self._options.since_ms is not None else self._whole()
        for _ in range(ROUNDS):
            if not any(suspects.values()):
                break
            suspects = self._look(suspects)
        for name, left in suspects.items():
            self._found[name].undecided += len(left)
        return list(self._found.values())

    def _whole(self) -> Suspects:
        with Snapshot(self._pipeline.source.dsn, self._table) as snapshot:
            buckets = sift(self._reader, snapshot, self._sinks, self._found, self._sample)
        suspects = self._look(None, buckets) if buckets else {}
        for name, ids in suspects.items():
            self._found[name].rechecked = len(ids)
        for one in self._found.values():
            one.scope = self._options.scope
        return suspects

    def _since(self, since_ms: int) -> Suspects:
        listed = recent_changes.since_time(self._spark, self._pipeline.kafka, self._table, since_ms)
        ids = [row["id"] for row in listed.limit(SUSPECTS + 1).collect()]
        if len(ids) > SUSPECTS:
            raise SettingsError(
                f"More than {SUSPECTS:,} rows of {self._table.qualified} have changed since then.",
                hint="name a later time, or leave --since out: comparing all rows is faster then",
            )
        for sink in self._sinks:
            one = self._found[sink.name]
            one.view_rows = sink.scan(self._table, self._spark, ids).count() if ids else 0
            one.scope = f"{len(ids)} rows that changed"
        return {sink.name: ids for sink in self._sinks}

    def _look(self, suspects: Suspects | None, buckets: Sequence[str] = ()) -> Suspects:
        """Compare suspects, or else the rows of buckets; book what is wrong, return what has to be looked at again."""
        sinks = [sink for sink in self._sinks if suspects is None or suspects.get(sink.name)]
        ids = sorted({key for some in suspects.values() for key in some}) if suspects else []
        with ExitStack() as kept:
            before = self._kafka.ends([self._table.topic])[self._table.topic]
            with self._snapshot() as snapshot:
                chosen = self._reader.chosen(snapshot, ids)
                expected = persisted(kept, chosen if suspects else _of_buckets(self._reader, snapshot, buckets))
            barrier = self._passed(snapshot.taken_ms, sinks)
            wrong = {}
            for sink in sinks:
                mine = suspects[sink.name] if suspects else None
                view = sink.scan(self._table, self._spark, mine)
                rows = expected if mine is None else bucket_hashes.of(expected, mine)
                view = view if mine is not None else bucket_hashes.within(view, buckets)
                wrong[sink.name] = differing(kept, self._table, sink, rows, view)
            if all(frame.isEmpty() for frame in wrong.values()):
                return {}
            intact = {sink.name for sink in sinks if self._holds(barrier, sink)}
            states = persisted(
                kept, recent_changes.states_since(self._spark, self._pipeline.kafka, self._table, before)
            )
            return {name: self._decide(name, wrong[name], states if name in intact else None) for name in wrong}

    def _decide(self, name: str, wrong: DataFrame, states: DataFrame | None) -> list[str]:
        """Book the rows that have no record since; the ids of those that are as none of their records has made them.

        None instead of states: the view has been emptied meanwhile, anything may be the reason.
        """
        if states is not None:
            book(self._found[name], wrong.join(states, "id", "left_anti"))
            wrong = wrong.join(states, "id", "left_semi")
            made = (wrong["id"] == states["id"]) & wrong["seen"].eqNullSafe(states["seen"])
            wrong = wrong.join(states, made & (wrong["kind"] != "duplicate"), "left_anti")
        ids = [row["id"] for row in wrong.select("id").limit(SUSPECTS).collect()]
        if len(ids) == SUSPECTS:
            self._found[name].undecided += wrong.count() - SUSPECTS
        return ids

    def _passed(self, taken_ms: float, sinks: Sequence[Sink]) -> Barrier:
        options = WaitOptions(self._options.timeout_s, tell=self._tell)
        barrier = place_barrier(self._pipeline, self._kafka, [self._table], taken_ms, options)
        await_barrier(barrier, [self._table], sinks, options)
        return barrier

    def _holds(self, barrier: Barrier, sink: Sink) -> bool:
        """Whether the view has stood past its fence all the time: a TRUNCATE or a rebuild would have set it back."""
        self._truncations.read()
        name = self._table.qualified
        return (
            self._truncations.floors.number(name) == barrier.floors.number(name)
            and barrier.problem(sink, self._table) is None
        )

    def _snapshot(self) -> Snapshot:
        return Snapshot(self._pipeline.source.dsn, self._table)


def sift(
    reader: Reader,
    snapshot: Snapshot,
    sinks: Sequence[Sink],
    found: Mapping[str, Comparison],
    sample: Sample | None,
) -> list[str]:
    """The buckets that differ in any view, of those between a first and a last one; counts the rows of each side."""
    table, began = snapshot.table, time.monotonic()
    where = within(table, sample) if sample else None
    with ExitStack() as kept:
        source = persisted(kept, bucket_hashes.leaves(table, reader.rows(snapshot, where)))
        source_s = round(time.monotonic() - began, 3)
        differ: set[str] = set()
        for sink in sinks:
            began, one = time.monotonic(), found[sink.name]
            leaves = bucket_hashes.leaves(table, sink.scan(table, reader.spark))
            pairs = bucket_hashes.paired(
                source, leaves.where(F.col("bucket").between(*sample)) if sample else leaves
            ).persist()
            counts = pairs.agg(F.sum("source_rows"), F.sum("view_rows")).first() or (0, 0)
            one.source_rows, one.view_rows = (int(count or 0) for count in counts)
            differ |= {row["bucket"] for row in pairs.where("differs").select("bucket").collect()}
            pairs.unpersist()
            one.source_s, one.view_s = source_s, round(time.monotonic() - began, 3)
    return sorted(differ)


def differing(kept: ExitStack, table: Table, sink: Sink, expected: DataFrame, view: DataFrame) -> DataFrame:
    """`tree.differing`, read once; what a scan gave twice is asked for by its id."""
    wrong = persisted(kept, bucket_hashes.differing(table, expected, view))
    twice = [row["id"] for row in wrong.where("kind = 'duplicate'").select("id").limit(SUSPECTS).collect()]
    if not twice:
        return wrong
    again = bucket_hashes.differing(
        table, bucket_hashes.of(expected, twice), sink.scan(table, expected.sparkSession, twice)
    )
    return persisted(kept, wrong.where("kind <> 'duplicate'").unionByName(again))


def book(one: Comparison, wrong: DataFrame) -> None:
    """Count rows as `tree.differing` gives them, and name some."""
    counts: dict[str, int] = {}
    for kind, count in wrong.groupBy("kind").agg(F.sum("count")).collect():
        name = "extra" if kind == "duplicate" else kind
        counts[name] = counts.get(name, 0) + int(count)
    named = wrong.select("id", "kind", "column").orderBy("id").take(KNOWN) if counts else []
    one.add(counts, (Difference(key, kind, column) for key, kind, column in named))


def persisted(kept: ExitStack, frame: DataFrame) -> DataFrame:
    """The frame, computed now and once; given up together with `kept`."""
    frame = frame.persist()
    kept.callback(frame.unpersist)
    frame.count()
    return frame


def _of_buckets(reader: Reader, snapshot: Snapshot, buckets: Sequence[str]) -> DataFrame:
    chosen = sql.SQL("{} = ANY ({}::text[])").format(bucket(snapshot.table), sql.Literal(list(buckets)))
    return reader.rows(snapshot, chosen)
