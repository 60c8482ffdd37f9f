"""Verbs of `cdc topics`: create, show, renew and audit the topics."""

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from cdc.cli.console import Json, Master, TableName, answer, call, out, print_json, print_lines, say
from cdc.cli.operations import recorded
from cdc.cli.screen import Grid, with_advice
from cdc.errors import DivergenceError, SettingsError
from cdc.postgres.table_survey import table_named
from cdc.runtime.servers import spark_on

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cdc.audit.auditor import Audit

app = typer.Typer(help="Create, show, renew and audit the topics.", rich_markup_mode=None)
SHOWN = 5
"""Most keys on one line."""


@app.callback(invoke_without_command=True)
def topics(context: typer.Context, as_json: Json = False) -> None:
    """Create the topics that are missing, and show them all, unless another verb follows."""
    if context.invoked_subcommand is not None:
        if as_json:
            raise SettingsError(
                "--json goes after the verb.",
                hint=f"cdc topics {context.invoked_subcommand} --json",
            )
        return
    from cdc.kafka.topic_setup import ensure_topics
    from cdc.kafka.topics import PATIENCE_S, Topics

    pipeline = context.obj.pipeline
    with Topics(pipeline.kafka, PATIENCE_S) as kafka:
        ensured = ensure_topics(kafka, pipeline)
        ends = kafka.ends(list(ensured))
    rows = [
        {
            "topic": topic,
            "partitions": ends[topic].partition_count,
            "created": is_new,
            "topic_id": ends[topic].topic_id,
            "end_offsets": list(ends[topic].offsets),
        }
        for topic, is_new in ensured.items()
    ]
    grid = Grid("topic", ">partitions", ">end offsets", "")
    for topic, is_new in ensured.items():
        end = ends[topic]
        created = "created" if is_new else ""
        grid.add_row(topic, str(end.partition_count), f"{sum(end.offsets):,}", created)
    answer(as_json, {"topics": rows}, grid)


@app.command()
@recorded("topics renew")
def renew(
    context: typer.Context,
    table: Annotated[
        list[str],
        typer.Option(
            "--table",
            help="Table or view whose topic is renewed, as schema.table or view.name. Repeatable.",
        ),
    ],
    forget: Annotated[
        bool,
        typer.Option(
            "--forget",
            help="Also what only a topic has: closed windows of a view, events that were deleted.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Delete topics and create them again as the file says.

    All rows of their tables are sent again. The views of these tables then need a rebuild. With
    another number of partitions the topics of views of which they are the root are renewed, too.
    """
    from cdc.capture.renewal import renew as renew_topics
    from cdc.capture.renewal import select_renewed
    from cdc.kafka.topics import Topics

    pipeline = context.obj.pipeline
    tables = context.obj.tables
    with Topics(pipeline.kafka) as kafka:
        renewed = select_renewed(kafka, pipeline, tables, table, forget=forget)
    registered = renew_topics(pipeline, tables, renewed, progress=say)
    if as_json:
        return print_json(registered)
    return print_lines(
        call.complete_commands(f"next: cdc -p FILE rebuild {sink} --table {captured.qualified}")
        for captured in renewed
        for sink in filter(captured.is_in, pipeline.sinks)
    )


@app.command()
def audit(
    context: typer.Context,
    table: TableName = None,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="Send rows again that the log no longer holds completely, then audit again.",
        ),
    ] = False,
    timeout_s: Annotated[
        float, typer.Option("--timeout", help="Seconds to wait for the repaired rows.")
    ] = 600,
    master: Master = "local[*]",
    as_json: Json = False,
) -> None:
    """Check that the views could be built again from the log.

    Names the keys that are lost. Exit 8 when the log can't make a view again, or can't continue it.
    """
    from cdc.kafka.topics import Topics

    pipeline = context.obj.pipeline
    tables = context.obj.tables
    if table is not None:
        tables = (table_named(tables, table),)
    with Topics(pipeline.kafka) as kafka, spark_on(master) as spark:
        from cdc.audit.auditor import Auditor

        auditor = Auditor(spark, pipeline, kafka, context.obj.placeholder, context.obj.sinks(None))
        results = [auditor.audit(captured, timeout_s if repair else None) for captured in tables]
    report(results, as_json=as_json)


def report(results: "Sequence[Audit]", *, as_json: bool) -> None:
    """Print the results of an audit.

    Raises:
        DivergenceError: a topic can't make its view again, or can't continue it.
    """
    repaired = sum(result.repaired for result in results)
    defective = [result for result in results if result.defects]
    document = {
        "replayable": all(result.replayable for result in results),
        "topics": [result.to_dict() for result in results],
    }
    if repaired and not as_json:
        out.print(f"{repaired:,} rows were sent again")
    answer(as_json, document, draw_audits(results))
    if defective:
        unreplayable = [result for result in defective if not result.replayable]
        problem = "can't make their views again" if unreplayable else "can't continue their views"
        first = (unreplayable or defective)[0]
        raise DivergenceError(
            f"{len(unreplayable or defective)} of {len(results)} topics {problem}.",
            hint=first.defects[0].hint,
        )


def draw_audits(results: "Sequence[Audit]") -> RenderableType:
    """Draw the results of `cdc topics audit`, and its findings."""
    grid = Grid("table", ">records", ">keys", ">compaction saves", ">dirty", "")
    for result in results:
        verdict = (
            Text("can't be replayed", "red")
            if not result.replayable
            else Text("replayable", "green")
        )
        grid.add_row(
            result.table,
            f"{result.records:,}",
            f"{result.keys:,}",
            f"{result.saved:,}",
            f"{result.dirty_ratio:.0%}",
            verdict,
        )
    findings = [
        Text(
            f"{result.table}: {with_advice(flaw.what + _list_keys(flaw.keys), flaw.hint)}"
            f" ({finding.code})",
            "red" if flaw.defect else "yellow",
        )
        for result in results
        for flaw, finding in zip(result.flaws, result.findings, strict=True)
    ]
    return Group(grid, *findings)


def _list_keys(keys: "Sequence[str]") -> str:
    more = " and more" if len(keys) > SHOWN else ""
    return f": {', '.join(keys[:SHOWN])}{more}" if keys else ""
