"""Errors as one tree: each class has an exit code and says who can repair it.

    CdcError
    +- Unexpected           1  no class of its own: a library's exception, a bug
    +- SettingsError        2  the pipeline file or the environment
    +- SecretUnreadable     2  a file with a secret: it is read again at the next connection
    +- StackError           3  a server of the local stack
    +- SourceError          4  Postgres: role, publication, slot, tables
    |  +- SourceUnavailable    may come back by itself: wait and try again
    |  +- TableRefused         a table can't be captured as it is
    |  +- AnotherServer        not the server whose changes the topics hold
    +- ConnectorError       5  Kafka Connect, Debezium, topics
    |  +- KafkaUnavailable     may come back by itself: wait and try again
    |  |  +- RecordRefused            it is larger than its topic takes, since a setting was lowered
    |  |  +- LogUnread                records that are there aren't handed over
    |  +- KafkaForbidden       the broker's ACLs don't allow it: until somebody changes them
    |  +- RecordsGone          the log no longer holds what a view needs
    |  +- TopicMissing         until it is created or recreated
    +- DecodeError          6  a record that the connector can't have written
    +- SinkError            7  a destination
    |  +- SinkUnavailable      may come back by itself: wait and try again
    |  |  +- SinkBlocked              a block keeps writes away: they wait until it is lifted
    |  |  +- ReadTimeout              a view isn't as far as its reader asked for, within its timeout
    |  +- SinkRejected         for good: the view or the row has to change
    |  |  +- ValueNotRepresentable        a value that the destination has no way to hold
    |  +- SinkPaused           by `cdc pause`: nothing is applied until `cdc resume`
    |  +- Fenced               another writer moved the position: this one must stop
    +- DivergenceError      8  a view differs from its source
    +- SparkError           9  Spark itself: its memory, its process
    |  +- WorkerLost           a worker was killed: the stream is restarted
    +- UndecidedError      10  a view couldn't be proved equal or different
    +- Interrupted        130  by Ctrl-C

Messages say what happened and where; the hint says what to run next. Row values never appear in
either.
"""

from typing import Any


class CdcError(Exception):
    """An error that a person can act on; printed as a paragraph with its hint, without a
    traceback.
    """

    exit_code = 1
    finding_key: str | None = None
    """The key of the finding that `cdc doctor` or `cdc status` would make of it, where there is
    one: `cdc.model.finding_codes`.
    """

    def __init__(
        self, message: str, *, hint: str, finding_key: str | None = None, **details: Any
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.finding_key = finding_key or type(self).finding_key
        self.details: dict[str, Any] = {
            name: value for name, value in details.items() if value is not None
        }


class Unexpected(CdcError):
    """An error without a class of its own. Its kind and place are shown, never the values it
    quotes.
    """


class SettingsError(CdcError):
    """The pipeline file, an option or the environment is wrong."""

    exit_code = 2


class SecretUnreadable(CdcError):
    """A file that the pipeline file refers to can't be read, or lacks what is looked for."""

    exit_code = 2


class StackError(CdcError):
    """A server of the local stack can't be fetched, started or stopped."""

    exit_code = 3


class SourceError(CdcError):
    """Postgres lacks something: a role, a privilege, a publication, a slot, a table that can be
    captured.
    """

    exit_code = 4


class SourceUnavailable(SourceError):
    """Postgres can't be reached or asks for time; the same call may succeed later."""

    finding_key = "source-unreachable"


class TableRefused(SourceError):
    """A table can't be captured, or not as it is or as the pipeline file names it."""

    finding_key = "table-refused"


class AnotherServer(SourceError):
    """Postgres isn't the server whose changes the topics hold: its positions can't be compared with
    theirs.
    """

    finding_key = "another-server"


class ConnectorError(CdcError):
    """Kafka Connect, the connector or a topic isn't as the pipeline needs it."""

    exit_code = 5
    kind = "refused"
    """What executors report it as: see `cdc.sink.remedy.REPORTED`."""


class KafkaUnavailable(ConnectorError):
    """The broker can't be reached or asks for time; the same call may succeed later."""

    finding_key = "kafka-unreachable"
    kind = "broker"


class RecordRefused(KafkaUnavailable):
    """A topic takes no record as large as this one: its setting was lowered, and the same call succeeds
    once it is restored.
    """

    finding_key = "setting-differs/max.message.bytes"
    kind = "topic"


class LogUnread(KafkaUnavailable):
    """The broker doesn't hand over records of a partition. It may be away, or the topic may be."""

    kind = "unread"


class KafkaForbidden(ConnectorError):
    """The broker's ACLs don't let the pipeline use a topic or another resource."""

    kind = "unauthorized"


class RecordsGone(ConnectorError):
    """The log no longer holds records that a view needs, or it is another topic's."""

    kind = "gone"


class TopicMissing(ConnectorError):
    """A topic isn't there, perhaps while it is renewed; the same call succeeds once it is created."""

    finding_key = "topic-missing"


class DecodeError(CdcError):
    """A record can't be decoded."""

    exit_code = 6


class SinkError(CdcError):
    """A destination has failed."""

    exit_code = 7


class SinkUnavailable(SinkError):
    """The destination can't be reached or asks for time; the same call may succeed later."""


class SinkBlocked(SinkUnavailable):
    """The destination has a block on writes, which it, an operator or a promotion has set."""


class ReadTimeout(SinkUnavailable):
    """A view, or the log before it, hasn't reached the token within the reader's timeout."""


class HeldUp(SinkUnavailable):
    """A job that several sinks share takes too long, or fails. Whose fault that is isn't known, so it is
    not reported: the batch of each sink is repeated without the others.
    """


class SinkRejected(SinkError):
    """The destination refuses for good: a mapping conflict, an oversized document, a wrong
    setting.
    """


class ValueNotRepresentable(SinkRejected):
    """The destination has no representation for a value."""


class SinkPaused(SinkError):
    """The sink is paused by a person: nothing is applied to it until it is resumed."""


class Fenced(SinkError):
    """The stored position isn't the one this writer left: another writer is at work on the view, so
    this one stops.
    """


class DivergenceError(CdcError):
    """A view differs from its source, or the log can no longer make it."""

    exit_code = 8


class SparkError(CdcError):
    """Spark has failed: its memory, its process."""

    exit_code = 9


class WorkerLost(SparkError):
    """A Spark worker was killed during a task: the stream restarts from the sink's position."""


class UndecidedError(CdcError):
    """Rows changed at every comparison, or the view was set back: the same command may decide it
    later.
    """

    exit_code = 10


class Interrupted(CdcError):
    """The command was interrupted from its terminal."""

    exit_code = 130
