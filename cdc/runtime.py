"""The only place that wires: what a pipeline file stands for, made when first asked for.

In:  the options before a verb. Out: settings, tables, sinks, streams; a Spark session; the local servers.
"""

import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Protocol, TypeVar

import psycopg

from cdc.config import settings
from cdc.errors import CdcError, SettingsError
from cdc.model import column_names
from cdc.model.table import Table
from cdc.postgres import catalog, source
from cdc.sink import factory
from compose import stack, stack_state

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cdc.apply.schema_follower import SchemaFollower
    from cdc.apply.stream import Stream
    from cdc.sink.contract import Sink
    from compose.endpoints import Endpoints


DISPLAY_DEADLINE_S = 2.5
T = TypeVar("T")


def _in_background(ask: Callable[[], T]) -> "Future[T]":
    """The answer of a server, from a thread that nobody waits for in the end."""
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
    """What the options before the verb say."""

    path: Path
    state_option: Path | None
    fresh: bool = False
    """Whether patterns of the file mean what is in the catalog now; else what was registered, once anything was."""
    on_worker_log: Callable[[Path | None], None] = lambda _: None
    """Is told where Connect's log lies, each time the file is loaded; None where Connect is not of a local stack."""

    @cached_property
    def state(self) -> Path:
        return self.state_option or stack.state_dir(settings.name_of(self.path))

    @cached_property
    def pipeline(self) -> settings.Pipeline:
        """The pipeline file with the tables that its patterns mean.

        Raises:
            SettingsError: a pattern means none of them.
        """
        from cdc.control.registrations import refuse_meaningless

        configured = self.load()
        if not configured.patterns:
            return configured
        captured = None if self.fresh else self._registered_tables(configured)
        if captured is None:
            return self._expand_from_catalog(configured)
        refuse_meaningless(captured, configured)
        return configured.with_tables(captured)

    @cached_property
    def pipeline_to_show(self) -> settings.Pipeline:
        """The same for who only looks, within seconds, whatever hangs.

        With Kafka down patterns mean what the catalog says; with that down as well, what is named is all.
        """
        configured = self.load()
        if not configured.patterns:
            return configured
        registered, in_catalog = (
            _in_background(lambda: self._registered_tables(configured)),
            _in_background(lambda: self._expand_from_catalog(configured)),
        )
        deadline = time.monotonic() + DISPLAY_DEADLINE_S
        with suppress(TimeoutError, CdcError):
            if (captured := registered.result(DISPLAY_DEADLINE_S * 0.75)) is not None:
                return configured.with_tables(captured)
        with suppress(TimeoutError, CdcError, psycopg.Error):
            return in_catalog.result(max(0.0, deadline - time.monotonic()))
        return configured.with_tables([])

    def from_catalog(self) -> "Context":
        """The same, for those commands that decide which tables are captured from then on."""
        return replace(self, fresh=True)

    def _registered_tables(self, configured: settings.Pipeline) -> Collection[str] | None:
        """The tables that were registered last; None when nothing was."""
        from cdc.control import registrations
        from cdc.kafka.topics import Topics

        with Topics(configured.kafka) as kafka:
            registration = registrations.read(kafka, configured)
        return registration.tables.keys() if registration else None

    def _expand_from_catalog(self, configured: settings.Pipeline) -> settings.Pipeline:
        with source.connect(configured.source.dsn) as connection:
            return configured.with_tables(catalog.find_tables(connection, configured).names)

    def load(self) -> settings.Pipeline:
        """The pipeline file as it is now."""
        # Not only of a stack that is whole: with a server down, `cdc status` must tell which.
        endpoints = stack_state.known_endpoints(self.state)
        log = self.state / "connect" / "log" / "connect.log"
        self.on_worker_log(log if log.exists() else None)
        stack_variables = endpoints.environment() if endpoints else {}
        return settings.load(self.path, {**stack_variables, **os.environ})

    @property
    def runs(self) -> Path:
        return self.state / "runs"

    @cached_property
    def tables(self) -> tuple[Table, ...]:
        with source.connect(self.pipeline.source.dsn) as connection:
            return source.describe(connection, self.pipeline)

    def require_supported_columns(self, connection: source.Connection) -> None:
        """Raise SourceError for all tables with columns that Spark or a sink of the file can't carry.

        Raise SettingsError for what the file asks of an index for columns that aren't there.
        """
        column_names.require_indexed(source.describe(connection, self.pipeline, self.refusals))

    def refusals(self, table: Table) -> list[str]:
        """Why the pipeline as a whole can't carry a table as it is, a sentence for each column concerned."""
        views = [f"{reason} ({sink.name})" for sink in self._all_sinks for reason in sink.refusals(table)]
        return [*column_names.refusals(table), *views]

    @cached_property
    def _all_sinks(self) -> "list[Sink]":
        """All sinks, once for all tables: to read a file of 500 tables takes a third of a second."""
        return self.sinks(None)

    def select_tables(self, name: str | None) -> tuple[Table, ...]:
        """The table of that name, schema.table; all for None."""
        return self.tables if name is None else (source.table_named(self.tables, name),)

    @cached_property
    def placeholder(self) -> str:
        """What the connector writes for a value that the log doesn't carry."""
        from cdc.capture.configuration import placeholder
        from cdc.kafka.topics import Topics

        with Topics(self.pipeline.kafka) as kafka:
            return placeholder(self.pipeline.pipeline, kafka.cluster_id())

    def sinks(self, chosen: list[str] | None) -> "list[Sink]":
        pipeline = self.load()
        names = list(pipeline.sinks)
        if unknown := [name for name in chosen or () if name not in names]:
            raise SettingsError(f"There is no sink {unknown[0]} in {self.path}.", hint=f"one of: {', '.join(names)}")
        return [factory.build(pipeline, name) for name in chosen or names]

    @cached_property
    def follower(self) -> "SchemaFollower":
        from cdc.apply.schema_follower import SchemaFollower, patience_s

        pipeline = self.pipeline
        with source.connect(pipeline.source.dsn) as connection, source.within(connection, patience_s(pipeline)):
            return SchemaFollower(self.load, source.survey(connection, pipeline).tables)

    def streams(self, spark: "SparkSession", sinks: "Sequence[Sink]") -> "list[Stream]":
        """One that applies all tables to each sink, and follows the file and the tables while it does."""
        from cdc.apply.stream import Stream

        return [Stream(spark, sink, self.pipeline, self.follower, self.placeholder) for sink in sinks]


class Stack(Protocol):
    """What `compose` has two of: servers as processes, servers as containers."""

    def up(self, state: Path, *, progress: Callable[[str], None]) -> "Endpoints": ...

    def down(self, state: Path, *, progress: Callable[[str], None]) -> list[str]: ...


def local_stack(kind: str | None, state: Path) -> Stack:
    """The local stack of that kind. Without one it is what the state is of, so that one verb alone has to say it."""
    from compose import docker

    stacks: dict[str, Stack] = {"embedded": stack, "compose": docker}
    kind = kind or stack_state.stack_kind(state) or "embedded"
    if kind not in stacks:
        raise SettingsError(f"There is no stack {kind}.", hint=f"one of: {', '.join(stacks)}")
    return stacks[kind]


@contextmanager
def spark_on(master: str) -> "Iterator[SparkSession]":
    """A session for one verb.

    Raises:
        SparkError: Spark's own process has ended meanwhile, whatever that looks like from here.
    """
    # First, so that nothing is fetched where there is no Spark.
    from cdc.spark.session import ended, session
    from compose import artifacts

    spark = session(master, artifacts.spark_jars())
    try:
        try:
            yield spark
        finally:
            spark.stop()
    except CdcError:
        raise
    except Exception as error:
        if failure := ended(spark):
            raise failure from error
        raise
