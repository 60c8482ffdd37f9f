"""Verb `cdc verify`: compare the views with their source while applications write, once or
repeatedly.
"""

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, NoReturn

import structlog
import typer

from cdc.cli.console import Json, Master, MetricsAddress, out, print_error, print_json, say
from cdc.cli.operation.log import recorded
from cdc.cli.times import moment_ms, seconds
from cdc.errors import (
    CdcError,
    ConnectorError,
    DivergenceError,
    SettingsError,
    SinkError,
    UndecidedError,
)
from cdc.model.trace import trace
from cdc.model.wording import full_stopped
from cdc.postgres import table_survey
from cdc.runtime.servers import spark_on

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pyspark.sql import SparkSession

    from cdc.apply.progress import Progress
    from cdc.config.settings import Pipeline
    from cdc.model.table import Table
    from cdc.observe.http_server import Listener
    from cdc.observe.metrics import Metrics
    from cdc.runtime.context import Context
    from cdc.verify.comparison import Comparison

SinkNames = Annotated[list[str] | None, typer.Option("--sink", help="Only this sink. Repeatable.")]
TableName = Annotated[str | None, typer.Option(help="Only this table, as schema.table.")]
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
Every = Annotated[str | None, typer.Option(help="Repeat, with a pause of this length: 30m, 1h.")]
MetricsPort = Annotated[
    int | None, typer.Option(help="With --every: port from which Prometheus fetches the results.")
]
Timeout = Annotated[float, typer.Option(help="Seconds to wait for a view that is behind.")]
Repair = Annotated[
    bool, typer.Option("--repair", help="Send rows that differ through the log again.")
]
log = structlog.get_logger()


def add_to(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command()(recorded("verify", lambda options: options["repair"])(verify))


def verify(
    context: typer.Context,
    sink: SinkNames = None,
    table: TableName = None,
    sample: Sample = None,
    since: Since = None,
    rate: Rate = None,
    every: Every = None,
    metrics: MetricsPort = None,
    metrics_address: MetricsAddress = "127.0.0.1",
    timeout: Timeout = 300.0,
    repair: Repair = False,
    master: Master = "local[*]",
    as_json: Json = False,
) -> None:
    """Compare rows and columns of the views with Postgres.

    Applications may write meanwhile. Exit 8 when a view differs, 10 when some rows couldn't be
    decided, or a view couldn't be compared.
    """
    from cdc.observe.metrics import Metrics
    from cdc.spark.session import exit_error
    from cdc.verify.barrier import StalledViews
    from cdc.verify.comparison import Options
    from cdc.verify.repair import repair as repair_differences
    from cdc.verify.verification import verify as verify_views

    listener = _listener(metrics, metrics_address, every)
    pipeline, sinks = context.obj.pipeline, context.obj.sinks(sink)
    names = [destination.name for destination in sinks]
    _select(context.obj, table, names)  # What can't be selected is told before Spark has started.

    def compare(spark: "SparkSession", current: "Context") -> "list[Comparison]":
        chosen = current.sinks(sink)
        tables, waiting = _select(current, table, [destination.name for destination in chosen])
        options = Options(sample, moment_ms(since) if since else None, rate, timeout)
        stalled = StalledViews(lambda: find_stalled(_read_progress(current.pipeline), tables))
        results = verify_views(
            spark, current.pipeline, tables, chosen, options, tell=say, stalled=stalled
        )
        if repair:
            results = repair_differences(spark, current.pipeline, tables, chosen, options, results)
        return [*results, *waiting]

    check_connector(pipeline, names, timeout)
    modules = [*context.obj.executors(names), "cdc.verify.census"]
    with spark_on(master, modules) as spark:
        if not every:
            report(compare(spark, context.obj), as_json)
            return
        metrics_server = Metrics(listener) if listener else None

        def compare_anew() -> "list[Comparison]":
            # Tables and views are those of the file and of Postgres at each comparison.
            results = compare(spark, replace(context.obj))
            if metrics_server:
                metrics_server.publish_restarts(_read_progress(pipeline).values())
            return results

        def has_ended() -> bool:
            return exit_error(spark) is not None

        repeat(compare_anew, seconds(every), names, metrics_server, has_ended, as_json=as_json)


def _listener(port: int | None, address: str, every: str | None) -> "Listener | None":
    """Read where the results are served. Raises SettingsError."""
    from cdc.observe.http_server import read_listener

    if port is not None and not every:
        raise SettingsError(
            "--metrics is for a comparison that is repeated.", hint="add --every 1h"
        )
    return read_listener(port, address)


def _select(
    context: "Context", name: str | None, sinks: "Sequence[str]"
) -> "tuple[Sequence[Table], list[Comparison]]":
    """Select what is compared, and say of views that wait why they aren't. Raises SettingsError."""
    from cdc.verify.comparison import Comparison

    waiting = context.waiting_views
    if name is not None and name not in waiting:
        return context.select_views(name), []
    views = [view for view in context.fitting_views if view.qualified not in waiting]
    unfit = [
        Comparison(
            sink,
            view.qualified,
            problem=waiting[view.qualified][0],
            hint=waiting[view.qualified][1],
        )
        for view in table_survey.views_by_name_only(context.pipeline)
        for sink in sinks
        if view.qualified in waiting and name in (None, view.qualified) and view.is_in(sink)
    ]
    return [] if name else [*context.tables, *views], unfit


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
    if "FAILED" in (state.connector, *state.tasks):
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


def repeat(
    compare: "Callable[[], list[Comparison]]",
    pause_s: float,
    sinks: "Sequence[str]",
    metrics: "Metrics | None",
    spark_has_ended: "Callable[[], bool]",
    *,
    as_json: bool,
) -> NoReturn:
    """Compare until somebody ends it, with a pause in seconds. An error, of whatever class, is
    printed and counted, and the next comparison is made all the same, unless Spark has ended: then
    no other could be made, and the error is raised.
    """
    while True:
        try:
            results = compare()
            if metrics:
                metrics.publish_comparisons(results)
            report(results, as_json)
        except (DivergenceError, UndecidedError) as error:
            print_error(error)
        except Exception as error:
            if metrics:
                metrics.count_failure()
            if not isinstance(error, CdcError) and spark_has_ended():
                raise
            print_error(_explained(error, sinks))
        time.sleep(pause_s)


def _explained(error: Exception, sinks: "Sequence[str]") -> CdcError:
    """Give an error of a library a class of ours; the trace of an unexpected one is logged."""
    from cdc.spark.failures import explain

    failure = explain(error, " or ".join(sinks))
    if not isinstance(error, CdcError):
        log.error("comparison_failed", exception=trace(error))
    return failure


def report(results: "Sequence[Comparison]", as_json: bool) -> None:
    """Print the results of a comparison.

    Raises:
        DivergenceError: a view differs from its source.
        UndecidedError: none differs, but one couldn't be proved equal, or there was none.
    """
    from cdc.cli.screens.verify import draw_comparisons

    undecided = sum(result.undecided for result in results)
    if as_json:
        views = [result.to_dict() for result in results]
        print_json(
            {
                "equal": bool(results) and all(result.equal for result in results),
                "undecided": undecided,
                "views": views,
            }
        )
    else:
        out.print(draw_comparisons(results))
    if different := [result for result in results if result.verdict == "differs"]:
        first = different[0]
        raise DivergenceError(
            f"{len(different)} of {len(results)} views differ from their source.",
            hint=f"cdc -p FILE rebuild {first.sink} --table {first.table}: it makes a view again, unseen by readers",
            code="view-differs",
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
    if undecided:
        first = next(result for result in results if result.undecided)
        raise UndecidedError(
            f"{undecided:,} rows are proved neither equal nor different:"
            " they, or their view, changed at every comparison.",
            hint="run it again when fewer rows are written:"
            f" cdc -p FILE verify --sink {first.sink} --table {first.table}",
        )
