"""What executors do for an audit: tell rows that can't be completed from those that can. Needs nothing but the rows."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from cdc.patch import completed

if TYPE_CHECKING:
    import pyarrow as pa


def unknown(batches: Iterator["pa.RecordBatch"]) -> Iterator["pa.RecordBatch"]:
    """The ids of those rows of `order.fold` (id, after, kept, older) that a view which is empty couldn't complete."""
    import pyarrow as pa

    for batch in batches:
        ids = [row["id"] for row in batch.to_pylist() if _lacks(row["after"], row["kept"], row["older"])]
        yield pa.RecordBatch.from_arrays([pa.array(ids, "string")], names=["id"])


def _lacks(after: str, kept: list[str], older: list[dict[str, str | list[str] | None]] | None) -> bool:
    return completed(after, kept, [(one["row"], one["kept"]) for one in older or ()]) is None  # type: ignore[misc]
