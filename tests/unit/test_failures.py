"""What is done about a failure: the table, and how text of Spark's gets its class back."""

import threading
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from py4j.protocol import Py4JNetworkError
from pyspark.errors import PySparkException

from cdc import errors
from cdc.apply.machine import ControlState, Reason, Restart, ResumePlan
from cdc.apply.stream import Recovery
from cdc.errors import (
    CdcError,
    ConnectorError,
    DecodeError,
    Fenced,
    KafkaUnavailable,
    SinkRejected,
    SinkUnavailable,
    SourceError,
    SourceUnavailable,
    SparkError,
    Unexpected,
    WorkerLost,
)
from cdc.model.table import Column, Table
from cdc.sink.contract import PositionLost, RowsRejected, SchemaMismatch
from cdc.sink.promotion import GenerationReplaced
from cdc.sink.remedy import (
    MAX_REPEATS,
    REMEDIES,
    REPORTED,
    Patience,
    Remedy,
    classify,
    exhausted,
    remedy,
)
from cdc.spark.failures import explain
from tests.support.simulated import SimulatedClock

TABLE = Table("public", "orders", (Column("id", "integer"),), ("id",), "shop.public.orders")
SECRET = "hunter2-a-row"
KILLED = (
    "Job aborted due to stage failure: Task 1 in stage 7.0 failed 1 times, most recent failure: Lost task 1.0 in stage"
    f" 7.0 (TID 21) (127.0.0.1 executor driver): org.apache.spark.SparkException: {{}} {SECRET}"
)
KILLED_AT_ITS_START = """java.io.EOFException
\tat java.base/java.io.DataInputStream.readInt(DataInputStream.java:398)
\tat org.apache.spark.api.python.PythonWorkerFactory.createWorker$1(PythonWorkerFactory.scala:153)"""


def error_of(kind: type[CdcError]) -> CdcError:
    return kind("It failed.", hint="h")


RETRIED: list[type[CdcError]] = [SinkUnavailable, KafkaUnavailable, SourceUnavailable]
RETRIED += [errors.ReadTimeout, errors.RecordRefused, errors.TopicMissing]
STOPPING: list[type[CdcError]] = [SinkRejected, Fenced, ConnectorError, SourceError, SparkError]
STOPPING += [DecodeError, Unexpected, errors.SinkError, errors.SettingsError, CdcError]
STOPPING += [errors.ValueNotRepresentable]
OTHERS = (
    GenerationReplaced("public.orders", "g1", "cache"),
    RowsRejected({("t", "1"): "too long"}, "cache"),
    SchemaMismatch(TABLE, "cache"),
    ValueError("x"),
    KeyboardInterrupt(),
)


@pytest.mark.parametrize(
    ("error", "action"),
    [
        *((error_of(kind), Remedy.RETRY) for kind in RETRIED),
        *((error_of(kind), Remedy.RESTART) for kind in (PositionLost, WorkerLost)),
        *((error_of(kind), Remedy.STOP) for kind in STOPPING),
        *((error, Remedy.STOP) for error in OTHERS),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else str(value),
)
def test_each_failure_has_its_remedy(error: BaseException, action: Remedy) -> None:
    assert remedy(error) is action


def test_every_class_of_error_is_in_the_table_or_beneath_one_that_is() -> None:
    kinds = [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, CdcError)
    ]
    # Of a stream: what only verbs raise ends them.
    of_verbs = {
        errors.StackError,
        errors.DivergenceError,
        errors.UndecidedError,
        errors.Interrupted,
    }
    verbs = {CdcError, *of_verbs}
    bare = [
        kind for kind in kinds if kind not in verbs and not set(kind.__mro__[:-3]) & REMEDIES.keys()
    ]
    assert bare == []


def test_what_executors_report_passes_or_not_by_its_class() -> None:
    words: dict[Remedy, set[str]] = {}
    for word, kind in REPORTED.items():
        words.setdefault(REMEDIES[kind], set()).add(word)
    assert words == {
        Remedy.RETRY: {
            *("unavailable", "expired", "lapsed", "name", "shut", "unreadable", "blocked"),
            *("broker", "topic"),
        },
        Remedy.RESTART: {"rewound", "unread", "gone"},
        Remedy.STOP: {
            *(
                "rejected",
                "forbidden",
                "misplaced",
                "clustered",
                "unclustered",
                "stranger",
                "oversized",
                "rekeyed",
                "trust",
            ),
            *("login", "certificate", "client", "plain", "fenced", "unauthorized", "refused"),
            *("sentinel", "service"),
        },
    }


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (KILLED.format("Python worker exited unexpectedly (crashed)"), WorkerLost),
        (KILLED.format("Python worker exited unexpectedly (crashed). Consider setting"), WorkerLost),
        ("Job aborted: ExecutorLostFailure (executor 1 exited caused by one of the running tasks)", WorkerLost),
        ("Lost executor: Executor heartbeat timed out after 123456 ms", WorkerLost),
        (KILLED.format(KILLED_AT_ITS_START), WorkerLost),
        ("java.lang.OutOfMemoryError: Java heap space", SparkError),
        ("PythonException: ModuleNotFoundError: No module named 'confluent_kafka'", SparkError),
        ('java.io.IOException: Cannot run program "/opt/cdc/bin/python": error=2', SparkError),
        ("[PYTHON_VERSION_MISMATCH] Python in worker has different version: 3.9", SparkError),
        ("[CAST_INVALID_INPUT] The value 'x' of the type", errors.SinkError),
        ("what nobody has seen", errors.SinkError),
    ],
)  # fmt: skip
def test_text_of_spark_gets_its_class_back(text: str, kind: type[CdcError]) -> None:
    error = explain(PySparkException(f"{text} {SECRET}"), "cache")
    assert type(error) is kind
    assert SECRET not in error.message + error.hint


def test_spark_that_does_not_answer_is_no_sink_that_fails() -> None:
    assert type(explain(Py4JNetworkError("An error occurred"), "cache")) is SparkError


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (psycopg.OperationalError(f"connection to {SECRET} lost"), SourceUnavailable),
        (psycopg.errors.AdminShutdown("terminating"), SourceUnavailable),
        (psycopg.errors.TooManyConnections("full"), SourceUnavailable),
        (psycopg.errors.QueryCanceled("slow"), SourceUnavailable),
        (psycopg.errors.InsufficientPrivilege(SECRET), SourceError),
        (psycopg.errors.UndefinedTable(SECRET), SourceError),
        (ValueError(SECRET), Unexpected),
        (KeyError(SECRET), Unexpected),
        (SinkUnavailable("Away.", hint="h"), SinkUnavailable),
    ],
)
def test_what_libraries_raise_gets_a_class_and_quotes_nothing(
    error: Exception, kind: type[CdcError]
) -> None:
    result = classify(error, "cache")
    assert type(result) is kind
    assert SECRET not in result.message + result.hint


def test_what_may_pass_is_tried_for_ever_what_may_not_a_few_times() -> None:
    away, lost = error_of(SinkUnavailable), error_of(WorkerLost)
    assert all(Patience().meet(away, 1) for _ in range(100))
    patience = Patience()
    met = [patience.meet(lost, 1) for _ in range(MAX_REPEATS)]
    assert met == [True] * (MAX_REPEATS - 1) + [False]
    assert not Patience().meet(error_of(SinkRejected), 1)


def test_progress_or_another_failure_starts_the_count_again() -> None:
    patience, lost = Patience(), error_of(WorkerLost)
    assert all(patience.meet(lost, time) for time in range(100))
    patience = Patience()
    in_turn = [error_of(WorkerLost), error_of(SinkUnavailable)] * 10
    assert all(patience.meet(error, 1) for error in in_turn)


def test_what_is_given_up_says_how_often_it_came_back() -> None:
    assert f"{MAX_REPEATS} times without any progress" in exhausted(error_of(WorkerLost)).message
    assert exhausted(error_of(Fenced)).message == "It failed."


def test_attempts_are_counted_by_the_class_of_the_failure() -> None:
    views: Any = SimpleNamespace(
        sink=SimpleNamespace(name="cache"),
        plan=SimpleNamespace(sure_until=float("inf")),
        read_pause=lambda: None,
    )
    recovering = Recovery(views, threading.Event(), lambda **_: None, SimulatedClock())
    kinds: list[type[CdcError]] = [SinkUnavailable, KafkaUnavailable, SinkUnavailable]

    def apply() -> None:
        if kinds:
            raise kinds.pop()("It is away.", hint="wait")

    recovering.retry_batch()(apply)
    assert recovering.retries == {"SinkUnavailable": 2, "KafkaUnavailable": 1}


def test_a_server_that_is_away_for_hours_is_waited_for() -> None:
    views: Any = SimpleNamespace(
        sink=SimpleNamespace(name="cache"), plan=ResumePlan(), control=ControlState()
    )
    clock = SimulatedClock()
    recovering = Recovery(views, threading.Event(), lambda **_: None, clock)
    away = error_of(SinkUnavailable)
    decisions = {recovering.decide(away) for _ in range(1100)}
    assert decisions == {Restart(Reason.FAILURE)}
    assert clock.waited_s[:7] == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 10.0]
    assert set(clock.waited_s[7:]) == {10.0}
