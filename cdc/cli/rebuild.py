"""Verbs `cdc rebuild`, `cdc rollback`, `cdc generations`: generations of views beside the live
one.
"""

import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.status import Status as Spinner

from cdc.cli.console import Json, Master, SinkName, TableName, answer, call, err
from cdc.cli.operations import recorded
from cdc.cli.screen import Grid
from cdc.runtime.servers import spark_on
from cdc.runtime.streams import Streams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pyspark.sql import SparkSession

    from cdc.generations.registry import GenerationBuild, Generations, RetainedView
    from cdc.model.table import Table
    from cdc.runtime.context import Context
    from cdc.sink.contract import Sink

KEPT_S = 3600.0
"""Seconds that a generation is retained when another command finishes a rollback that was
killed.
"""
SILENT_S = 4.0
"""Seconds between two progress lines of a rebuild where output is no terminal."""
Keep = Annotated[
    float,
    typer.Option(help="Hours that the previous generation is kept current for a rollback.", min=0),
]


@recorded("rebuild")
def rebuild(
    context: typer.Context,
    sink: SinkName,
    table: TableName = None,
    keep: Keep = 1.0,
    master: Master = "local[*]",
    as_json: Json = False,
) -> None:
    """Build views again from the log, beside the live ones.

    Readers are switched to the new generation once it equals its source. Exit 8 when it differs, 10
    when that couldn't be decided: readers then keep the generation that they have.
    """
    from cdc.model.column_names import combined_error, refusal_error

    (destination,) = context.obj.sinks([sink])
    # A sink that can only switch all of its views builds all of them.
    tables = context.obj.tables_in(sink, None if destination.promotes_all_tables else table)
    if reasons := [
        reason
        for captured in tables
        if (reason := refusal_error(captured, destination.refusals, destination.name))
    ]:
        raise combined_error(reasons)
    modules = context.obj.executors([sink])
    with spark_on(master, modules) as spark, show_build(err, quiet=as_json) as show:
        retained = build(context.obj, spark, destination, tables, keep * 3600, show)
    _print_result(sink, retained, as_json, "readers see the new generation")


def build(
    context: "Context",
    spark: "SparkSession",
    sink: "Sink",
    tables: "Sequence[Table]",
    kept_s: float,
    show: "Callable[[GenerationBuild], object]",
) -> "dict[str, RetainedView]":
    """Build a new generation and promote it. Returns the generations retained for a rollback, by
    table.
    """
    from cdc.apply.stream import Environment
    from cdc.generations.registry import Registry
    from cdc.generations.rollback import settle_rollback
    from cdc.kafka.topic_setup import ensure_topics
    from cdc.kafka.topics import Topics
    from cdc.rebuild.build import Rebuild
    from cdc.verify import proof
    from cdc.verify.comparison import Comparison, prove
    from cdc.verify.verification import verify

    proved: list[tuple[proof.Beginning, list[Comparison]]] = []

    def require_equal(candidate: "Sink", tables: "Sequence[Table]") -> None:
        table_option = (
            f" --table {tables[0].qualified}"
            if len(tables) == 1 and not sink.promotes_all_tables
            else ""
        )

        def compare() -> list[Comparison]:
            beginning = proof.begin(context.pipeline, tables, [candidate])
            comparisons = verify(spark, context.pipeline, tables, [candidate])
            proved[:] = [(beginning, comparisons)]
            return comparisons

        prove(
            compare,
            sink.name,
            f"cdc -p FILE rebuild {sink.name}{table_option}",
        )

    with Topics(context.pipeline.kafka) as kafka:
        ensure_topics(kafka, context.pipeline)
        settle_rollback(
            Registry(context.pipeline, kafka), sink, context.tables_in(sink.name), KEPT_S
        )
        retained = Rebuild(
            partial(Environment.on_spark, spark, context.pipeline.kafka),
            context.pipeline,
            kafka,
            sink,
            tables,
            describe=Streams(context).describe(sink.name),
            placeholder=context.placeholder,
            retention_s=kept_s,
            verify=require_equal,
            show=show,
        ).run()
    # Until readers see it, the proof is the former generation's.
    for beginning, comparisons in proved:
        proof.record(context.pipeline, beginning, tables, [sink], comparisons)
    return retained


@recorded("rollback")
def rollback(
    context: typer.Context, sink: SinkName, keep: Keep = 1.0, as_json: Json = False
) -> None:
    """Switch readers back to the previous generation.

    It has been kept as current as the live one. Run it again to undo.
    """
    from cdc.generations.registry import Registry
    from cdc.generations.rollback import rollback as run
    from cdc.kafka.topics import Topics

    pipeline = context.obj.pipeline
    (destination,) = context.obj.sinks([sink])
    with Topics(pipeline.kafka) as kafka:
        retained = run(
            Registry(pipeline, kafka), destination, context.obj.tables_in(sink), keep * 3600
        )
    _print_result(sink, retained, as_json, "readers see the previous generation")


@recorded("generations", lambda options: options["clean"])
def generations(
    context: typer.Context,
    clean: Annotated[
        bool,
        typer.Option("--clean", help="Remove generations that no rebuild and no rollback needs."),
    ] = False,
    as_json: Json = False,
) -> None:
    """List the generations of each view.

    Shows which one is live, and which are being built or retained for a rollback.
    """
    from cdc.generations.claim import claim
    from cdc.generations.registry import Registry
    from cdc.generations.rollback import settle_rollback
    from cdc.kafka.topics import Topics

    pipeline = context.obj.pipeline
    sinks = context.obj.sinks(None)
    with Topics(pipeline.kafka) as kafka:
        registry = Registry(pipeline, kafka)
        if clean:
            for sink in sinks:
                tables = context.obj.tables_in(sink.name)
                settle_rollback(registry, sink, tables, KEPT_S)
                # A generation of a killed rebuild stays: the next rebuild continues it.
                with claim(registry, sink.name) as held_claim:
                    sink.drop_unreferenced(tables, held_claim.generations.needed_names())
        registry.read()
        rows = [
            _to_row(registry.for_sink(sink.name), sink, table)
            for sink in sinks
            for table in context.obj.tables_in(sink.name)
        ]
    grid = Grid("sink", "table", "live", "beside", "")
    for row in rows:
        live, *others = row["generations"] or [""]
        grid.add_row(
            row["sink"], row["table"], live or "first", ", ".join(others), row["phase"] or ""
        )
    answer(as_json, {"generations": rows}, grid)


def _to_row(generations: "Generations", sink: "Sink", table: "Table") -> "dict[str, Any]":
    work = generations.work
    retained = generations.retained.get(table.qualified)
    phase = work.phase if work and table.qualified in work.names else ("kept" if retained else None)
    return {
        "sink": sink.name,
        "table": table.qualified,
        "generations": sink.generations(table),
        "phase": phase,
        "keep_until": retained.until if retained else None,
    }


def _print_result(
    sink: str, retained: "Mapping[str, RetainedView]", as_json: bool, outcome: str
) -> None:
    names = {table: generation.name for table, generation in retained.items()}
    keep_until = max((generation.until for generation in retained.values()), default=None)
    document = {"sink": sink, "kept": names, "keep_until": keep_until}
    advice = call.complete_commands(f"; cdc rollback {sink} goes back") if retained else ""
    answer(as_json, document, f"{sink}: {outcome}{advice}")


@contextmanager
def show_build(console: Console, *, quiet: bool) -> "Iterator[Callable[[GenerationBuild], None]]":
    """Show the phases of a rebuild and its progress: a spinner on a terminal, elsewhere a line
    every few seconds.
    """
    if quiet:
        yield lambda _: None
        return
    with Spinner("", console=console) as status:
        phases: list[str] = []
        printed_at = 0.0

        def show(build: "GenerationBuild") -> None:
            nonlocal printed_at
            if build.phase not in phases:
                phases.append(build.phase)
                console.print(f"{build.sink}: {build.phase}")
            counts = f"{build.done:,} of {build.total:,} records, {build.rows_per_s:,.0f}/s"
            line = f"{build.sink}: {build.phase} {counts}"
            if build.remaining_s is not None and build.phase == "replay":
                line += f", {build.remaining_s:.0f} s left"
            status.update(line)
            if not console.is_terminal and time.monotonic() > printed_at + SILENT_S:
                printed_at = time.monotonic()
                console.print(line)

        yield show
