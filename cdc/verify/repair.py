"""Repair the log for single rows.

Rows of the source are sent again, rows that the source lacks are deleted.

In:  comparisons of `cdc.verify`. Out: records in the table's topic, which every view applies like
     any other.
"""

import json
import time
from collections.abc import Sequence

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from cdc.codec.table import codec
from cdc.config.settings import Pipeline
from cdc.config.view_settings import STATE
from cdc.errors import ConnectorError
from cdc.kafka.topics import Topics
from cdc.model import pg_types
from cdc.model.table import Table
from cdc.postgres.table_survey import tables_in
from cdc.sink.contract import Sink
from cdc.sink.factory import build_state
from cdc.sink.lane import Failure
from cdc.sink.lane_run import reported_error
from cdc.verify import recent_changes
from cdc.verify.backfill import backfill
from cdc.verify.barrier import WaitOptions
from cdc.verify.comparison import MAX_DIFFERENCES, Comparison, Options
from cdc.verify.verification import TableVerification

INTEGERS = ("smallint", "integer", "bigint")
KEYS_AS_TEXT = (*INTEGERS, "text", "character varying", "uuid")
"""Types whose values have the same text in an id as in a record's key."""
POLL_S = 0.25


def repair(
    spark: SparkSession,
    pipeline: Pipeline,
    tables: Sequence[Table],
    sinks: Sequence[Sink],
    options: Options,
    comparisons: Sequence[Comparison],
) -> list[Comparison]:
    """Repair the rows that differ, and compare them again.

    Returns all comparisons, the repaired ones updated.

    A view with MAX_DIFFERENCES wrong rows or more is left as it is; so is a row that the warehouse
    holds twice, since a change goes to both copies. The topic first gets a tombstone for each row
    that the source lacks, then all rows as the source has them: a row that was inserted meanwhile
    exists in the end. Tombstones count only together with these rows (`backfill`): a repair that
    ends half way has deleted nothing. Documents are put together and sent again instead.

    Raises:
        ConnectorError: the rows didn't come in time, or a view didn't apply them.
        SourceError: the source can't send rows again.
    """
    results = list(comparisons)
    for table in tables_in([sink.name for sink in sinks], tables):
        of_table = [
            comparison
            for comparison in comparisons
            if comparison.table == table.qualified and table.is_in(comparison.sink)
        ]
        repairable = {c.sink: c for c in of_table if 0 < c.wrong < MAX_DIFFERENCES}
        if not repairable:
            continue
        differences = [row for comparison in repairable.values() for row in comparison.differences]
        ids = sorted({row.id for row in differences})
        extra_ids = sorted({row.id for row in differences if row.kind == "extra"})
        with Topics(pipeline.kafka) as kafka:
            keys = _tombstone_keys(spark, pipeline, table, ids if table.derivation else extra_ids)
            if table.derivation:
                send_documents_again(pipeline, table, keys, options.timeout_s)
            else:
                backfill(pipeline, kafka, table, ids, timeout_s=options.timeout_s, delete_keys=keys)
            repaired_sinks = [sink for sink in sinks if sink.name in repairable]
            wait = WaitOptions(options.timeout_s)
            rechecks = TableVerification(
                spark, pipeline, kafka, table, repaired_sinks, options, wait
            ).result(ids)
        for recheck in rechecks:
            comparison = repairable[recheck.sink]
            results[results.index(comparison)] = comparison.with_recheck(recheck)
    return results


def _tombstone_keys(
    spark: SparkSession, pipeline: Pipeline, table: Table, ids: Sequence[str]
) -> list[bytes]:
    """Return record keys of these rows.

    These are the keys in the topic, or else those that the connector would write.
    """
    if not ids:
        return []
    wanted = spark.createDataFrame([(row_id,) for row_id in ids], "id string")
    logged = recent_changes.keys(spark, pipeline.kafka, table)
    listed = logged.join(F.broadcast(wanted), "id", "left_semi")
    topic_keys = {row["id"]: bytes(row["key"]) for row in listed.collect()}
    built = ((row_id, _connector_key(table, row_id)) for row_id in ids if row_id not in topic_keys)
    return [*topic_keys.values(), *(key for _, key in built if key is not None)]


def _connector_key(table: Table, row_id: str) -> bytes | None:
    """Write a row's key as the connector would. None: the types of the key leave that open."""
    kinds = [pg_types.base_type(table.column(name).type) for name in table.key]
    if not set(kinds) <= set(KEYS_AS_TEXT):
        return None
    try:
        parts = [row_id] if len(kinds) == 1 else json.loads(row_id)
        pairs = zip(kinds, parts, strict=True)
        values = [int(part) if kind in INTEGERS else str(part) for kind, part in pairs]
    except (TypeError, ValueError):
        return None
    return json.dumps(
        dict(zip(table.key, values, strict=True)), separators=(",", ":"), ensure_ascii=False
    ).encode()


def send_documents_again(
    pipeline: Pipeline, view: Table, keys: Sequence[bytes], timeout_s: float
) -> None:
    """Mark the documents of these record keys as dirty, and wait until `cdc run` has sent them,
    whatever else of the view is dirty.

    Raises:
        ConnectorError: not in time. SinkUnavailable, SinkRejected: the state can't be asked.
    """
    state = build_state(pipeline).open_state()
    deadline = time.monotonic() + timeout_s
    try:
        keys_by_id = {codec(view).row_id(key): key for key in keys}
        state.mark(view.name, keys_by_id, send_again=True)
        unsent = set(keys_by_id)
        # One that has been clean was sent since, even if it is dirty again by now.
        while unsent := state.dirty_among(view.name, unsent):
            if time.monotonic() > deadline:
                raise ConnectorError(
                    f"Documents of {view.qualified} weren't sent again within {timeout_s:g} s.",
                    hint="is `cdc run` at work? then cdc -p FILE status names the slow hop",
                )
            time.sleep(POLL_S)
    except Failure as failure:
        raise reported_error(failure.kind, failure.message, {}, sink=STATE) from None
