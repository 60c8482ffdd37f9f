"""Which events of a repair a log of changes has already: found on the executors, by their offsets."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from cdc.sinks.delta.files.failures import reading
from cdc.sinks.delta.log.vectors import bitmap
from cdc.sinks.delta.mirror.rewrite import Source, remaining_rows
from cdc.sinks.delta.mirror.tasks import run_tasks

if TYPE_CHECKING:
    import numpy as np
    from pyspark.sql import SparkSession

OFFSET_BITS = 48
"""Of an offset: at a million records a second they last for nine years."""


class Lookup(NamedTuple):
    """What is looked up in a file of the log: the events of staged files, whose locations these are."""

    logged: Source
    staged: Sequence[str]
    topic_id: str


def find_logged(
    spark: "SparkSession", staged: Sequence[str], logged: Sequence[Source], topic_id: str
) -> Mapping[str, bytes]:
    """Find the staged events that a log of changes has, in one Spark job.

    staged: locations of files; their events are few, and of one topic. logged: the log's files.
    Returns by location the bitmap of those rows, for files that have any.

    Raises:
        SinkUnavailable: a file can't be read.
    """
    found: dict[str, bytes] = {}
    lookups = [Lookup(file, staged, topic_id) for file in logged]
    for path, rows in run_tasks(spark, _look_up, lookups):
        found[path] = (bitmap(found.get(path)) | bitmap(rows)).serialize()
    return found


def _look_up(lookup: Lookup) -> Iterator[tuple[str, bytes]]:
    """Look into a file of the log: the staged files that have events of it, and the bitmaps of these."""
    import numpy as np
    from pyroaring import BitMap64

    with reading(lookup.logged.path.rpartition("/")[0]):
        present = np.concatenate([np.empty(0, np.int64), *_keys(lookup.logged, lookup.topic_id)])
        for path in lookup.staged:
            keys = np.concatenate(list(_keys(Source(path, None))))
            rows = np.flatnonzero(np.isin(keys, present))
            if len(rows):
                yield path, BitMap64(rows.astype(np.uint64)).serialize()


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
