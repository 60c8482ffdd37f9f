"""`cdc rebuild`, `cdc rollback`, `cdc generations`: views made again beside those that readers see."""

from typing import TYPE_CHECKING, Annotated

import typer

from cdc.console import Json, Master, err, out, print_json
from cdc.context import spark_on

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pyspark.sql import SparkSession

    from cdc.change import Table
    from cdc.context import Context
    from cdc.generations import Build
    from cdc.sink import Sink

SinkName = Annotated[str, typer.Argument(help="A sink of the pipeline file.")]
TableName = Annotated[str | None, typer.Option("--table", help="Only this table, schema.table.")]
Keep = Annotated[float, typer.Option(help="Hours that the generation before is kept current.", min=0)]


def add_to(app: typer.Typer) -> None:
    for verb in (rebuild, rollback, generations):
        app.command()(verb)


def rebuild(
    context: typer.Context,
    sink: SinkName,
    table: TableName = None,
    keep: Keep = 1.0,
    master: Master = "local[*]",
    as_json: Json = False,
) -> None:
    """Make views again from offset zero, unseen; show them once they equal their source.

    Exit 8 when they differ, 10 when that couldn't be decided: readers see what they saw.
    """
    from cdc import render
    from cdc.names import refused, together

    (one,) = context.obj.sinks([sink])
    # A sink that can only switch all of its views builds all of them.
    tables = context.obj.captured(None if one.whole else table)
    if unheld := [why for each in tables if (why := refused(each, one.refusals, one.name))]:
        raise together(unheld)
    with spark_on(master) as spark, render.building(err, quiet=as_json) as show:
        kept = build(context.obj, spark, one, tables, keep * 3600, show)
    _tell(kept, as_json, "readers see the new generation")


def build(
    context: "Context",
    spark: "SparkSession",
    sink: "Sink",
    tables: "Sequence[Table]",
    kept_s: float,
    show: "Callable[[Build], object]",
) -> "Build":
    """`cdc.rebuild` with what the pipeline file says; the generation that is kept."""
    from cdc.comparison import prove
    from cdc.follow import Follower
    from cdc.rebuild import Rebuild
    from cdc.topics import Topics
    from cdc.verify import verify

    def proved(beside: "Sink", tables: "Sequence[Table]") -> None:
        some = f" --table {tables[0].qualified}" if len(tables) == 1 and not sink.whole else ""
        prove(
            lambda: verify(spark, context.pipeline, tables, [beside]),
            sink.name,
            f"cdc -p FILE rebuild {sink.name}{some}",
        )

    with Topics(context.pipeline.kafka) as kafka:
        kafka.ensure(context.pipeline)
        return Rebuild(
            spark,
            sink,
            context.pipeline,
            tables,
            Follower(context.load, tables),
            context.placeholder,
            kafka,
            kept_s=kept_s,
            verify=proved,
            show=show,
        ).run()


def rollback(context: typer.Context, sink: SinkName, keep: Keep = 1.0, as_json: Json = False) -> None:
    """Show readers the generation before again, as current as this one; once more, and forward again."""
    from contextlib import nullcontext

    from cdc.generations import Builds
    from cdc.rollback import rollback as run
    from cdc.topics import Topics

    pipeline, (one,) = context.obj.pipeline, context.obj.sinks([sink])
    needs_spark = one.form == "events"
    with Topics(pipeline.kafka) as kafka, spark_on("local[2]") if needs_spark else nullcontext():
        kept = run(Builds(pipeline, kafka), one, context.obj.tables, keep * 3600)
    _tell(kept, as_json, "readers see the generation before")


def generations(
    context: typer.Context,
    clean: Annotated[bool, typer.Option("--clean", help="Remove what no rebuild and no way back needs.")] = False,
    as_json: Json = False,
) -> None:
    """What is built and kept beside the live views."""
    from cdc import render
    from cdc.generations import Builds
    from cdc.topics import Topics

    pipeline, sinks, tables = context.obj.pipeline, context.obj.sinks(None), context.obj.tables
    with Topics(pipeline.kafka) as kafka, spark_on("local[2]"):
        builds = Builds(pipeline, kafka).read().found
        if clean:
            for one in sinks:
                one.sweep(tables, builds[one.name].names if one.name in builds else {})
        listed = [
            {
                "sink": one.name,
                "table": table.qualified,
                "generations": one.generations(table),
                "phase": builds[one.name].phase if one.name in builds else None,
                "keep_until": builds[one.name].keep_until if one.name in builds else None,
            }
            for one in sinks
            for table in tables
        ]
    if as_json:
        return print_json({"generations": listed})
    out.print(render.generations(listed))
    return None


def _tell(kept: "Build", as_json: bool, what: str) -> None:
    if as_json:
        return print_json({"sink": kept.sink, "kept": dict(kept.names), "keep_until": kept.keep_until})
    back = f"; cdc rollback {kept.sink} goes back" if kept.names else ""
    out.print(f"{kept.sink}: {what}{back}", highlight=False)
    return None
