"""What is done about a failure, by its class."""

from cdc.errors import CdcError, Unexpected
from cdc.trace import kind, place


def unexpected(error: Exception, sink: str) -> CdcError:
    """The error itself if it has a class; otherwise by its kind and place: what it says may quote a row."""
    if isinstance(error, CdcError):
        return error
    return Unexpected(
        f"{sink} has failed: {kind(error)} in {place(error)}.",
        hint=f"its trace is in the log of `cdc run`; cdc -p FILE run --sink {sink} goes on from where the views stand",
        sink=sink,
    )
