"""Follow the pipeline file and the definitions of the captured tables while the pipeline runs.

Views are described by the columns that tables have now. Rows that a definition changed, or took away, without an event
are asked for again: the connector sends them through the log, so that the log itself is right.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import psycopg
import structlog

from cdc.config.settings import Pipeline
from cdc.control import definitions
from cdc.control.registrations import Captured, Registration, refuse_another, refuse_meaningless
from cdc.errors import AnotherServer, SettingsError, SourceError, SourceUnavailable
from cdc.model.table import Table
from cdc.postgres import source
from cdc.postgres.incremental_snapshot import resend
from cdc.postgres.schema_changes import Consequence, Definition, consequences
from cdc.postgres.source import Connection, UnknownExclude
from cdc.sink.remedy import classify

PATIENCE_S, TABLE_S = 30.0, 0.5
"""How long Postgres may take to describe tables: a run that is told to stop waits no longer for it."""
log = structlog.get_logger()


def patience_s(pipeline: Pipeline) -> float:
    return PATIENCE_S + len(pipeline.source.tables) * TABLE_S


class SchemaFollower:
    """Shared by the streams of one run; asks for the same rows once, however many runs there are."""

    def __init__(self, load: Callable[[], Pipeline], tables: Sequence[Table]) -> None:
        self._load, self._pipeline = load, load()
        self._known = {table.qualified: table for table in tables}
        self._refused: dict[str, list[str]] = {}
        self._asked: set[int] = set()
        self._described: int | None = None
        """The newest definition when Postgres was asked last; whoever made this has just asked."""
        self._registered = Registration()
        self._turn = threading.Lock()

    def __call__(
        self, history: Sequence[Definition], registration: Registration
    ) -> tuple[Sequence[Table], Mapping[str, list[str]]]:
        """The tables as they are now; with Postgres down, as they were last.

        Raises:
            SourceUnavailable: Postgres is down, and a definition, or the registration, has changed since it was asked.
        """
        with self._turn:
            try:
                self._pipeline = _as_registered(self._load(), registration)
            except SettingsError as error:
                log.warning("pipeline_file_not_read", error=error.message, hint=error.hint)
            captured = [entry.table for entry in self._pipeline.source.tables]
            found = consequences(history, captured)
            gone = self._gone(found)
            newest = max((one.id for one in history if one.table in captured), default=0)
            if self._described is None:
                self._described, self._registered = newest, registration
            try:
                with (
                    source.connect(self._pipeline.source.dsn) as connection,
                    source.within(connection, patience_s(self._pipeline)),
                ):
                    refuse_another(registration, source.server(connection), self._pipeline)
                    _compare(connection)
                    self._describe(connection, gone)
                    self._ask(connection, found, gone)
                self._described, self._registered = newest, registration
            except AnotherServer:
                raise
            except (SourceError, psycopg.Error) as error:
                failure = classify(error, "postgres")
                news = newest > self._described or registration != self._registered
                if isinstance(failure, SourceUnavailable) and news:
                    raise failure from error
                log.warning("tables_not_described", error=failure.message, hint=failure.hint)
            carried = [name for name in captured if name in self._known and name not in self._refused]
            return [self._shaped(name, history, registration) for name in carried], gone | self._refused

    def _shaped(self, name: str, history: Sequence[Definition], registration: Registration) -> Table:
        """The table, told whether the log holds columns that it has no more: dropped ones, and excluded ones."""
        table, captured = self._known[name], registration.tables.get(name, Captured())
        excluded = next(entry.exclude for entry in self._pipeline.source.tables if entry.table == name)
        once = {shape.name for one in history if one.table == name for shape in one.columns or ()}
        never_sent = set(excluded) - set(captured.withdrawn)
        lost = once - {column.name for column in table.columns} - never_sent
        return replace(table, reshaped=bool(lost or captured.withdrawn))

    def _gone(self, found: Sequence[Consequence]) -> dict[str, list[str]]:
        latest = {one.table: one for one in found}
        hint = "write its name of now into the pipeline file, or take it out, then: cdc -p FILE migrate, and register"
        return {table: [one.what, hint] for table, one in latest.items() if one.kind == "gone"}

    def _describe(self, connection: Connection, gone: Mapping[str, list[str]]) -> None:
        left = tuple(entry for entry in self._pipeline.source.tables if entry.table not in gone)
        narrowed = self._pipeline.model_copy(
            update={"source": self._pipeline.source.model_copy(update={"tables": left})}
        )
        found = source.survey(connection, narrowed)
        self._known |= {table.qualified: table for table in found.tables}
        # What can be carried is, and what can't be is said: half of a table would be one in silence.
        self._refused = {}
        for name, error in found.refused.items():
            if isinstance(error, UnknownExclude) and name in self._known:
                log.warning("table_not_described", table=name, error=error.message, hint=error.hint)
            else:
                self._refused[name] = [error.message, error.hint]

    def _ask(self, connection: Connection, found: Sequence[Consequence], gone: Mapping[str, list[str]]) -> None:
        for one in found:
            waiting = one.table in gone or one.table in self._refused
            if one.kind not in ("refresh", "cleanse") or waiting or one.id in self._asked:
                continue
            table, name = self._known[one.table], f"ddl-{one.id}-{one.kind}"
            if resend(connection, table, id=name, reset_floor=one.kind == "cleanse"):
                log.info("rows_sent_again", table=one.table, because=one.what)
            self._asked.add(one.id)


def _compare(connection: Connection) -> None:
    """What differs comes through the log; when it can't be compared now, `cdc run` tries again in a few seconds."""
    try:
        definitions.compare(connection)
    except (SourceError, psycopg.Error) as error:
        if connection.closed:
            raise
        failure = classify(error, "postgres")
        log.warning("definitions_not_compared", error=failure.message, hint=failure.hint)


def _as_registered(pipeline: Pipeline, registration: Registration) -> Pipeline:
    """With the columns and keys that the connector sends: those of the file count once they are registered.

    Raises:
        SettingsError: a pattern means none of the registered tables.
    """
    refuse_meaningless(registration.tables, pipeline)
    entries, pipeline = [], pipeline.with_tables(registration.tables)
    for entry in pipeline.source.tables:
        captured = registration.tables.get(entry.table)
        sent = {"exclude": captured.exclude, "key": captured.key} if captured else {}
        entries.append(entry.model_copy(update=sent))
    return pipeline.model_copy(update={"source": pipeline.source.model_copy(update={"tables": tuple(entries)})})
