"""What can go wrong, as one tree: each class has an exit code and says who can repair it.

    CdcError
    +- Unexpected           1  what nobody has met yet: a library's own exception, a bug
    +- SettingsError        2  the pipeline file or the environment
    +- StackError           3  a server of the local stack
    +- SourceError          4  Postgres: role, publication, slot, tables
    |  +- SourceUnavailable    may come back by itself: wait and try again
    |  +- AnotherServer        it isn't the one that the log is of
    +- ConnectorError       5  Kafka Connect, Debezium, topics
    |  +- KafkaUnavailable     may come back by itself: wait and try again
    +- DecodeError          6  a record that isn't what the connector writes
    +- SinkError            7  a destination
    |  +- SinkUnavailable      may come back by itself: wait and try again
    |  |  +- ReadTimeout              a view has not got as far in time as its reader asked for
    |  +- SinkRejected         won't: the view or the row has to change
    |  |  +- ValueNotRepresentable        a value that the destination has no way to hold
    |  +- Fenced               another writer moved the position: this one must stop
    +- DivergenceError      8  a view differs from its source
    +- SparkError           9  Spark itself: its memory, its process
    |  +- WorkerLost           a worker was killed: the query is started again
    +- UndecidedError      10  a view couldn't be proved equal or different
    +- Interrupted        130  by Ctrl-C

Messages say what happened and where; the hint says what to run next. Row values never appear in either.
"""


class CdcError(Exception):
    """An error that a person can act on; printed as a paragraph with its hint, without a traceback."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str, **details: object) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.details = {name: value for name, value in details.items() if value is not None}


class Unexpected(CdcError):
    """What has no class of its own; its kind and its place are told, never what it quotes."""


class SettingsError(CdcError):
    exit_code = 2


class StackError(CdcError):
    exit_code = 3


class SourceError(CdcError):
    exit_code = 4


class SourceUnavailable(SourceError):
    """Postgres can't be reached or asks for time; the same call may succeed later."""


class AnotherServer(SourceError):
    """Postgres isn't the server whose changes the topics hold: its positions can't be compared with theirs."""


class ConnectorError(CdcError):
    exit_code = 5


class KafkaUnavailable(ConnectorError):
    """The broker can't be reached or asks for time; the same call may succeed later."""


class DecodeError(CdcError):
    exit_code = 6


class SinkError(CdcError):
    exit_code = 7


class SinkUnavailable(SinkError):
    """The destination can't be reached or asks for time; the same call may succeed later."""


class ReadTimeout(SinkUnavailable):
    """A view, or the log before it, has not got as far in time as its reader asked for."""


class SinkRejected(SinkError):
    """The destination refuses for good: a mapping conflict, an oversized document, a wrong setting."""


class ValueNotRepresentable(SinkRejected):
    """A sink has no way to hold a value."""


class Fenced(SinkError):
    """The stored position isn't the one this writer left: another writer is at work on the view."""


class DivergenceError(CdcError):
    exit_code = 8


class SparkError(CdcError):
    exit_code = 9


class WorkerLost(SparkError):
    """A worker of Spark was killed in mid-task: what it was doing is done again from where the sink stands."""


class UndecidedError(CdcError):
    """Rows changed whenever they were looked at, or the view was set back: the same command may decide it later."""

    exit_code = 10


class Interrupted(CdcError):
    """Somebody has ended the command from its terminal."""

    exit_code = 130
