"""Make the log right about some rows: what their source holds is sent again, what it doesn't hold is deleted.

In:  what `cdc.verify` found wrong. Out: records in the table's topic, which every view applies like any other.
"""

import json
from collections.abc import Sequence

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from cdc.config.settings import Pipeline
from cdc.kafka.topics import Topics
from cdc.model import pg_types
from cdc.model.table import Table
from cdc.sink.contract import Sink
from cdc.verify import recent_changes
from cdc.verify.backfill import reemit
from cdc.verify.comparison import KNOWN, Comparison
from cdc.verify.verification import Options, look_at

INTEGERS = ("smallint", "integer", "bigint")
WRITTEN_ALIKE = (*INTEGERS, "text", "character varying", "uuid")
"""Types whose values stand in an id as they stand in a key."""


def repair(
    spark: SparkSession,
    pipeline: Pipeline,
    tables: Sequence[Table],
    sinks: Sequence[Sink],
    options: Options,
    found: Sequence[Comparison],
) -> list[Comparison]:
    """Repair what was found wrong, and look at those rows again; views with too much of it are left as they are.

    So are rows that the warehouse holds twice: a change goes to both of them. The topic gets a tombstone for each row
    that a view has and the source has not, then all of the rows as the source has them: one that came to be meanwhile
    is there in the end. The tombstones count only together with these rows (`reemit`): a repair that is ended half way
    has deleted nothing.

    Raises:
        ConnectorError: the rows didn't come in time, or a view didn't apply them.
        SourceError: the source can't be asked to send rows.
    """
    ends = list(found)
    for table in tables:
        mine = {one.sink: one for one in found if one.table == table.qualified and 0 < one.wrong < KNOWN}
        if not mine:
            continue
        ids = sorted({row.id for one in mine.values() for row in one.known})
        gone = sorted({row.id for one in mine.values() for row in one.known if row.kind == "extra"})
        with Topics(pipeline.kafka) as kafka:
            keys = _keys(spark, pipeline, table, gone)
            reemit(pipeline, kafka, table, ids, timeout_s=options.timeout_s, gone=keys)
        again = look_at(spark, pipeline, table, [one for one in sinks if one.name in mine], options, ids)
        for now in again:
            at = ends.index(mine[now.sink])
            ends[at] = mine[now.sink].after(now)
    return ends


def _keys(spark: SparkSession, pipeline: Pipeline, table: Table, ids: Sequence[str]) -> list[bytes]:
    """The keys of records of these rows: as the topic has them, or else as the connector would write them."""
    if not ids:
        return []
    wanted: DataFrame = spark.createDataFrame([(one,) for one in ids], "id string")
    listed = recent_changes.keys(spark, pipeline.kafka, table).join(F.broadcast(wanted), "id", "left_semi")
    known = {row["id"]: bytes(row["key"]) for row in listed.collect()}
    built = ((one, _written(table, one)) for one in ids if one not in known)
    return [*known.values(), *(key for _, key in built if key is not None)]


def _written(table: Table, row_id: str) -> bytes | None:
    """A key that the topic has never had; None when an id doesn't tell how the connector would write it."""
    kinds = [pg_types.base_type(table.column(name).type) for name in table.key]
    if not set(kinds) <= set(WRITTEN_ALIKE):
        return None
    try:
        parts = [row_id] if len(kinds) == 1 else json.loads(row_id)
        each = zip(kinds, parts, strict=True)
        values = [int(part) if kind in INTEGERS else str(part) for kind, part in each]
    except (TypeError, ValueError):
        return None
    return json.dumps(dict(zip(table.key, values, strict=True)), separators=(",", ":"), ensure_ascii=False).encode()
