"""Compare views with their source, row by row and column by column, while others go on writing.

In:  tables, and sinks that have views of them. Out: a `Comparison` of each view.
Invariant: rows stay with Spark's executors; only counts and keys come back, never values.

One pass over many small tables finds those that are equal (`cdc.verify.census`). Any other table is
compared by itself (`cdc.verify.table_verification`).
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from cdc.config.settings import Pipeline
from cdc.kafka.topics import Topics
from cdc.model.table import Table
from cdc.sink.contract import Sink
from cdc.verify import bucket_hashes
from cdc.verify.barrier import NO_CLOCKS, StalledViews, wait_until_current
from cdc.verify.census import equal_small_views, sample_range
from cdc.verify.comparison import Comparison, Options, View
from cdc.verify.source_rows import SourceReader, SourceSnapshot
from cdc.verify.table_verification import (
    Report,
    TableVerification,
    VerificationTask,
    differing_buckets,
    record_differences,
)

ALL_ROWS = Options()


def verify(
    spark: SparkSession,
    pipeline: Pipeline,
    tables: Sequence[Table],
    sinks: Sequence[Sink],
    options: Options = ALL_ROWS,
    *,
    report: Report = lambda _: None,
    stalled: StalledViews | None = None,
) -> list[Comparison]:
    """Wait for the views, compare them, and compare again what changed.

    Returns a comparison per table and sink. `report` is called with a sentence about each step or
    wait. With `stalled`, a view that doesn't move until somebody acts isn't waited for: its
    comparison has a problem, and the other views are compared.

    Raises:
        ConnectorError: a view isn't past the barrier in time; names the hop that is late. Without
            `stalled`, also for a view that can never get there.
        SettingsError: more keys have changed than can be compared one by one.
        SourceError, SinkError: a server can't be read.
    """
    not_awaited = wait_until_current(
        pipeline, tables, sinks, timeout_s=options.timeout_s, report=report, stalled=stalled
    )
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
            reader, pipeline.source.dsn, compared_tables, sinks, sample, report
        )
        compared |= {
            view: replace(comparison, scope=options.scope)
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
            task = VerificationTask(table, pending, options, sample, report, stalled)
            results = TableVerification(spark, pipeline, kafka, task).result()
            compared |= {(comparison.sink, comparison.table): comparison for comparison in results}
    return _in_order(compared, tables, sinks)


def verify_rows(
    spark: SparkSession,
    pipeline: Pipeline,
    table: Table,
    sinks: Sequence[Sink],
    options: Options,
    ids: Sequence[str],
) -> list[Comparison]:
    """Compare these rows of a table alone, as `verify` does."""
    with Topics(pipeline.kafka) as kafka:
        task = VerificationTask(table, sinks, options)
        return TableVerification(spark, pipeline, kafka, task).result(ids)


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
    reader = SourceReader(spark)
    compared = equal_small_views(reader, dsn, tables, sinks, None)
    for table in tables:
        if pending := _pending(table, sinks, compared):
            results = _compare_table(reader, table, dsn, pending, clocks.get(table.name))
            compared |= {(result.sink, result.table): result for result in results}
    return _in_order(compared, tables, sinks)


def _compare_table(
    reader: SourceReader, table: Table, dsn: str, sinks: Sequence[Sink], now: int | None
) -> Iterable[Comparison]:
    comparisons = {sink.name: Comparison(sink.name, table.qualified) for sink in sinks}
    with SourceSnapshot(dsn, table, now=now) as snapshot, ExitStack() as frames:
        if buckets := differing_buckets(reader, snapshot, sinks, comparisons, None):
            expected = bucket_hashes.persist(frames, reader.rows_in_buckets(snapshot, buckets))
            views = bucket_hashes.scan_buckets(sinks, table, reader.spark, buckets)
            wrong = bucket_hashes.confirmed_differences(frames, table, sinks, expected, views)
            if wrong is not None:
                for sink in sinks:
                    of_sink = wrong.where(F.col("sink") == sink.name)
                    record_differences(comparisons[sink.name], table, of_sink)
    return comparisons.values()


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
