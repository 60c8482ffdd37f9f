"""One micro-batch as a step of several views: from where each stands to where the batch ends."""

from collections.abc import Sequence

from pyspark.sql import DataFrame, SparkSession

from cdc import order
from cdc.change import Advance, Form
from cdc.sink import Batch

COMPILED = 50_000
"""Records from which expressions are compiled: a third less for each, but a merge of fewer takes twice as long."""


def large(steps: Sequence[Advance]) -> bool:
    """Whether it pays to prepare a batch of so many records at length."""
    return sum(step.offsets for step in steps) > COMPILED


def prepare(spark: SparkSession, steps: Sequence[Advance]) -> None:
    """Have the session compile what a batch of these steps is made with, if it pays."""
    spark.conf.set("spark.sql.codegen.factoryMode", "FALLBACK" if large(steps) else "NO_CODEGEN")


def make_batch(
    writer: str, form: Form, steps: Sequence[Advance], decoded: DataFrame, tasks: int, *, plain: bool = False
) -> Batch:
    """The records of a step, decoded in a sink's form, with their fold, plain or in full; lazy."""
    records = sum(step.offsets for step in steps)
    # Each table's events are picked out of all of them: one task for each picks faster than one for every partition.
    events = decoded.coalesce(1) if form == "events" and records <= order.SMALL else decoded
    return Batch(writer, tuple(steps), events, order.fold(events, form, records, tasks, plain=plain), plain)
