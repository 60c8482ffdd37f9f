"""Verb `cdc verify`: compare the views with their source while applications write."""

import re
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from cdc.cli.console import Json, Master, SinkNames, TableName, answer, say
from cdc.cli.operations import recorded
from cdc.cli.screen import Grid, with_advice
from cdc.errors import (
    CdcError,
    ConnectorError,
    DivergenceError,
    SettingsError,
    SinkError,
    UndecidedError,
)
from cdc.model.wording import full_stopped
from cdc.postgres import table_survey
from cdc.runtime.servers import spark_on

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cdc.apply.progress import Progress
    from cdc.config.settings import Pipeline
    from cdc.model.table import Table
    from cdc.runtime.context import Context
    from cdc.verify.comparison import Comparison

Sample = Annotated[
    float | None,
    typer.Option(
        help="Percent of the rows to compare, different ones each time.", min=0.01, max=100
    ),
]
Since = Annotated[
    str | None,
    typer.Option(help="Only rows changed since 90s, 30m, 2h, 1d ago, or since a time with zone."),
]
Rate = Annotated[
    float | None, typer.Option(help="Most rows per second to read from Postgres.", min=1)
]
Timeout = Annotated[float, typer.Option(help="Seconds to wait for a view that is behind.")]
Repair = Annotated[
    bool, typer.Option("--repair", help="Send rows that differ through the log again.")
]
UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
VERDICTS = {"equal": "green", "differs": "red", "undecided": "yellow"}


@recorded("verify", lambda options: options["repair"])
def verify(
    context: typer.Context,
    sink: SinkNames = None,
    table: TableName = None,
    sample: Sample = None,
    since: Since = None,
    rate: Rate = None,
    timeout: Timeout = 300.0,
    repair: Repair = False,
    master: Master = "local[*]",
    as_json: Json = False,
) -> None:
    """Compare rows and columns of the views with Postgres.

    Applications may write meanwhile. Exit 8 when a view differs, 10 when some rows couldn't be
    decided, or a view couldn't be compared.
    """
    from cdc.verify import proof
    from cdc.verify.barrier import StalledViews
    from cdc.verify.comparison import Options
    from cdc.verify.repair import repair as repair_differences
    from cdc.verify.verification import verify as verify_views

    pipeline = context.obj.pipeline
    sinks = context.obj.sinks(sink)
    names = [destination.name for destination in sinks]
    # Before Spark starts, so that a mistake is refused at once.
    since_ms = _moment_ms(since) if since else None
    options = Options(sample, since_ms, rate, timeout)
    tables, waiting = _select(context.obj, table, names)
    tables = table_survey.tables_in(names, tables, None if waiting else table)
    check_connector(pipeline, names, timeout)
    modules = [*context.obj.executors(names), "cdc.verify.census"]
    stalled = StalledViews(lambda: find_stalled(_read_progress(pipeline), tables))
    with spark_on(master, modules) as spark:
        beginnings: list[proof.Beginning] = []
        results = verify_views(
            spark,
            pipeline,
            tables,
            sinks,
            options,
            report=say,
            stalled=stalled,
            current=lambda: beginnings.append(proof.begin(pipeline, tables, sinks)),
        )
        if repair:
            results = repair_differences(spark, pipeline, tables, sinks, options, results)
        proof.record(pipeline, beginnings[0], tables, sinks, results)
    report([*results, *waiting], as_json)


def _moment_ms(text: str) -> int:
    """Parse a length of time before now (90s, 30m, 2h, 1d), or a time with zone: Unix milliseconds.
    Raises SettingsError.
    """
    if length := re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text):
        return int((time.time() - float(length[1]) * UNITS_S[length[2]]) * 1000)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise SettingsError(
            f"{text!r} isn't a time.",
            hint="2h for two hours ago, or 2026-01-31T12:00+01:00",
        ) from error
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)


def _select(
    context: "Context", name: str | None, sinks: "Sequence[str]"
) -> "tuple[Sequence[Table], list[Comparison]]":
    """Select what is compared, and say of views that wait why they aren't. Raises SettingsError."""
    from cdc.verify.comparison import Comparison

    pipeline = context.pipeline
    waiting = context.waiting_views
    if name is not None and name not in waiting:
        return context.select_views(name), []
    unfit = []
    for view in table_survey.views_by_name_only(pipeline):
        if view.qualified in waiting and name in (None, view.qualified):
            problem, hint = waiting[view.qualified]
            unfit += [
                Comparison(sink, view.qualified, problem=problem, hint=hint)
                for sink in sinks
                if view.is_in(sink)
            ]
    return [] if name else context.viewed_tables, unfit


def check_connector(pipeline: "Pipeline", sinks: "Sequence[str]", timeout_s: float) -> None:
    """Find out before any waiting whether the views can catch up.

    Raises:
        ConnectorError: no change comes through the connector.
    """
    from cdc.apply.progress import WORKING
    from cdc.connectors.client import Connect

    with Connect(pipeline.connect) as connect:
        state = connect.state(pipeline.pipeline)
    if state.connector == "MISSING":
        message = f"There is no connector {pipeline.pipeline}: no change reaches the views."
        raise ConnectorError(message, hint="cdc -p FILE register")
    if state.failed:
        message = f"Connector {pipeline.pipeline} has failed: {state.trace or 'its worker gives no reason'}"
        raise ConnectorError(full_stopped(message), hint="cdc -p FILE register")
    runs_by_sink = _read_progress(pipeline)
    if idle := [
        name
        for name in sinks
        if name not in runs_by_sink or runs_by_sink[name].state not in WORKING
    ]:
        consequence = f"views that are behind are waited for, {timeout_s:g} s at most (--timeout)"
        say(f"no `cdc run` is at work on {', '.join(idle)}: {consequence}")
    say("starting Spark")


def _read_progress(pipeline: "Pipeline") -> "Mapping[str, Progress]":
    """Read what runs do, by sink."""
    from cdc.kafka.topics import Topics
    from cdc.observe.run_log import read_runs

    with Topics(pipeline.kafka) as kafka:
        return read_runs(pipeline, kafka).progress


def find_stalled(
    progress: "Mapping[str, Progress]", tables: "Sequence[Table]"
) -> "dict[tuple[str, str], CdcError]":
    """Find the views that a run has set aside until somebody acts, by sink and table. Each has an
    error with the reason and the command.

    Runs that have ended don't count. A table that is set aside where documents are made holds up
    every view of documents made from it.
    """
    from cdc.apply.progress import LIVING
    from cdc.config.view_settings import STATE

    stalled: dict[tuple[str, str], CdcError] = {
        (sink, table): SinkError(full_stopped(reason), hint=hint, sink=sink, table=table)
        for sink, snapshot in progress.items()
        if snapshot.state in LIVING
        for table, (reason, hint) in snapshot.aside.items()
    }
    for view in tables:
        for name, _ in view.derivation.tables if view.derivation else ():
            if (STATE, name) in stalled:
                stalled.setdefault((STATE, view.qualified), stalled[STATE, name])
    return stalled


def report(results: "Sequence[Comparison]", as_json: bool) -> None:
    """Print the results of a comparison. Raises as `require_equal` does."""
    undecided = sum(result.undecided for result in results)
    document = {
        "equal": bool(results) and all(result.equal for result in results),
        "undecided": undecided,
        "views": [result.to_dict() for result in results],
    }
    answer(as_json, document, draw_comparisons(results))
    require_equal(results)


def require_equal(results: "Sequence[Comparison]") -> None:
    """Check that all views are proved equal.

    Raises:
        DivergenceError: a view differs from its source.
        UndecidedError: none differs, but one couldn't be proved equal, or there was none.
    """
    if different := [result for result in results if result.verdict == "differs"]:
        first = different[0]
        raise DivergenceError(
            f"{len(different)} of {len(results)} views differ from their source.",
            hint=f"cdc -p FILE rebuild {first.sink} --table {first.table}: it makes a view again, unseen by readers",
        )
    if not results:
        raise UndecidedError("There was no view to compare.", hint="cdc -p FILE status")
    if uncompared := [result for result in results if result.problem]:
        first = uncompared[0]
        names = ", ".join(f"{result.table} in {result.sink}" for result in uncompared)
        raise UndecidedError(
            f"{len(uncompared)} of {len(results)} views are waiting and weren't compared: {names}."
            f" {full_stopped(first.problem or '')}",
            hint=first.hint or "cdc -p FILE status",
            more=len(uncompared) - 1,
        )
    if undecided := sum(result.undecided for result in results):
        first = next(result for result in results if result.undecided)
        raise UndecidedError(
            f"{undecided:,} rows are proved neither equal nor different:"
            " they, or their view, changed at every comparison.",
            hint="run it again when fewer rows are written:"
            f" cdc -p FILE verify --sink {first.sink} --table {first.table}",
        )


def draw_comparisons(results: "Sequence[Comparison]") -> RenderableType:
    """Draw the results of `cdc verify`, and a sample of the differences."""
    grid = Grid("table", "sink", ">source", ">view", ">missing", ">extra", ">different", "")
    for result in results:
        counts = (
            result.source_rows,
            result.view_rows,
            result.missing,
            result.extra,
            result.different,
        )
        grid.add_row(
            result.table, result.sink, *(f"{count:,}" for count in counts), _verdict(result)
        )
    samples = []
    closed = []
    expired = []
    purged = []
    waiting = []
    for result in results:
        view = f"{result.table} in {result.sink}"
        for difference in result.sample:
            column = f", column {difference.column}" if difference.column else ""
            samples.append(f"{view}: {difference.kind} {difference.id}{column}")
        if result.closed:
            closed.append(f"{view}: {result.closed:,} windows are closed, and weren't compared")
        if result.expired:
            expired.append(f"{view}: {result.expired:,} rows have expired")
        if result.purged:
            purged.append(f"{view}: {result.purged:,} rows of purged events weren't compared")
        if result.problem:
            waiting.append(with_advice(f"{view}: {result.problem}", result.hint or ""))
    return Group(grid, *map(Text, [*samples, *closed, *expired, *purged, *waiting]))


def _verdict(result: "Comparison") -> Text:
    """Say the verdict; undecided rows are counted for a view that differs as well."""
    undecided = f"{result.undecided:,} undecided" if result.undecided else ""
    words = {
        "equal": "equal",
        "undecided": "not compared" if result.problem else undecided,
        "differs": ", ".join(filter(None, ("differs", undecided))),
    }
    return Text(words[result.verdict], VERDICTS[result.verdict])
