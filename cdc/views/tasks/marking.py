"""Mark documents as dirty that their topics have been told: one task, on the executors that read the
topics.

In:  records of views' topics. Out: a `Report` for each part of them.
Invariant: no key leaves the executors.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from cdc.codec.table import codec
from cdc.model.table import Table
from cdc.sink.lane import Failure
from cdc.views.state import State
from cdc.views.tasks.report import Report

if TYPE_CHECKING:
    import pyarrow as pa

REPORT = "report binary"
"""The columns of the result, as Spark writes them."""


class Marking:
    """Marks the documents of records as dirty. Can be pickled.

    tables: by topic, the view's name and the table of its root.
    """

    def __init__(
        self, open_state: Callable[[], State], tables: Mapping[str, tuple[str, Table]]
    ) -> None:
        self._open_state, self._tables = open_state, tables

    def run(self, batches: "Iterator[pa.RecordBatch]") -> "Iterator[pa.RecordBatch]":
        """Run as a task of Spark over records: topic string, key binary."""
        import pyarrow as pa

        report, state = Report(done=True), self._open_state()
        try:
            for batch in batches:
                keys: dict[str, dict[str, bytes]] = {}
                for topic, key in zip(
                    *(column.to_pylist() for column in batch.columns), strict=True
                ):
                    view, table = self._tables[topic]
                    keys.setdefault(view, {})[codec(table).row_id(key)] = key
                for view, keys_by_id in keys.items():
                    state.mark(view, keys_by_id)
        except Failure as failure:
            report.failure, report.message = failure.kind, failure.message
        yield pa.RecordBatch.from_arrays([pa.array([report.encode()], "binary")], names=["report"])
