"""Compare views with their source, row by row and column by column, while others go on writing.

In:  tables, and sinks that have views of them. Out: a `Comparison` of each view.
Invariant: rows stay with Spark's executors; only counts and keys come back, never values.

One pass over many small tables finds those that are equal (`cdc.verify.census`). Any other table is
compared by itself (`cdc.verify.table_verification`).
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from cdc.config.settings import Pipeline
from cdc.kafka.topics import Topics
from cdc.model.table import Table
from cdc.sink.contract import Sink
from cdc.verify import bucket_hashes
from cdc.verify.barrier import NO_CLOCKS, StalledViews, WaitOptions, wait_until_current
from cdc.verify.census import equal_small_views, sample_range
from cdc.verify.comparison import Comparison, Options, View
from cdc.verify.source_rows import SourceReader, open_snapshot
from cdc.verify.table_verification import (
    TableVerification,
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
    report: Callable[[str], object] = lambda _: None,
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
    wait = WaitOptions(options.timeout_s, report=report, stalled=stalled)
    not_awaited = wait_until_current(pipeline, tables, sinks, wait)
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
            results = TableVerification(
                spark, pipeline, kafka, table, pending, options, wait, sample
            ).result()
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
        wait = WaitOptions(options.timeout_s)
        return TableVerification(spark, pipeline, kafka, table, sinks, options, wait).result(ids)


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
