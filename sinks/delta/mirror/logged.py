"""Which events of a repair a log of changes has already: found on the executors, by their offsets."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from cdc.sink.lane_run import freeze_gc_after
from cdc.sinks.delta.mirror.rewrite import Source, remaining_rows

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from pyspark.sql import SparkSession

LOGGED = "path string, rows binary"
"""The rows of a staged file whose events are logged: a Roaring bitmap of their numbers."""
OFFSET_BITS = 48
"""Of an offset: at a million records a second they last for nine years."""


def find_logged(
    spark: "SparkSession", staged: Sequence[str], logged: Sequence[Source], topic_id: str
) -> Mapping[str, bytes]:
    """Find the staged events that a log of changes has, in one Spark job.

    staged: locations of files; their events are few, and of one topic. logged: the log's files.
    Returns by location the bitmap of those rows, for files that have any.

    Raises:
        PySparkException: a file can't be read.
    """
    from pyroaring import BitMap64

    if not logged:
        return {}
    tasks = min(len(logged), spark.sparkContext.defaultParallelism)
    shares = [logged[task::tasks] for task in range(tasks)]
    work = freeze_gc_after(partial(_work, staged, shares, topic_id))
    found: dict[str, BitMap64] = {}
    for row in spark.range(tasks, numPartitions=tasks).mapInArrow(work, LOGGED).collect():
        rows = BitMap64.deserialize(bytes(row["rows"]))
        found[row["path"]] = found.get(row["path"], BitMap64()) | rows
    return {path: rows.serialize() for path, rows in found.items()}


def _work(
    staged: Sequence[str],
    shares: Sequence[Sequence[Source]],
    topic_id: str,
    batches: "Iterator[pa.RecordBatch]",
) -> "Iterator[pa.RecordBatch]":
    """Search the shares of a task: numbers of tasks in, LOGGED out."""
    import numpy as np
    import pyarrow as pa
    from pyroaring import BitMap64

    staged_keys = {path: np.concatenate(list(_keys(Source(path, None)))) for path in staged}
    wanted = np.concatenate(list(staged_keys.values()))
    for number in (number for batch in batches for number in batch.column("id").to_pylist()):
        keys = [
            part[np.isin(part, wanted)]
            for source in shares[number]
            for part in _keys(source, topic_id)
        ]
        present = np.concatenate(keys) if keys else np.empty(0, np.int64)
        for path, own in staged_keys.items():
            rows = np.flatnonzero(np.isin(own, present))
            if len(rows):
                bitmap = BitMap64(rows.astype(np.uint64)).serialize()
                yield pa.RecordBatch.from_pylist([{"path": path, "rows": bitmap}])


def _keys(source: Source, topic_id: str | None = None) -> "Iterator[np.ndarray]":
    """Read a file's events, each as one number for its partition and offset.

    topic_id: only the events of this topic, with the ones that name none: they are of a time when a
    log had one topic only.
    """
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    schema = pa.schema(
        [("_cdc_partition", pa.int64()), ("_cdc_offset", pa.int64()), ("_cdc_topic", pa.string())]
    )
    for events in remaining_rows(source, schema):
        topic = events["_cdc_topic"]
        is_of_topic = pc.or_kleene(pc.is_null(topic), pc.equal(topic, topic_id))
        rows = events if topic_id is None else events.filter(is_of_topic)
        partitions = rows["_cdc_partition"].to_numpy().astype(np.int64)
        yield (partitions << OFFSET_BITS) | rows["_cdc_offset"].to_numpy()
