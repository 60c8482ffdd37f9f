"""Have documents sent again, as the state has them now."""

import time
from collections.abc import Sequence

from cdc.codec.table import codec
from cdc.config.settings import Pipeline
from cdc.config.view_settings import STATE
from cdc.errors import ConnectorError
from cdc.model.table import Table
from cdc.sink.factory import build_state
from cdc.sink.lane import Failure
from cdc.sink.lane_run import reported_error

POLL_S = 0.25


def send_documents_again(
    pipeline: Pipeline, view: Table, keys: Sequence[bytes], timeout_s: float
) -> None:
    """Mark the documents of these record keys as dirty, and wait until `cdc run` has sent them,
    whatever else of the view is dirty.

    Raises:
        ConnectorError: not in time. SinkUnavailable, SinkRejected: the state can't be asked.
    """
    state, deadline = build_state(pipeline).open_state()(), time.monotonic() + timeout_s
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
