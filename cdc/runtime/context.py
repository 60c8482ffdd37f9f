"""A pipeline as its file describes it, with the parts that verbs ask for, each made when it is first
used.

In: the options before a verb. Out: settings, tables, views, sinks.
"""

import os
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, TypeVar

import psycopg

from cdc.compose import stack, stack_state
from cdc.config import settings
from cdc.errors import CdcError, SettingsError, SourceError
from cdc.model import column_names
from cdc.model.table import Table
from cdc.postgres import catalog, source, table_survey
from cdc.sink import factory

if TYPE_CHECKING:
    from cdc.documents.resolve import Resolution
    from cdc.documents.tables import Waiting
    from cdc.sink.contract import Sink

DISPLAY_DEADLINE_S = 2.5
"""Seconds after which `pipeline_to_show` does without the servers."""
T = TypeVar("T")


def _in_background(ask: Callable[[], T]) -> "Future[T]":
    """Ask a server in a daemon thread, which nobody has to wait for when it hangs."""
    answer: Future[T] = Future()

    def work() -> None:
        try:
            answer.set_result(ask())
        except BaseException as error:
            answer.set_exception(error)

    Thread(target=work, daemon=True).start()
    return answer


@dataclass(frozen=True)
class Context:
    """A pipeline as the options before the verb name it, with the parts that its file describes."""

    path: Path
    state_option: Path | None
    fresh: bool = False
    """Whether patterns match the catalog now; otherwise they mean the registered tables, once there
    are any.
    """
    as_owner: bool = False
    """Whether the source is asked as its owner, for verbs that change it."""
    left_out: Collection[str] = ()
    """Tables to leave out of `pipeline`: they are set aside, and can't be captured yet."""

    @cached_property
    def state(self) -> Path:
        """The state folder: of the option --state, else of the pipeline's name."""
        return self.state_option or stack.state_dir(settings.name_of(self.path))

    def worker_log(self) -> Path | None:
        """Find the log of Kafka Connect's worker; None where that isn't a local server, or the file can't
        be read.
        """
        try:
            log = self.state / "connect" / "log" / "connect.log"
        except CdcError:
            return None
        return log if log.exists() else None

    @cached_property
    def pipeline(self) -> settings.Pipeline:
        """The pipeline file, with the tables that its patterns match.

        Raises:
            SettingsError: a pattern matches no captured table.
        """
        from cdc.control.registrations import refuse_meaningless

        configured = self.load()
        if configured.patterns:
            captured = None if self.fresh else self._registered_tables(configured)
            if captured is None:
                configured = self._expand_from_catalog(configured)
            else:
                refuse_meaningless(captured, configured)
                configured = configured.with_tables(captured)
        return configured.without_tables(self.left_out) if self.left_out else configured

    @cached_property
    def pipeline_to_show(self) -> settings.Pipeline:
        """The pipeline for verbs that only show something: known within seconds, whatever hangs.

        Without Kafka the patterns match the catalog. Without Postgres as well, only the named
        tables remain.
        """
        configured = self.load()
        if not configured.patterns:
            return configured
        registered = _in_background(lambda: self._registered_tables(configured))
        in_catalog = _in_background(lambda: self._expand_from_catalog(configured))
        deadline = time.monotonic() + DISPLAY_DEADLINE_S
        with suppress(TimeoutError, CdcError):
            if (captured := registered.result(DISPLAY_DEADLINE_S * 0.75)) is not None:
                return configured.with_tables(captured)
        with suppress(TimeoutError, CdcError, psycopg.Error):
            return in_catalog.result(max(0.0, deadline - time.monotonic()))
        return configured.with_tables([])

    @cached_property
    def pipeline_to_examine(self) -> settings.Pipeline:
        """The pipeline for `cdc doctor`: patterns match the catalog, or without Postgres as in
        `pipeline_to_show`. The examination finds out why the catalog can't be read.
        """
        with suppress(CdcError, psycopg.Error):
            return self.from_catalog().pipeline
        return self.pipeline_to_show

    def from_catalog(self, *, as_owner: bool = False) -> "Context":
        """The same pipeline with patterns that match the catalog, for verbs that decide which
        tables are captured.
        """
        return replace(self, fresh=True, as_owner=as_owner)

    def _registered_tables(self, configured: settings.Pipeline) -> Collection[str] | None:
        """Read the tables of the last registration; None when there is none."""
        from cdc.control import registrations
        from cdc.kafka.topics import Topics

        with Topics(configured.kafka) as kafka:
            registration = registrations.read(kafka, configured)
        return registration.names if registration else None

    def _expand_from_catalog(self, configured: settings.Pipeline) -> settings.Pipeline:
        with source.connect_to_read(configured.source, as_owner=self.as_owner) as connection:
            expanded = configured.with_tables(catalog.find_tables(connection, configured).names)
        expanded.refuse_unknown_tables()
        return expanded

    def load(self) -> settings.Pipeline:
        """Read the pipeline file as it is now, with the addresses of the local servers."""
        # Addresses of servers that are down count, too: `cdc status` must show which one is.
        endpoints = stack_state.known_endpoints(self.state)
        stack_variables = endpoints.environment() if endpoints else {}
        return settings.load(self.path, {**stack_variables, **os.environ})

    @cached_property
    def tables(self) -> tuple[Table, ...]:
        """The captured tables, as Postgres describes them. Raises SourceError."""
        with source.connect_to_read(self.pipeline.source, as_owner=self.as_owner) as connection:
            return table_survey.describe(connection, self.pipeline)

    def require_supported_columns(self, connection: source.Connection) -> None:
        """Check that all columns can be carried.

        Raises:
            SourceError: some columns can't be carried; names all of them.
            SettingsError: the file has settings of an index for columns that don't exist.
        """
        column_names.require_indexed(table_survey.describe(connection, self.pipeline))

    def unheld(self) -> list[SourceError]:
        """Say which views a sink can't make, for the names of their columns."""
        return [
            error
            for sink in self.sinks(None)
            for table in table_survey.tables_in([sink.name], self.tables)
            if (error := column_names.refusal_error(table, sink.refusals, sink.name))
        ]

    @cached_property
    def views(self) -> tuple[Table, ...]:
        """The views of several tables that the file declares, as tables. Raises SettingsError."""
        from cdc.documents.tables import view_tables

        return tuple(view_tables(self.pipeline, self.tables)) if self.pipeline.views else ()

    @cached_property
    def waiting_views(self) -> "Waiting":
        """The views that don't fit their tables, or that the run has found not to."""
        if not self.pipeline.views:
            return {}
        from cdc.documents.tables import waiting

        names = {table.qualified for table in table_survey.views_by_name_only(self.pipeline)}
        noted = factory.state_reader(self.pipeline, lambda state: state.waiting())()
        stored = {name: problem for name, problem in noted.items() if name in names}
        return {**stored, **waiting(self.resolution.refused)}

    @cached_property
    def viewed_tables(self) -> tuple[Table, ...]:
        """What sinks have views of now: captured tables, and views of several tables that don't wait."""
        from cdc.documents.tables import view_table

        resolved = self.resolution.views if self.pipeline.views else ()
        views = [view_table(self.pipeline, view) for view in resolved]
        fitting = (view for view in views if view.qualified not in self.waiting_views)
        return (*self.tables, *fitting)

    @cached_property
    def resolution(self) -> "Resolution":
        """The plans of the views of several tables, and why some have none. Raises SourceError."""
        from cdc.documents.resolve import resolve

        return resolve(self.pipeline, self.tables)

    def check_views(self, connection: source.Connection) -> list[str]:
        """Check the views of several tables against the source. Returns advice on indexes. Raises
        SettingsError, SourceError.
        """
        if not self.pipeline.views:
            return []
        from cdc.documents.resolve import resolve_views
        from cdc.documents.source_checks import check_views, missing_indexes

        tables = table_survey.describe(connection, self.pipeline)
        views = resolve_views(self.pipeline, tables)
        check_views(connection, self.pipeline, views)
        return missing_indexes(connection, views)

    def select_views(self, name: str | None) -> tuple[Table, ...]:
        """Select what sinks have views of, captured tables and views of several, by its name; all
        for None. Raises SettingsError.
        """
        everything = (*self.tables, *self.views)
        return everything if name is None else (table_survey.table_named(everything, name),)

    def tables_in(self, sink: str, name: str | None = None) -> tuple[Table, ...]:
        """Select like `select_views`, but only what a sink has. Raises SettingsError."""
        return table_survey.tables_in([sink], self.select_views(name), name)

    @cached_property
    def placeholder(self) -> str:
        """The text that the connector writes for a value that the log doesn't carry. Raises
        ConnectorError.
        """
        from cdc.capture.configuration import placeholder
        from cdc.kafka.topics import Topics

        with Topics(self.pipeline.kafka) as kafka:
            return placeholder(self.pipeline.pipeline, kafka.cluster_id())

    def sinks(self, chosen: list[str] | None) -> "list[Sink]":
        """Make the sinks of these names, or all. Raises SettingsError for a name that the file
        lacks.
        """
        pipeline = self.load()
        names = list(pipeline.sinks)
        if unknown := [name for name in chosen or () if name not in names]:
            raise SettingsError(
                f"There is no sink {unknown[0]} in {self.path}.", hint=f"one of: {', '.join(names)}"
            )
        return [factory.build(pipeline, name) for name in chosen or names]

    def executors(self, names: Sequence[str]) -> list[str]:
        """The modules that Spark's workers run for the sinks of these names, and for the state."""
        pipeline = self.load()
        settings = [pipeline.sinks[name] for name in names]
        settings += [pipeline.state] if pipeline.state else []
        return sorted({kind.executor for kind in settings if kind.executor})
