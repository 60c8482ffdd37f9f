"""Mark all documents as dirty that were sent to their topics: tasks on the executors, which read the
topics.

Invariant: no key leaves the executors.
"""

from collections.abc import Callable, Mapping

from cdc.codec.table import codec
from cdc.errors import ConnectorError
from cdc.model.table import Table
from cdc.sink.lane import Failure
from cdc.sink.lane_task import Blocks
from cdc.views.state import State
from cdc.views.tasks.report import Report


def mark(
    open_state: Callable[[], State], tables: Mapping[str, tuple[str, Table]], blocks: Blocks
) -> bytes:
    """Mark the documents of records. Returns an encoded `Report`.

    tables: by topic, the view's name and the table of its root.
    """
    report = Report(done=True)
    try:
        state = open_state()
        for topic, _, records in blocks:
            view, table = tables[topic]
            row_id = codec(table).row_id
            state.mark(view, {row_id(key): key for key, _, _ in records if key is not None})
    except (Failure, ConnectorError) as failure:
        report.failure = failure.kind
        report.message = failure.message
    return report.encode()
