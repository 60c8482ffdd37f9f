"""Compare views with their source, row by row and column by column, while others go on writing.

In:  tables, and sinks that have views of them. Out: a `Comparison` of each view.
Invariant: rows stay with Spark's executors; only counts and keys come back, never values.

One pass over many small tables finds those that are equal (`cdc.verify.census`). Any other table is
compared by itself. Postgres says what each document must be (`types.TypeCodec.source`), the view
says what it is. Comparing some rows takes three steps:

    1. read the end of the topic, then the view's clock if it has one; open a snapshot of the source
       and read its rows
    2. place a barrier behind that snapshot; wait until the views have passed it
    3. compare the views' rows; then read the records that the topic has got since step 1

A row that differs and has no newer record is wrong: no later change can be the reason. A row that
equals the state after one of its newer records is right: it may change more often than it can be
compared. Any other row is a suspect, and is compared again. The first comparison covers the buckets
that differ (`cdc.verify.bucket_hashes`), found in one pass over each side.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from cdc.config.settings import Pipeline
from cdc.control.control_topics import Truncations
from cdc.errors import SettingsError, UndecidedError
from cdc.kafka.topics import Topics
from cdc.model.table import Table
from cdc.postgres import source
from cdc.postgres.row_query import Sample, sample_condition
from cdc.postgres.table_survey import tables_in
from cdc.sink.contract import Expiring, Sink
from cdc.sink.factory import open_clocks
from cdc.verify import bucket_hashes, recent_changes
from cdc.verify.barrier import (
    NO_CLOCKS,
    Barrier,
    StalledViews,
    WaitOptions,
    await_barrier,
    place_barrier,
    wait_until_current,
)
from cdc.verify.census import equal_small_views, sample_range
from cdc.verify.comparison import MAX_DIFFERENCES, Comparison, Difference, Options, View
from cdc.verify.row_equality import SOURCE
from cdc.verify.source_rows import SourceReader, SourceSnapshot, open_snapshot

ALL_ROWS = Options()
MAX_ROUNDS = 5
"""Comparisons of suspects. Rows that are suspects after the last one count as undecided."""
Suspects = Mapping[str, Sequence[str]]
"""By sink, ids of rows to compare again."""
EXPIRY_CLOCKS_S = 60.0
"""How much the clocks of Postgres, of the cache and of this process may differ where rows expire."""
WRONG = "wrong"
SUSPECT = "suspect"


def verify(
    spark: SparkSession,
    pipeline: Pipeline,
    tables: Sequence[Table],
    sinks: Sequence[Sink],
    options: Options = ALL_ROWS,
    *,
    report: Callable[[str], object] = lambda _: None,
    stalled: StalledViews | None = None,
    current: Callable[[], object] = lambda: None,
) -> list[Comparison]:
    """Wait for the views, compare them, and compare again what changed.

    Returns a comparison per table and sink. `report` is called with a sentence about each step or
    wait, and `current` when the views are current, before anything is compared. With `stalled`, a view
    that doesn't move until somebody acts isn't waited for: its comparison has a problem, and the other
    views are compared.

    Raises:
        ConnectorError: a view isn't past the barrier in time; names the hop that is late. Without
            `stalled`, also for a view that can never get there.
        SettingsError: more keys have changed than can be compared one by one.
        SourceError, SinkError: a server can't be read.
    """
    tables = tables_in([sink.name for sink in sinks], tables)
    wait = WaitOptions(options.timeout_s, report=report, stalled=stalled)
    not_awaited = wait_until_current(pipeline, tables, sinks, wait)
    current()
    compared = {
        view: Comparison(*view, scope=options.scope, problem=error.message, hint=error.hint)
        for view, error in not_awaited.items()
    }
    compared_tables = [table for table in tables if _pending(table, sinks, compared)]
    # The same sample for all comparisons: rows that differ in the census must be among those
    # compared next.
    sample = sample_range(options.sample) if options.sample is not None else None
    if options.since_ms is None:
        reader = SourceReader(spark, options.rate)
        equal = equal_small_views(
            reader,
            pipeline.source.reader_dsn,
            compared_tables,
            sinks,
            sample,
            report,
            source.setting_to_read(pipeline.source),
        )
        compared |= {
            view: replace(comparison, scope=options.scope, proves=options.proves)
            for view, comparison in equal.items()
            if view not in compared
        }
    with Topics(pipeline.kafka) as kafka:
        for number, table in enumerate(tables, start=1):
            pending = _pending(table, sinks, compared)
            if not pending:
                continue
            names = ", ".join(sink.name for sink in pending)
            report(f"comparing {table.qualified} ({number} of {len(tables)}) with {names}")
            results = TableVerification(
                spark, pipeline, kafka, table, pending, options, wait, sample
            ).result()
            compared |= {(comparison.sink, comparison.table): comparison for comparison in results}
    return _in_order(compared, tables, sinks)


def compare(
    spark: SparkSession,
    tables: Sequence[Table],
    dsn: str,
    sinks: Sequence[Sink],
    clocks: Mapping[str, int] = NO_CLOCKS,
) -> list[Comparison]:
    """Compare views while nothing writes and all is applied: every difference counts.

    Returns a comparison per table and sink, in their order. `clocks`: by view, the time that its
    documents are as of.

    Raises:
        SourceError, SinkError: a server can't be read.
    """
    tables = tables_in([sink.name for sink in sinks], tables)
    reader = SourceReader(spark)
    compared = equal_small_views(reader, dsn, tables, sinks, None)
    for table in tables:
        pending = _pending(table, sinks, compared)
        if not pending:
            continue
        comparisons = {sink.name: Comparison(sink.name, table.qualified) for sink in pending}
        now = clocks.get(table.name)
        with open_snapshot(dsn, table, now=now) as snapshot, ExitStack() as frames:
            if buckets := differing_buckets(reader, snapshot, pending, comparisons, None):
                expected = bucket_hashes.persist(frames, reader.rows_in_buckets(snapshot, buckets))
                views = bucket_hashes.scan_buckets(pending, table, spark, buckets)
                wrong = bucket_hashes.confirmed_differences(frames, table, pending, expected, views)
                if wrong is not None:
                    for name, comparison in comparisons.items():
                        record_differences(comparison, table, wrong.where(F.col("sink") == name))
        compared |= {(name, table.qualified): result for name, result in comparisons.items()}
    return _in_order(compared, tables, sinks)


def _pending(
    table: Table, sinks: Sequence[Sink], compared: Mapping[View, Comparison]
) -> list[Sink]:
    """Select the sinks whose views of a table aren't compared yet."""
    return [
        sink
        for sink in sinks
        if table.is_in(sink.name) and (sink.name, table.qualified) not in compared
    ]


def _in_order(
    compared: Mapping[View, Comparison], tables: Sequence[Table], sinks: Sequence[Sink]
) -> list[Comparison]:
    return [
        compared[sink.name, table.qualified]
        for table in tables
        for sink in sinks
        if table.is_in(sink.name)
    ]


@dataclass
class TableVerification:
    """The comparison of one table with its views in several sinks. sample: the buckets of ids."""

    spark: SparkSession
    pipeline: Pipeline
    kafka: Topics
    table: Table
    sinks: Sequence[Sink]
    options: Options
    wait: WaitOptions
    sample: Sample | None = None

    def __post_init__(self) -> None:
        self._reader = SourceReader(self.spark, self.options.rate)
        self._truncations = Truncations(self.pipeline, self.kafka)
        self._comparisons = {
            sink.name: Comparison(sink.name, self.table.qualified) for sink in self.sinks
        }

    def result(self, ids: Sequence[str] | None = None) -> list[Comparison]:
        """Compare rows until nothing is suspect, at most MAX_ROUNDS times.

        None: all rows that the options select.
        """
        suspects: Suspects
        if ids is not None:
            suspects = {sink.name: ids for sink in self.sinks}
        elif self.options.since_ms is not None:
            suspects = self._changed_rows(self._changed_ids(self.options.since_ms))
        else:
            suspects = self._all_rows()
        for _ in range(MAX_ROUNDS):
            if not any(suspects.values()):
                break
            suspects = self._compare(suspects)
        for name, undecided_ids in suspects.items():
            self._comparisons[name].undecided += len(undecided_ids)
        comparisons = list(self._comparisons.values())
        if any(comparison.wrong for comparison in comparisons) and self._reads_purged_events():
            for comparison in comparisons:
                comparison.leave_out_wrong()
        return comparisons

    def _reads_purged_events(self) -> bool:
        """Whether a table that the view is made from has had events that it has no longer."""
        self._truncations.read()
        for table in self.table.derivation.events if self.table.derivation else ():
            end = self.kafka.ends([table.topic])[table.topic]
            start = self._truncations.registration.start(table.topic, end.topic_id)
            logged = recent_changes.keys(self.spark, self.pipeline.kafka, table, start)
            with self._open_snapshot(table) as snapshot:
                present = self._reader.rows(snapshot).select("id")
                if not logged.join(present, "id", "left_anti").isEmpty():
                    return True
        return False

    def _open_snapshot(
        self, table: Table, now: int | None = None
    ) -> AbstractContextManager[SourceSnapshot]:
        settings = self.pipeline.source
        setting = source.setting_to_read(settings)
        return open_snapshot(settings.reader_dsn, table, now=now, setting=setting)

    def _all_rows(self) -> Suspects:
        now = self._read_clock()
        with self._open_snapshot(self.table, now) as snapshot:
            buckets = differing_buckets(
                self._reader, snapshot, self.sinks, self._comparisons, self.sample
            )
        suspects = self._compare(None, buckets) if buckets else {}
        for name, ids in suspects.items():
            self._comparisons[name].rechecked = len(ids)
        for comparison in self._comparisons.values():
            comparison.scope = self.options.scope
            comparison.proves = self.options.proves
        return suspects

    def _changed_ids(self, since_ms: int) -> list[str]:
        """List the changed rows. Raises SettingsError for too many."""
        kafka = self.pipeline.kafka
        listed = recent_changes.ids_since(self.spark, kafka, self.table, since_ms)
        ids = [row["id"] for row in listed.limit(bucket_hashes.MAX_SUSPECTS + 1).collect()]
        if len(ids) > bucket_hashes.MAX_SUSPECTS:
            raise SettingsError(
                f"More than {bucket_hashes.MAX_SUSPECTS:,} rows of {self.table.qualified} have changed since then.",
                hint="name a later time, or leave --since out: comparing all rows is faster then",
            )
        return ids

    def _changed_rows(self, ids: Sequence[str]) -> Suspects:
        for sink in self.sinks:
            comparison = self._comparisons[sink.name]
            comparison.view_rows = (
                bucket_hashes.scan(sink, self.table, self.spark, ids).count() if ids else 0
            )
            comparison.scope = f"{len(ids)} rows that changed"
            comparison.proves = False
        return {sink.name: ids for sink in self.sinks}

    def _compare(self, suspects: Suspects | None, buckets: Sequence[str] = ()) -> Suspects:
        """Compare suspects, or else the rows of buckets.

        Record wrong rows, return those to compare again. A sink whose rows are equal isn't in it.
        """
        sinks = [sink for sink in self.sinks if suspects is None or suspects.get(sink.name)]
        ids = sorted({key for keys in suspects.values() for key in keys}) if suspects else []
        with ExitStack() as frames:
            start = self.kafka.ends([self.table.topic])[self.table.topic]
            # After the end of the topic: a document that the time changes later has a newer record.
            now = self._read_clock()
            with self._open_snapshot(self.table, now) as snapshot:
                if suspects:
                    source_rows = self._reader.rows_with_ids(snapshot, ids)
                else:
                    source_rows = self._reader.rows_in_buckets(snapshot, buckets)
                expected = bucket_hashes.persist(frames, source_rows)
            barrier = self._await_barrier(snapshot, sinks)
            sinks = [sink for sink in sinks if not self._comparisons[sink.name].problem]
            if not sinks:
                return {}
            spark = self.spark
            if suspects:
                only = {sink.name: frozenset(suspects[sink.name]) for sink in sinks}
                views = {
                    sink.name: bucket_hashes.scan(sink, self.table, spark, suspects[sink.name])
                    for sink in sinks
                }
            else:
                only = {}
                views = bucket_hashes.scan_buckets(sinks, self.table, spark, buckets)
            wrong = bucket_hashes.confirmed_differences(
                frames, self.table, sinks, expected, views, only
            )
            if wrong is None:
                return {}
            wrong = self._without_expired(frames, wrong, sinks)
            intact = [sink.name for sink in sinks if self._still_past(barrier, sink)]
            states = recent_changes.states_since(spark, self.pipeline.kafka, self.table, start)
            return self._decide(frames, wrong, states, intact)

    def _decide(
        self, frames: ExitStack, wrong: DataFrame, states: DataFrame, intact: Sequence[str]
    ) -> Suspects:
        """Record the rows without a newer record as wrong.

        Return, by sink, ids of rows that equal the state of no newer record. A view that isn't
        intact was emptied meanwhile: any difference may be due to that.
        """
        newer = states.groupBy("id").agg(F.collect_set(_state("seen")).alias("states"))
        is_right = F.array_contains("states", _state("seen")) & (F.col("kind") != "duplicate")
        verdict = (
            F.when(~F.col("sink").isin(*intact), SUSPECT)
            .when(F.col("states").isNull(), WRONG)
            .when(~is_right, SUSPECT)
        )
        judged = wrong.join(newer, "id", "left").withColumn("verdict", verdict).drop("states")
        judged = judged.where(F.col("verdict").isNotNull()).persist()
        frames.callback(judged.unpersist)
        suspects: dict[str, Sequence[str]] = {}
        for name, verdict_name, rows in judged.groupBy("sink", "verdict").count().collect():
            comparison = self._comparisons[name]
            selected = judged.where((F.col("sink") == name) & (F.col("verdict") == verdict_name))
            if verdict_name == WRONG:
                record_differences(comparison, self.table, selected)
            else:
                comparison.undecided += max(0, rows - bucket_hashes.MAX_SUSPECTS)
                listed = selected.select("id").limit(bucket_hashes.MAX_SUSPECTS).collect()
                suspects[name] = [row["id"] for row in listed]
        return suspects

    def _without_expired(
        self, frames: ExitStack, wrong: DataFrame, sinks: Sequence[Sink]
    ) -> DataFrame:
        """Leave out missing rows that may have expired by now: the views have been read before. A row of which
        the log has nothing has not expired: somebody has lost it.
        """
        for sink in sinks:
            lifetime_s = sink.lifetime_s(self.table) if isinstance(sink, Expiring) else None
            missing = wrong.where((F.col("sink") == sink.name) & (F.col("kind") == "missing"))
            if lifetime_s is None or missing.isEmpty():
                continue
            since_ms = int((time.time() - lifetime_s + EXPIRY_CLOCKS_S) * 1000)
            unchanged = recent_changes.ids_unchanged_since(
                self.spark, self.pipeline.kafka, self.table, since_ms
            )
            expired = bucket_hashes.persist(
                frames, missing.join(unchanged, "id", "left_semi").select("sink", "id")
            )
            self._comparisons[sink.name].expired += expired.count()
            wrong = wrong.join(expired, ["sink", "id"], "left_anti")
        return wrong

    def _read_clock(self) -> int | None:
        """Read the time that the view's documents depend on; None if they depend on none."""
        derivation = self.table.derivation
        if derivation is None or derivation.clock is None:
            return None
        clocks = open_clocks(self.pipeline)()
        if self.table.name not in clocks.read:
            raise UndecidedError(
                f"The documents of {self.table.name} have no clock yet.",
                hint="cdc -p FILE status: it names the slow hop; is `cdc run` at work?",
            )
        return clocks.read[self.table.name]

    def _await_barrier(self, snapshot: SourceSnapshot, sinks: Sequence[Sink]) -> Barrier:
        """Wait for the views. The comparison of a view that doesn't move gets a problem instead."""
        clocks = {} if snapshot.now is None else {self.table.name: snapshot.now}
        barrier = place_barrier(
            self.pipeline, self.kafka, [self.table], snapshot.taken_ms, self.wait, clocks
        )
        not_awaited = await_barrier(barrier, [self.table], sinks, self.wait)
        for (name, _), error in not_awaited.items():
            self._comparisons[name].problem = error.message
            self._comparisons[name].hint = error.hint
        return barrier

    def _still_past(self, barrier: Barrier, sink: Sink) -> bool:
        """Whether the view is past its barrier still.

        A TRUNCATE or a rebuild would have set it back meanwhile.
        """
        self._truncations.read()
        name = self.table.qualified
        late, stopped = barrier.sort(sink, [self.table])
        if stopped and self.wait.stalled is None:
            raise stopped[self.table]
        is_same_floor = self._truncations.floors.number(name) == barrier.floors.number(name)
        return is_same_floor and not late and not stopped


def differing_buckets(
    reader: SourceReader,
    snapshot: SourceSnapshot,
    sinks: Sequence[Sink],
    comparisons: Mapping[str, Comparison],
    sample: Sample | None,
) -> Sequence[str]:
    """Return the buckets, within the sample, that differ in any view.

    Counts the rows of each side.
    """
    table = snapshot.table
    condition = sample_condition(table, sample) if sample else None
    for sink in sinks:
        comparisons[sink.name].closed = bucket_hashes.count_closed(sink, table, reader.spark)
    views = {sink.name: bucket_hashes.scan(sink, table, reader.spark) for sink in sinks}
    source = reader.rows(snapshot, condition)
    buckets = bucket_hashes.compare_buckets(table, source, views, sample)
    for sink in sinks:
        comparison = comparisons[sink.name]
        comparison.source_rows = buckets.rows[SOURCE]
        comparison.source_s = round(buckets.seconds[SOURCE], 3)
        comparison.view_rows = buckets.rows[sink.name]
        comparison.view_s = round(buckets.seconds[sink.name], 3)
    return buckets.differing


def _state(column: str) -> Column:
    """The hash of a row's state, which is never negative, or -1 where there is no row."""
    return F.coalesce(F.col(column), F.lit(-1))


def record_differences(comparison: Comparison, table: Table, wrong: DataFrame) -> None:
    """Count differing rows by kind, and add some of them to the comparison. Events that only the view
    has are counted as purged.
    """
    if table.events:
        comparison.purged += wrong.where("kind = 'extra'").count()
        wrong = wrong.where("kind <> 'extra'")
    counts: dict[str, int] = {}
    for kind, count in wrong.groupBy("kind").agg(F.sum("count")).collect():
        name = "extra" if kind == "duplicate" else kind
        counts[name] = counts.get(name, 0) + int(count)
    examples = (
        wrong.select("id", "kind", "column").orderBy("id").take(MAX_DIFFERENCES) if counts else []
    )
    comparison.add(counts, (Difference(key, kind, column) for key, kind, column in examples))
