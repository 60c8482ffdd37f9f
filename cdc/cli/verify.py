"""`cdc verify`: compare the views with their source while others go on writing, once or again and again."""

import re
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from cdc.cli.console import Json, Master, out, print_error, print_json, say
from cdc.errors import CdcError, ConnectorError, DivergenceError, SettingsError, UndecidedError
from cdc.model.wording import full_stopped
from cdc.runtime import spark_on

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pyspark.sql import SparkSession

    from cdc.config.settings import Pipeline
    from cdc.verify.comparison import Comparison

UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def add_to(app: typer.Typer) -> None:
    app.command()(verify)


def verify(
    context: typer.Context,
    sink: Annotated[list[str] | None, typer.Option("--sink", help="Only this sink; may be given again.")] = None,
    table: Annotated[str | None, typer.Option(help="Only this table, schema.table.")] = None,
    sample: Annotated[
        float | None, typer.Option(help="Percent of the rows, others every time.", min=0.01, max=100)
    ] = None,
    since: Annotated[
        str | None, typer.Option(help="Only rows changed since then: 90s, 30m, 2h, 1d or a time with zone.")
    ] = None,
    rate: Annotated[float | None, typer.Option(help="Rows per second read from Postgres at most.", min=1)] = None,
    every: Annotated[str | None, typer.Option(help="Again and again, this long after the last: 30m, 1h.")] = None,
    metrics: Annotated[int | None, typer.Option(help="With --every: a port for Prometheus.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for a view that is behind.")] = 300.0,
    repair: Annotated[bool, typer.Option("--repair", help="Send what differs through the log again.")] = False,
    master: Master = "local[*]",
    as_json: Json = False,
) -> None:
    """Compare rows and columns of the views with Postgres; others may write meanwhile.

    Exit 8 when they differ, 10 when some rows couldn't be decided.
    """
    from cdc.verify.repair import repair as mend
    from cdc.verify.verification import Options
    from cdc.verify.verification import verify as run

    if metrics is not None and not every:
        raise SettingsError("--metrics is for a comparison that is made again and again.", hint="add --every 1h")
    pipeline, sinks, tables = context.obj.pipeline, context.obj.sinks(sink), context.obj.captured(table)

    def once(spark: "SparkSession") -> "list[Comparison]":
        options = Options(sample, _moment_ms(since) if since else None, rate, timeout)
        found = run(spark, pipeline, tables, sinks, options, tell=say)
        return mend(spark, pipeline, tables, sinks, options, found) if repair else found

    look_ahead(pipeline, [one.name for one in sinks], context.obj.runs, timeout)
    with spark_on(master) as spark:
        if every:
            _again(lambda: once(spark), seconds(every), metrics, context.obj.runs, as_json)
        report(once(spark), as_json)


def look_ahead(pipeline: "Pipeline", sinks: "Sequence[str]", runs: Path, timeout_s: float) -> None:
    """What would be waited for in vain is told before anything is. Only this machine's runs are known.

    Raises:
        ConnectorError: no change comes through the connector.
    """
    from cdc.apply.progress import WORKING, published
    from connectors.client import Connect

    with Connect(pipeline.connect) as connect:
        state = connect.state(pipeline.pipeline)
    if state.connector == "MISSING":
        what = f"There is no connector {pipeline.pipeline}: no change reaches the views."
        raise ConnectorError(what, hint="cdc -p FILE register")
    if "FAILED" in (state.connector, *state.tasks):
        what = f"Connector {pipeline.pipeline} has failed: {state.trace or 'its worker tells no more'}"
        raise ConnectorError(full_stopped(what), hint="cdc -p FILE register")
    known = published(runs)
    if idle := [name for name in sinks if name not in known or known[name].state not in WORKING]:
        waits = f"what is behind there is waited for, {timeout_s:g} s at most (--timeout)"
        say(f"no `cdc run` is known to be at work on {', '.join(idle)}: {waits}")
    say("starting Spark")


def _again(
    once: "Callable[[], list[Comparison]]", pause_s: float, port: int | None, runs: Path, as_json: bool
) -> NoReturn:
    """Until somebody ends it: what goes wrong once is told and counted."""
    from cdc.apply.progress import published
    from cdc.observe.metrics import Metrics

    metrics = Metrics(port) if port is not None else None
    while True:
        try:
            found = once()
            if metrics:
                metrics.tell(found)
                metrics.tell_restarts(published(runs).values())
            report(found, as_json)
        except CdcError as error:
            if metrics and not isinstance(error, DivergenceError | UndecidedError):
                metrics.failed()
            print_error(error)
        time.sleep(pause_s)


def seconds(text: str) -> float:
    """`90s`, `30m`, `2h`, `1d`. Raises SettingsError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if not found:
        raise SettingsError(f"{text!r} is no length of time.", hint="a number and a unit: 90s, 30m, 2h, 1d")
    return float(found[1]) * UNITS_S[found[2]]


def _moment_ms(text: str) -> int:
    """Unix milliseconds of a time, or of so long ago."""
    if text[-1:] in UNITS_S:
        return int((time.time() - seconds(text)) * 1000)
    try:
        at = datetime.fromisoformat(text)
    except ValueError as error:
        raise SettingsError(f"{text!r} is no time.", hint="2h for two hours ago, or 2026-01-31T12:00+01:00") from error
    return int((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() * 1000)


def report(found: "Sequence[Comparison]", as_json: bool) -> None:
    """Print what was found.

    Raises:
        DivergenceError: a view differs from its source.
        UndecidedError: none differs, but one couldn't be proved equal, or there was none.
    """
    from cdc.cli import render

    undecided = sum(one.undecided for one in found)
    if as_json:
        views = [one.to_dict() for one in found]
        print_json({"equal": bool(found) and all(one.equal for one in found), "undecided": undecided, "views": views})
    else:
        out.print(render.comparisons(found))
    if wrong := [one for one in found if one.verdict == "differs"]:
        raise DivergenceError(
            f"{len(wrong)} of {len(found)} views differ from their source.",
            hint=f"cdc -p FILE rebuild {wrong[0].sink} --table {wrong[0].table} makes a view again, unseen by readers",
        )
    if not found:
        raise UndecidedError("There was no view to compare.", hint="cdc -p FILE status")
    if undecided:
        first = next(one for one in found if one.undecided)
        raise UndecidedError(
            f"{undecided:,} rows are proved neither equal nor different: they, or their view, changed at every look.",
            hint=f"look again when less is written: cdc -p FILE verify --sink {first.sink} --table {first.table}",
        )
