"""The streams of a run: one for each sink, and one that keeps documents of several tables."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from cdc.model.table import Table
from cdc.postgres import table_survey
from cdc.sink import factory

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from pyspark.sql import SparkSession

    from cdc.apply.schema_follower import Described, DescribeTables, SchemaFollower
    from cdc.apply.stream import Stream
    from cdc.control.registrations import Registration
    from cdc.kafka.log_ends import LogEnds
    from cdc.postgres.table_definition import Definition
    from cdc.runtime.context import Context
    from cdc.sink.contract import Sink


@dataclass(frozen=True)
class Streams:
    """Makes the streams of a pipeline. All of one run come from one object, for they share what
    follows the file and the table definitions.
    """

    context: "Context"

    @cached_property
    def follower(self) -> "SchemaFollower":
        """Follows the pipeline file and the table definitions, for all streams of a run."""
        from cdc.apply.schema_follower import SchemaFollower, describing

        pipeline = self.context.pipeline
        with describing(pipeline) as connection:
            tables = table_survey.survey(connection, pipeline).tables
        return SchemaFollower(self.context.load, tables)

    @cached_property
    def ends(self) -> "LogEnds":
        """Asks for the ends of topics, for all streams of a run."""
        from cdc.kafka.log_ends import LogEnds

        return LogEnds(self.context.pipeline.kafka)

    def of_sinks(self, spark: "SparkSession", sinks: "Sequence[Sink]") -> "list[Stream]":
        """Make a stream per sink, which applies its tables and follows the file and the table
        definitions.
        """
        from cdc.apply.stream import Environment, Stream

        return [
            Stream(
                Environment.on_spark(spark, self.context.pipeline.kafka, self.ends),
                sink,
                self.context.pipeline,
                self.describe(sink.name),
                self.context.placeholder,
                self.context.pipeline.sinks[sink.name].trigger_s,
            )
            for sink in sinks
        ]

    def proving(
        self, spark: "SparkSession", names: "Sequence[str]"
    ) -> "AbstractContextManager[None]":
        """Prove the views of these sinks while the streams run. See `cdc.verify.prover`."""
        from cdc.verify.prover import Proving, proving

        def describe() -> Proving:
            # A new copy reads the tables again.
            context = replace(self.context)
            return Proving(context.pipeline, context.viewed_tables, context.sinks([*names]))

        return proving(spark, self.context.load, describe)

    def describe(self, sink: str) -> "DescribeTables":
        """The function that describes the tables of a sink as they are now: captured ones, and
        views of several.
        """
        from cdc.documents.tables import with_views

        def describe(history: "Sequence[Definition]", registration: "Registration") -> "Described":
            captured, problems = self.follower(history, registration, sink)
            tables, broken = with_views(self.context.pipeline, captured, sink)
            return tables, {**problems, **broken}

        return describe

    def of_documents(self, spark: "SparkSession") -> "Stream":
        """Make the stream that keeps the state of documents, and sends them."""
        from cdc.apply.schema_follower import describing
        from cdc.apply.stream import Environment, Stream
        from cdc.documents.engine import DocumentEngine
        from cdc.documents.resolve import Resolution, resolve
        from cdc.documents.source_checks import refused_by_source

        state = factory.build_state(self.context.pipeline)
        pipeline = self.context.pipeline
        with describing(pipeline) as connection:
            tables = table_survey.survey(connection, pipeline).tables
            refused = refused_by_source(connection, pipeline, resolve(pipeline, tables).views)

        def resolve_now(captured: "Sequence[Table]") -> Resolution:
            """Resolve the views; what Postgres refused at the start of the run waits for another."""
            views, misfits = resolve(pipeline, captured)
            fitting = tuple(view for view in views if view.name not in refused)
            return Resolution(fitting, {**refused, **misfits})

        engine = DocumentEngine(spark, state, pipeline, resolve_now)

        def describe(history: "Sequence[Definition]", registration: "Registration") -> "Described":
            captured, problems = self.follower(history, registration)
            used, waiting = engine.tables(captured)
            names = {table.qualified for table in used}
            of_tables = {name: text for name, text in problems.items() if name in names}
            return used, {**of_tables, **waiting}

        return Stream(
            Environment.on_spark(spark, pipeline.kafka, self.ends),
            state,
            pipeline,
            describe,
            self.context.placeholder,
            pipeline.state.trigger_s if pipeline.state else 0.0,
            worker=engine,
        )
