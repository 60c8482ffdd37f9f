"""Verb `cdc chaos`: break a pipeline on a staging system on purpose, and see that its views are right again."""

import signal
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from cdc.cli.console import Json, Master, answer, err, out, say
from cdc.cli.operations import recorded
from cdc.cli.verify import Timeout, check_connector, draw_comparisons, require_equal
from cdc.errors import (
    CdcError,
    DivergenceError,
    KafkaUnavailable,
    SettingsError,
    SinkUnavailable,
    SourceUnavailable,
    UndecidedError,
)
from cdc.postgres import table_survey
from cdc.runtime.servers import server_faults, spark_on

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pyspark.sql import SparkSession

    from cdc.chaos.nemesis import Nemesis
    from cdc.config.settings import Pipeline
    from cdc.model.position import Position
    from cdc.model.table import Table
    from cdc.runtime.context import Context
    from cdc.sink.contract import Fault, Sink

MAY_PASS = (SourceUnavailable, KafkaUnavailable, SinkUnavailable, SettingsError)
"""Errors of servers that are coming back, and of a run that is."""


@recorded("chaos", lambda options: not options["list_faults"])
def chaos(
    context: typer.Context,
    minutes: Annotated[
        float, typer.Option(help="For how long faults are fired, each at least once.", min=0)
    ] = 10.0,
    seed: Annotated[
        int, typer.Option(help="The same seed fires the same faults in the same order.")
    ] = 1,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Only faults whose name contains this. Repeatable."),
    ] = None,
    supervised: Annotated[
        bool,
        typer.Option(
            "--supervised",
            help="Also kill `cdc run` on this host. A supervisor, such as systemd, must start it again.",
        ),
    ] = False,
    list_faults: Annotated[
        bool, typer.Option("--list", help="List the faults, and fire none.")
    ] = False,
    timeout: Timeout = 300.0,
    master: Master = "local[*]",
    as_json: Json = False,
) -> None:
    """Break a pipeline on a staging system on purpose, and check that its views recover.

    Needs `staging: true` in the file, `cdc run` at work, and an application that writes. Exit 8 when
    a view differs from Postgres, or isn't current in time after a fault.
    """
    from cdc.chaos.nemesis import Nemesis

    pipeline = context.obj.load()
    if not (pipeline.staging or list_faults):
        raise SettingsError(
            f"{context.obj.path} doesn't mark {pipeline.pipeline} as a pipeline that may be broken.",
            hint="write `staging: true` into the file of a staging system, and never where people rely on the"
            " views: cdc chaos ends connections, kills processes and keeps writes away",
        )
    sinks = context.obj.sinks(None)
    tables = context.obj.viewed_tables
    faults = _choose(context.obj, tables, sinks, only or [], supervised=supervised)
    if list_faults:
        answer(as_json, {"faults": list(faults)}, "\n".join(faults))
        return
    pipeline = context.obj.pipeline
    _require_run(pipeline)
    check_connector(pipeline, list(pipeline.sinks), timeout)
    show = err.print if as_json else out.print
    problem: CdcError | None = None
    modules = [*context.obj.executors(list(pipeline.sinks)), "cdc.verify.census"]
    with spark_on(master, modules) as spark, _interrupted_by_signals():
        recover = partial(_recover, pipeline, tables, sinks, timeout)
        compare = partial(_compare, spark, pipeline, tables, sinks, timeout, show)
        nemesis = Nemesis(faults, seed, recover, compare, show)
        try:
            recover()
            ends = _log_ends(pipeline, tables)
            nemesis.play(minutes * 60)
            _require_proof(nemesis, _log_ends(pipeline, tables) != ends)
        except CdcError as error:
            problem = error
    verdict = _verdict(problem)
    count = f"{nemesis.fired.total()} faults of {len(nemesis.fired)} kinds"
    if nemesis.skipped:
        count += f", {len(nemesis.skipped)} skipped"
    line = f"chaos: {verdict} · seed {seed} · {count} · {nemesis.seconds:.0f} s"
    document = {
        "verdict": verdict,
        "seed": seed,
        "seconds": round(nemesis.seconds, 1),
        "faults": nemesis.recoveries,
        "skipped": nemesis.skipped,
    }
    answer(as_json, document, line)
    if problem:
        raise problem


def _choose(
    context: "Context",
    tables: "Sequence[Table]",
    sinks: "Sequence[Sink]",
    words: "Sequence[str]",
    *,
    supervised: bool,
) -> "dict[str, Fault]":
    """Find the faults that can be fired from here, by name. Raises SettingsError if `words` leave none."""
    from cdc.chaos import faults
    from cdc.sink.contract import Breakable

    pipeline = context.load()
    found = {**faults.of_pipeline(pipeline, supervised=supervised)}
    for sink in sinks:
        if isinstance(sink, Breakable):
            found |= sink.faults(table_survey.tables_in([sink.name], tables))
    found |= server_faults(context.state, pipeline, say)
    chosen = {
        name: fault
        for name, fault in found.items()
        if not words or any(word in name for word in words)
    }
    if not chosen:
        raise SettingsError(
            f"No fault has {' or '.join(words)} in its name.", hint=f"there are: {', '.join(found)}"
        )
    return chosen


def _require_run(pipeline: "Pipeline") -> None:
    """Raise SettingsError for a sink on which no run is at work."""
    from cdc.kafka.topics import Topics
    from cdc.observe.run_log import read_runs

    with Topics(pipeline.kafka) as kafka:
        living = read_runs(pipeline, kafka).living
    if idle := [name for name in pipeline.sinks if name not in living]:
        raise SettingsError(
            f"No `cdc run` applies changes to {', '.join(idle)}.",
            hint="start it in another terminal, as in production: cdc -p FILE run",
        )


@contextmanager
def _interrupted_by_signals() -> "Iterator[None]":
    """Have SIGTERM, and the end of the terminal, end the block as Ctrl-C does: a fault is undone first."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    former = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
    try:
        yield
    except KeyboardInterrupt:
        say("interrupted; no fault is left behind")
        raise
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _recover(
    pipeline: "Pipeline", tables: "Sequence[Table]", sinks: "Sequence[Sink]", limit_s: float
) -> None:
    """Wait until every view holds what is committed now. Raises DivergenceError after `limit_s`."""
    from cdc.verify.barrier import WaitOptions, wait_until_current

    deadline = time.monotonic() + limit_s
    while True:
        remaining_s = max(0.0, deadline - time.monotonic())
        try:
            wait_until_current(pipeline, tables, sinks, WaitOptions(remaining_s, report=say))
            # Without a new change, views are current without a run as well.
            _require_run(pipeline)
            return
        except CdcError as error:
            if not isinstance(error, MAY_PASS):
                raise DivergenceError(
                    f"A view can't become current. {error.message}", hint=error.hint
                ) from None
            if not remaining_s:
                raise DivergenceError(
                    f"Not every view is current within {limit_s:g} s. {error.message}",
                    hint=error.hint,
                ) from None
        time.sleep(1)


def _compare(
    spark: "SparkSession",
    pipeline: "Pipeline",
    tables: "Sequence[Table]",
    sinks: "Sequence[Sink]",
    timeout: float,
    show: "Callable[..., object]",
) -> None:
    """Compare as `cdc verify` does. Raises DivergenceError, UndecidedError."""
    from cdc.verify.comparison import Options
    from cdc.verify.verification import verify

    options = Options(timeout_s=timeout)
    results = verify(spark, pipeline, tables, sinks, options, report=say)
    try:
        require_equal(results)
    except CdcError:
        show(draw_comparisons(results))
        raise


def _log_ends(pipeline: "Pipeline", tables: "Sequence[Table]") -> "Mapping[str, Position]":
    from cdc.kafka.topics import Topics

    with Topics(pipeline.kafka) as kafka:
        return kafka.log_ends([table.topic for table in tables])


def _require_proof(nemesis: "Nemesis", has_changes: bool) -> None:
    """Raise UndecidedError for a run in which nothing happened."""
    if not nemesis.fired:
        raise UndecidedError(
            "No fault could be fired, so nothing is proved.", hint="the lines above say why"
        )
    if not has_changes:
        raise UndecidedError(
            "Nobody wrote to the tables during the run, so it proves nothing.",
            hint="have your application write to them, then run it again",
        )


def _verdict(problem: CdcError | None) -> str:
    if problem is None:
        return "equal"
    word = "NOT EQUAL" if isinstance(problem, DivergenceError) else "UNDECIDED"
    return f"{word}: {problem.message.removesuffix('.')}"
