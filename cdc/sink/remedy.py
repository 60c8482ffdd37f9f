"""Remedies: what is done about a failure, in one table by the class of the error.

In:  any exception. Out: an error with a class, and its remedy.
Spark reports failures inside it as text only; `cdc.spark.failures` gives them their class first.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from enum import StrEnum

import psycopg

from cdc.errors import (
    CdcError,
    ConnectorError,
    DecodeError,
    Fenced,
    KafkaForbidden,
    KafkaUnavailable,
    LogUnread,
    RecordRefused,
    RecordsGone,
    SecretUnreadable,
    SettingsError,
    SinkBlocked,
    SinkError,
    SinkRejected,
    SinkUnavailable,
    SourceError,
    SourceUnavailable,
    SparkError,
    TopicMissing,
    Unexpected,
    ValueNotRepresentable,
    WorkerLost,
)
from cdc.model.trace import kind, place
from cdc.sink.contract import PositionLost, RowsRejected, SchemaMismatch


class Remedy(StrEnum):
    """What is done about a failure."""

    RETRY = "retry"
    """Repeat the same step after a pause, for as long as it takes.

    Positions say what is still to do.
    """
    RESTART = "restart"
    """Restart the stream from the sink's positions; stop if it keeps failing so: `Patience`."""
    STOP = "stop"
    """End the sink's stream and say why: trying again would change nothing, or would do harm."""


REMEDIES: Mapping[type[BaseException], Remedy] = {
    # A destination that is away, busy or failing over; one that has gone back by itself; one that
    # refuses.
    SinkUnavailable: Remedy.RETRY,
    SinkBlocked: Remedy.RETRY,
    PositionLost: Remedy.RESTART,
    SinkRejected: Remedy.STOP,
    Fenced: Remedy.STOP,
    SinkError: Remedy.STOP,
    # A broker that is away; a topic that is being renewed; what a broker answers that won't change: not
    # allowed, records gone.
    KafkaUnavailable: Remedy.RETRY,
    RecordRefused: Remedy.RETRY,
    TopicMissing: Remedy.RETRY,
    # A start finds out whether the topic is still there.
    LogUnread: Remedy.RESTART,
    # A start refuses the views that the log can't continue; the others go on.
    RecordsGone: Remedy.RESTART,
    ConnectorError: Remedy.STOP,
    KafkaForbidden: Remedy.STOP,
    # Postgres that is away while tables are described; what it says about them.
    SourceUnavailable: Remedy.RETRY,
    SourceError: Remedy.STOP,
    # A Python worker or an executor that was killed; Spark itself.
    WorkerLost: Remedy.RESTART,
    SparkError: Remedy.STOP,
    # Single records, where `on_error` is to stop: not what the connector writes, not what a view
    # can hold or take.
    DecodeError: Remedy.STOP,
    ValueNotRepresentable: Remedy.STOP,
    RowsRejected: Remedy.STOP,
    # A view for other columns: its table is set aside (`SinkViews.load`); where that isn't possible,
    # nothing else helps.
    SchemaMismatch: Remedy.STOP,
    SettingsError: Remedy.STOP,
    # A file that is exchanged at this moment.
    SecretUnreadable: Remedy.RETRY,
    Unexpected: Remedy.STOP,
    BaseException: Remedy.STOP,
}
"""By class; a class that isn't listed has the remedy of its nearest listed base class."""

REPORTED: Mapping[str, type[CdcError]] = {
    **dict.fromkeys(("unavailable", "expired", "lapsed", "name", "shut"), SinkUnavailable),
    "unreadable": SecretUnreadable,
    "blocked": SinkBlocked,
    **dict.fromkeys(
        (
            "rejected",
            "forbidden",
            "login",
            "misplaced",
            "clustered",
            "unclustered",
            "stranger",
            "oversized",
            "rekeyed",
        ),
        SinkRejected,
    ),
    **dict.fromkeys(("trust", "certificate", "client", "plain"), SinkRejected),
    **dict.fromkeys(("sentinel", "service"), SinkRejected),
    "fenced": Fenced,
    "rewound": PositionLost,
    **{
        error.kind: error
        for error in (
            ConnectorError,
            KafkaUnavailable,
            RecordRefused,
            LogUnread,
            KafkaForbidden,
            RecordsGone,
        )
    },
}
"""Error classes by the kind that executors report: an exception would lose its class on the way."""

MAX_REPEATS = 5
"""How often the very same failure may come back without progress before the stream stops."""
PASSING_STATES = ("08", "40", "53", "55", "57")
"""SQLSTATE classes that pass: connection, rollback, resources, object in use, operator's
intervention.
"""


def remedy(error: BaseException) -> Remedy:
    """Look up what is done about an error: by the narrowest of its classes that the table lists."""
    return next(REMEDIES[cls] for cls in type(error).__mro__ if cls in REMEDIES)


def classify(error: Exception, part: str, following: str = "the same command") -> CdcError:
    """Return the error itself if it has a class of ours; otherwise classify it by its type.

    Its text is never used, since it may quote a row.

    part: who failed, a sink or a verb; following: the command that goes on.
    """
    if isinstance(error, CdcError):
        return error
    if isinstance(error, psycopg.Error):
        return _of_postgres(error)
    return Unexpected(
        f"{part} has failed: {kind(error)} in {place(error)}.",
        hint=f"{following}: it goes on from where the views stand; the log has the trace",
        part=part,
    )


def exhausted(error: CdcError) -> CdcError:
    """Build the same error with the remark that it has come back too often."""
    if remedy(error) is not Remedy.RESTART:
        return error
    return type(error)(
        f"{error.message} That is {MAX_REPEATS} times without any progress.",
        hint=error.hint,
        finding_key=error.finding_key,
        **error.details,
    )


def _of_postgres(error: psycopg.Error) -> SourceError:
    state = error.sqlstate
    if state is None and isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
        return SourceUnavailable(
            "Postgres went away while it was asked.", hint="no action needed: it is asked again"
        )
    name = type(error).__name__
    if state and state.startswith(PASSING_STATES):
        return SourceUnavailable(
            f"Postgres can't answer now: {name} ({state}).", hint="look at the server's log"
        )
    if isinstance(error, psycopg.errors.InsufficientPrivilege):
        # Its text names objects, and no values.
        return SourceError(
            f"Postgres refuses: {error.diag.message_primary or name}.",
            hint="cdc -p FILE doctor names the right that is missing, and cdc -p FILE migrate grants it",
        )
    return SourceError(f"Postgres refuses: {name} ({state}).", hint="the server's log says more")


@dataclass
class Patience:
    """Counts how often the same failure comes back without progress in between.

    A restart isn't repeated for ever.
    """

    count: int = 0
    _failure: tuple[type[BaseException], str] | None = None
    _reached: Hashable = None

    def meet(self, error: BaseException, reached: Hashable) -> bool:
        """Count a failure at a position; returns whether the step may be tried again."""
        failure = type(error), str(error)
        self.count = self.count + 1 if (failure, reached) == (self._failure, self._reached) else 1
        self._failure = failure
        self._reached = reached
        action = remedy(error)
        return action is Remedy.RETRY or (action is Remedy.RESTART and self.count < MAX_REPEATS)
