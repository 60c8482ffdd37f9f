"""Follow the pipeline file and the definitions of the captured tables while the pipeline runs.

Views have the columns that tables have now. Rows that a definition changed or removed without an
event are requested again: the connector sends them through the log, so that the topic itself is
correct.
"""

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import psycopg
import structlog

from cdc.config.settings import Pipeline
from cdc.control import definitions
from cdc.control.registrations import Captured, Registration, refuse_another, refuse_meaningless
from cdc.errors import AnotherServer, SettingsError, SourceError, SourceUnavailable
from cdc.model.table import Table
from cdc.postgres import source, table_survey
from cdc.postgres.schema_changes import Consequence, consequences
from cdc.postgres.snapshot_request import resend
from cdc.postgres.source import Connection
from cdc.postgres.table_definition import Definition
from cdc.postgres.table_survey import UnknownExclude
from cdc.sink.remedy import classify

PATIENCE_S = 30.0
"""Seconds that Postgres may take to describe tables: a run that is stopped waits no longer."""
TABLE_S = 0.5
"""Seconds in addition for each table."""
log = structlog.get_logger()
Described = tuple[Sequence[Table], Mapping[str, list[str]]]
"""Tables as they are now, and problems by table."""
DescribeTables = Callable[[Sequence[Definition], Registration], Described]
"""Takes the journal of definitions and the registration."""


@contextmanager
def describing(pipeline: Pipeline) -> Iterator[Connection]:
    """Connect to Postgres for as long as it may take to describe the tables of a pipeline."""
    patience_s = PATIENCE_S + len(pipeline.source.tables) * TABLE_S
    with (
        source.connect_to_read(pipeline.source) as connection,
        source.within(connection, patience_s),
    ):
        yield connection


class SchemaFollower:
    """Describes the tables for all streams of a run. Requests rows only once, however many runs
    there are.
    """

    def __init__(self, load: Callable[[], Pipeline], tables: Sequence[Table]) -> None:
        self._load = load
        self._pipeline = load()
        self._tables = {table.qualified: table for table in tables}
        self._refused: dict[str, list[str]] = {}
        self._requested: set[int] = set()
        self._described: int | None = None
        """The id of the newest definition when Postgres was asked last; the constructor's caller
        has just asked.
        """
        self._registered = Registration()
        self._turn = threading.Lock()

    def __call__(
        self, history: Sequence[Definition], registration: Registration, sink: str | None = None
    ) -> Described:
        """The tables as they are now, or as they were last if Postgres is down; and problems, by
        table. With a `sink` only problems of what it lists.

        Raises:
            SourceUnavailable: Postgres is down, and a definition or the registration has changed
                since it was asked.
        """
        with self._turn:
            try:
                self._pipeline = _as_registered(self._load(), registration)
            except SettingsError as error:
                log.warning("pipeline_file_not_read", error=error.message, hint=error.hint)
            captured = [entry.table for entry in self._pipeline.source.tables]
            masks = {
                f"{entry.table}.{column}": mask
                for entry in self._pipeline.source.tables
                for column, mask in entry.mask.items()
            }
            results = consequences(history, captured, registration.events, masks)
            vanished = self._vanished_tables(results)
            newest = max((entry.id for entry in history if entry.table in captured), default=0)
            if self._described is None:
                self._described = newest
                self._registered = registration
            try:
                with describing(self._pipeline) as connection:
                    refuse_another(registration, source.server(connection), self._pipeline)
                    _compare(connection)
                    self._describe(connection, vanished)
                    # Of a table that is aside no row would come: all are sent when it is captured.
                    self._request_rows(connection, results, {*vanished, *registration.aside})
                self._described = newest
                self._registered = registration
            except AnotherServer:
                raise
            except (SourceError, psycopg.Error) as error:
                failure = classify(error, "postgres")
                news = newest > self._described or registration != self._registered
                if isinstance(failure, SourceUnavailable) and news:
                    raise failure from error
                log.warning("tables_not_described", error=failure.message, hint=failure.hint)
            carried = [
                name for name in captured if name in self._tables and name not in self._refused
            ]
            problems = {
                name: problem
                for name, problem in (vanished | self._refused).items()
                if sink not in self._pipeline.unlisted_by(name)
            }
            return [self._shaped(name, history, registration) for name in carried], problems

    def _shaped(
        self, name: str, history: Sequence[Definition], registration: Registration
    ) -> Table:
        """The table, with `reshaped` if its topic holds columns that it no longer has: dropped or
        excluded ones.
        """
        table = self._tables[name]
        captured = registration.tables.get(name, Captured())
        excluded = next(
            entry.exclude for entry in self._pipeline.source.tables if entry.table == name
        )
        former = {
            column.name
            for entry in history
            if entry.table == name
            for column in entry.columns or ()
        }
        never_sent = set(excluded) - set(captured.withdrawn)
        lost = former - {column.name for column in table.columns} - never_sent
        # By the file, which may have been read while Postgres was away.
        of_file = table_survey.for_sinks(table, self._pipeline)
        return replace(of_file, reshaped=bool(lost or captured.withdrawn))

    def _vanished_tables(self, results: Sequence[Consequence]) -> dict[str, list[str]]:
        latest = {result.table: result for result in results}
        hint = "write its name of now into the pipeline file, or take it out, then: cdc -p FILE migrate, and register"
        return {
            table: [result.reason, hint]
            for table, result in latest.items()
            if result.kind == "gone"
        }

    def _describe(self, connection: Connection, vanished: Mapping[str, list[str]]) -> None:
        remaining = tuple(
            entry for entry in self._pipeline.source.tables if entry.table not in vanished
        )
        narrowed = self._pipeline.model_copy(
            update={"source": self._pipeline.source.model_copy(update={"tables": remaining})}
        )
        survey = table_survey.survey(connection, narrowed)
        self._tables |= {table.qualified: table for table in survey.tables}
        # A table is captured as a whole or refused aloud: half of its columns would silently pass
        # for all.
        self._refused = {}
        for name, error in survey.refused.items():
            if isinstance(error, UnknownExclude) and name in self._tables:
                log.warning("table_not_described", table=name, error=error.message, hint=error.hint)
            else:
                self._refused[name] = [error.message, error.hint]
        for name, error in table_survey.unidentified(connection, survey.tables).items():
            self._refused[name] = [error.message, error.hint]

    def _request_rows(
        self,
        connection: Connection,
        results: Sequence[Consequence],
        waits: Collection[str],
    ) -> None:
        for result in results:
            waiting = result.table in waits or result.table in self._refused
            if result.kind not in ("refresh", "cleanse") or waiting or result.id in self._requested:
                continue
            table = self._tables[result.table]
            name = f"ddl-{result.id}-{result.kind}"
            try:
                sent = resend(
                    connection,
                    table,
                    reader=self._pipeline.replication_user,
                    id=name,
                    reset_floor=result.kind == "cleanse",
                )
            except SourceError as error:
                # Its views stay as they are until its rows can come.
                self._refused[result.table] = [error.message, error.hint]
                continue
            if sent:
                log.info("rows_sent_again", table=result.table, because=result.reason)
            self._requested.add(result.id)


def _compare(connection: Connection) -> None:
    """Compare definitions; differences come through the log. After a failure `cdc run` retries in a
    few seconds.
    """
    try:
        definitions.compare(connection)
    except psycopg.Error as error:
        if connection.closed:
            raise
        failure = classify(error, "postgres")
        log.warning("definitions_not_compared", error=failure.message, hint=failure.hint)


def _as_registered(pipeline: Pipeline, registration: Registration) -> Pipeline:
    """The pipeline with the columns and keys that the connector sends. Changes in the file take
    effect once they are registered.

    Raises:
        SettingsError: a pattern matches no registered table.
    """
    refuse_meaningless(registration.names, pipeline)
    entries = []
    pipeline = pipeline.with_tables(registration.names)
    for entry in pipeline.source.tables:
        captured = registration.tables.get(entry.table)
        sent = ("exclude", "mask", "key", "events")
        settings = {name: getattr(captured, name) for name in sent} if captured else {}
        entries.append(entry.model_copy(update=settings))
    return pipeline.model_copy(
        update={"source": pipeline.source.model_copy(update={"tables": tuple(entries)})}
    )
