"""Compare the topics of views with documents that joins of Spark make of the tables' topics.

`cdc run` keeps documents current change by change: by indexes, marks, and climbing from a changed row
to its documents. Here all rows are folded and joined at once. Both put a document together in the
same way (`assemble`), which `cdc verify` compares with Postgres' own query.

In:  a `Vector`: views, and the moment of the log that their documents are of. So nothing has to stand
still. Views of one moment are compared together, others one after another.
Out: a `Comparison` per view.
Invariant: neither Postgres nor a sink is asked; rows stay with the executors. A record that can't be
decoded is left out, as sinks put it aside.
"""

from collections.abc import Iterator, Sequence
from functools import partial, reduce
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, cast

from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from cdc.audit.documents.batch_state import BatchState, parse_entries
from cdc.audit.documents.rows import COLUMNS, ROWS, RowCollector, fold
from cdc.audit.documents.vectors import Vector
from cdc.codec.members import members
from cdc.codec.table import codec
from cdc.config.settings import Pipeline
from cdc.model.outcome import Advance
from cdc.model.table import Table
from cdc.sink.lane import Lane
from cdc.sink.lane_run import freeze_gc_after
from cdc.sink.rejection import Skip
from cdc.spark.kafka_source import read_until
from cdc.verify.comparison import SAMPLE, Comparison, Difference
from cdc.views.assemble import assemble
from cdc.views.plan import Node, StatePlan, Values, View, is_key
from cdc.views.rows import LISTING, TALLY, StoredRow
from cdc.views.state import State
from cdc.views.tables import view_table

if TYPE_CHECKING:
    import pyarrow as pa

PLACE = "topic"
"""What stands in the place of a sink's name in a comparison."""
ENTRIES = "table string, name string, text string, id string"
DIGESTS = "id string, digest binary"
ROWS_A_TASK = 50_000
SLICE = 1000
"""Documents that are put together at once."""


def compare_documents(
    spark: SparkSession, pipeline: Pipeline, vector: Vector
) -> Iterator[Comparison]:
    """Make the documents of each view of the vector, and compare them with its topic."""
    plan = vector.plan
    folded = partial(_folded, spark, pipeline.kafka, vector)
    rows = folded(plan.tables).persist(StorageLevel.DISK_ONLY)
    try:
        joins = _Joins(rows, plan)
        for view in plan.views:
            computed = joins.documents(view)
            emitted = folded([view_table(pipeline, view)]).mapInArrow(_digest_rows, DIGESTS)
            yield _compare(view, computed, emitted)
    finally:
        rows.unpersist()


def _folded(
    spark: SparkSession, bootstrap: str, vector: Vector, tables: Sequence[Table]
) -> DataFrame:
    ends = {table.topic: vector.positions[table.topic] for table in tables}
    advances = tuple(Advance(table, None, ends[table.topic]) for table in tables)
    lane = Lane(advances, vector.reading, RowCollector(), Skip())
    records = read_until(spark, bootstrap, ends).select(*COLUMNS)
    return records.mapInArrow(freeze_gc_after(partial(fold, lane, vector.plan)), ROWS)


class _Joins:
    """Joins the rows of tables from the root of a view down to its last child."""

    def __init__(self, rows: DataFrame, plan: StatePlan) -> None:
        self._rows, self._plan = rows, plan
        self._entries = rows.mapInArrow(_split_entries, ENTRIES)
        self._tasks = rows.count() // ROWS_A_TASK + 2

    def documents(self, view: View) -> DataFrame:
        """Make the documents of a view: DIGESTS."""
        roots = self._ids(view.root.table).select("id", F.col("id").alias("root"))
        used = [*self._descend(view.root, roots), self._named(view.root, roots)]
        places = reduce(DataFrame.union, used).distinct()
        inputs = places.join(self._rows, ["table", "id"]).repartition(self._tasks, "root")
        task = freeze_gc_after(partial(_assemble, self._plan, view))
        return inputs.select("root", "table", "id", "key", "head", "row").mapInArrow(task, DIGESTS)

    def _descend(self, node: Node, reached: DataFrame) -> Iterator[DataFrame]:
        """Yield the rows below a node that the documents need: root, table, id. `reached`: rows of
        the node, by root.
        """
        for child in node.children:
            assert child.join is not None
            texts = reached.join(self._texts(node.table, child.join.parent), "id")
            texts = texts.select("root", "text").distinct()
            matching = reduce(DataFrame.union, self._children(child))
            children = texts.join(matching, "text").select("id", "root").distinct()
            yield self._named(child, children)
            yield from self._descend(child, children)

    def _children(self, node: Node) -> Iterator[DataFrame]:
        """Yield the rows of a node by the text that they are joined by: text, id."""
        name = node.table.qualified
        assert node.join is not None
        if node.tally is not None:
            yield self._entries_of(
                node.table, f"{TALLY}{self._plan.tallies[name].index(node.tally)}"
            )
        for listing in (*([node.listing] if node.listing else []), *node.extremes.values()):
            number = self._plan.listings[name].index(listing)
            yield self._entries_of(node.table, f"{LISTING}{number}")
        if not node.many:
            yield self._texts(node.table, node.join.child)

    def _texts(self, table: Table, values: Values) -> DataFrame:
        """The text of values of each row: text, id."""
        if is_key(table, values):
            return self._ids(table).select(F.col("id").alias("text"), "id")
        return self._entries_of(table, str(self._plan.slots[table.qualified].index(values)))

    def _entries_of(self, table: Table, name: str) -> DataFrame:
        entries = self._entries.where((F.col("table") == table.qualified) & (F.col("name") == name))
        return entries.select("text", "id")

    def _ids(self, table: Table) -> DataFrame:
        return self._rows.where(F.col("table") == table.qualified).select("id")

    @staticmethod
    def _named(node: Node, rows: DataFrame) -> DataFrame:
        return rows.select("root", F.lit(node.table.qualified).alias("table"), "id")


def _split_entries(batches: "Iterator[pa.RecordBatch]") -> "Iterator[pa.RecordBatch]":
    import pyarrow as pa

    for batch in batches:
        values = (batch.column(name).to_pylist() for name in ("table", "id", "head"))
        entries = [
            (table, entry.name, entry.text, row_id)
            for table, row_id, head in zip(*values, strict=True)
            for entry in parse_entries(head)
        ]
        columns = [pa.array([entry[place] for entry in entries], pa.string()) for place in range(4)]
        yield pa.RecordBatch.from_arrays(columns, ["table", "name", "text", "id"])


def _assemble(
    plan: StatePlan, view: View, batches: "Iterator[pa.RecordBatch]"
) -> "Iterator[pa.RecordBatch]":
    """Put documents together from the rows of their roots, which are in one task."""
    state, roots = BatchState(), set[str]()
    for batch in batches:
        for root, table, member, key, head, row in zip(
            *(column.to_pylist() for column in batch.columns), strict=True
        ):
            state.add(table, member, StoredRow(head.encode(), key, row))
            roots.add(root)
    ids, row_id = sorted(roots), codec(view.root.table).row_id
    for start in range(0, len(ids), SLICE):
        # What `assemble` asks for is there; what the engine asks for isn't.
        documents = assemble(plan, cast("State", state), view, ids[start : start + SLICE]).documents
        yield _digests(
            [
                (row_id(document.key), document.row)
                for document in documents
                if document.row is not None
            ]
        )


def _digest_rows(batches: "Iterator[pa.RecordBatch]") -> "Iterator[pa.RecordBatch]":
    for batch in batches:
        ids, rows = batch.column("id").to_pylist(), batch.column("row").to_pylist()
        yield _digests(list(zip(ids, rows, strict=True)))


def _digests(documents: Sequence[tuple[str, bytes]]) -> "pa.RecordBatch":
    """Hash documents member by member, whatever their order."""
    import pyarrow as pa

    digests = []
    for _, row in documents:
        digest = blake2b(digest_size=16)
        for name, value in sorted(members(row).items()):
            digest.update(b"%b:%b\n" % (name.encode(), bytes(value)))
        digests.append(digest.digest())
    ids = pa.array([row_id for row_id, _ in documents], pa.string())
    return pa.RecordBatch.from_arrays([ids, pa.array(digests, pa.binary())], ["id", "digest"])


def _compare(view: View, computed: DataFrame, emitted: DataFrame) -> Comparison:
    """Compare by id: `source_rows` counts documents that were computed, `view_rows` those of the topic."""
    pairs = computed.withColumnRenamed("digest", "computed").join(
        emitted.withColumnRenamed("digest", "emitted"), "id", "full_outer"
    )
    kind = (
        F.when(F.col("emitted").isNull(), "missing")
        .when(F.col("computed").isNull(), "extra")
        .when(F.col("computed") != F.col("emitted"), "different")
        .otherwise("equal")
    )
    kinds = pairs.select("id", kind.alias("kind")).persist(StorageLevel.DISK_ONLY)
    try:
        counts: dict[str, Any] = {
            row["kind"]: row["count"] for row in kinds.groupBy("kind").count().collect()
        }
        wrong = kinds.where("kind <> 'equal'").orderBy("id").limit(SAMPLE).collect()
    finally:
        kinds.unpersist()
    equal, different = counts.pop("equal", 0), counts.get("different", 0)
    comparison = Comparison(PLACE, f"view.{view.name}")
    comparison.source_rows = equal + different + counts.get("missing", 0)
    comparison.view_rows = equal + different + counts.get("extra", 0)
    comparison.add(counts, [Difference(row["id"], row["kind"]) for row in wrong])
    return comparison
