"""Verb `cdc run`: apply changes to the views, sink by sink, and keep the documents of several tables. Verbs
`cdc pause`, `cdc resume`: have it apply nothing to a sink for a while.
"""

import os
import time
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import structlog
import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from cdc.cli.console import (
    Json,
    Master,
    SinkName,
    SinkNames,
    answer,
    err,
    print_error,
    print_json,
    say,
)
from cdc.cli.health import observed
from cdc.cli.operations import recorded
from cdc.cli.screen import Grid, with_advice, with_since
from cdc.config.view_settings import STATE
from cdc.errors import SettingsError
from cdc.model.trace import kind
from cdc.model.wording import UNKNOWN, clock, duration
from cdc.runtime.servers import spark_on
from cdc.runtime.streams import Streams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from threading import Event

    from cdc.apply.progress import Progress
    from cdc.apply.supervisor import AfterError
    from cdc.errors import CdcError
    from cdc.runtime.context import Context

LOCAL = f"local[{3 * (os.cpu_count() or 2)}]"
"""Three slots a core: most of a task is waiting, and a long warehouse task must not hold up the
cache.
"""
OCCASIONALLY_S = 10.0
"""Seconds between two lines about the same sink, where only its numbers change and output is no
terminal.
"""
LOOPBACK = "127.0.0.1"
HUNG_S = 10.0
"""Seconds after which a measurement counts as unknown."""
COLOURS = {
    "running": "green",
    "caught up": "green",
    "paused": "yellow",
    "stopped": "dim",
    "waiting": "yellow",
    "failed": "red",
}
log = structlog.get_logger()


def run(
    context: typer.Context,
    sink: SinkNames = None,
    until_caught_up: Annotated[
        bool, typer.Option(help="Stop when everything in the topics is applied.")
    ] = False,
    for_s: Annotated[
        float | None, typer.Option("--for", help="Stop after this many seconds.")
    ] = None,
    master: Master = LOCAL,
    metrics: Annotated[
        int | None,
        typer.Option(help="Serve /metrics, /livez and /readyz on this port."),
    ] = None,
    metrics_address: Annotated[
        str,
        typer.Option(
            help="The address of --metrics. On any but a loopback one others can read it, without a token."
        ),
    ] = LOOPBACK,
    fail_fast: Annotated[
        bool,
        typer.Option(
            "--fail-fast",
            help="End with the first sink that fails, instead of starting it again after a pause.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Apply changes to the views until stopped.

    Ctrl-C or SIGTERM stops it, after the batch that is being applied. A sink that fails is started
    again after a pause of 10 s, which doubles up to 10 min; the others go on.
    """
    from cdc.apply.supervisor import stop_on_signal

    require_port(metrics, metrics_address)
    with stop_on_signal() as stopping:
        try:
            limits = RunLimits(
                stopping, until_caught_up, for_s, metrics, metrics_address, fail_fast
            )
            progress, errors = _apply(context.obj, sink, master, limits, quiet=as_json)
        except Exception as error:
            if not stopping.is_set():
                raise
            # The signal also ends children of this process, so starting fails at one of them: that
            # is no error.
            log.info("stopped_while_starting", error=kind(error))
            progress = []
            errors = []
    if as_json:
        print_json({"sinks": progress})
    if errors:
        for failure in errors[1:]:
            print_error(failure)
        raise errors[0]


def require_port(port: int | None, address: str) -> None:
    """Refuse --metrics-address without --metrics. Raises SettingsError."""
    if port is None and address != LOOPBACK:
        raise SettingsError(
            "--metrics-address is for the port of --metrics.",
            hint=f"add --metrics PORT: --metrics 9104 --metrics-address {address}",
        )


@dataclass(frozen=True)
class RunLimits:
    """Limits of a run: a signal, having caught up, or a number of seconds; and where it is served."""

    stopping: "Event"
    until_caught_up: bool
    for_s: float | None
    port: int | None = None
    """Of /metrics and the probes; None: they aren't served."""
    address: str = LOOPBACK
    fail_fast: bool = False
    """Whether it ends with the first sink that fails."""

    @property
    def after_error(self) -> "AfterError":
        """What follows the error that has ended a stream."""
        from cdc.apply.supervisor import AfterError

        if self.fail_fast:
            return AfterError.END_RUN
        return AfterError.END_STREAM if self.until_caught_up else AfterError.RESTART

    def is_over(self, spark_lives: "Callable[[], bool]") -> "Callable[[], bool]":
        """Build the check whether the run ends now: its seconds are over, or Spark is gone. A stream that
        is paused, or waits for its sink, doesn't touch Spark, so it would outlive it for ever.
        """
        end = float("inf") if self.for_s is None else time.monotonic() + self.for_s
        return lambda: time.monotonic() > end or not spark_lives()


def _apply(
    context: "Context", chosen: list[str] | None, master: str, limits: RunLimits, *, quiet: bool
) -> "tuple[list[Progress], list[CdcError]]":
    """Run the streams of the sinks to their end: their progress, and the errors that ended some of
    them.
    """
    from cdc.apply.supervisor import supervise
    from cdc.capture.lookout import looking_out
    from cdc.capture.vanished import remove_vanished
    from cdc.control import registrations
    from cdc.control.definitions import compare_periodically
    from cdc.kafka.topic_setup import check_topics
    from cdc.kafka.topics import Topics
    from cdc.observe.run_log import RunLog
    from cdc.spark.session import is_running

    stopping = limits.stopping
    pipeline = context.pipeline
    keeps_documents = bool(pipeline.views) and (not chosen or STATE in chosen)
    names = [name for name in chosen or pipeline.sinks if name != STATE or not pipeline.views]
    sinks = context.sinks(names) if names else []
    with Topics(pipeline.kafka) as kafka:
        check_topics(kafka, pipeline)
        registrations.refuse_changed(registrations.read(kafka, pipeline), pipeline)
    if stopping.is_set():
        return [], []
    say("starting Spark; the first rows are applied in some 20 seconds")
    with (
        spark_on(master, context.executors(names)) as spark,
        observed(context, limits.port, limits.address, partial(is_running, spark)) as serve,
    ):
        if limits.until_caught_up:
            remove_vanished(spark, pipeline)
        wiring = Streams(context)
        streams = [] if stopping.is_set() else wiring.of_sinks(spark, sinks)
        documents = (
            [wiring.of_documents(spark)] if keeps_documents and not stopping.is_set() else []
        )
        with (
            compare_periodically(context.load) as uncompared_s,
            looking_out(spark, context.load),
            nullcontext() if limits.until_caught_up else wiring.proving(spark, names),
            closing(RunLog(pipeline)) as run_log,
            show_progress(err, quiet=quiet) as show,
        ):

            def tick(progress: "list[Progress]") -> None:
                run_log.publish(progress, uncompared_s())
                serve(progress)
                show(progress)

            # A run that ends has to send documents before sinks look at what there is for them.
            stages = [documents, streams] if limits.until_caught_up else [[*streams, *documents]]
            errors = list["CdcError"]()
            for stage in stages:
                if stage and not (errors and limits.fail_fast):
                    errors += supervise(
                        stage,
                        stopping,
                        until_caught_up=limits.until_caught_up,
                        is_over=limits.is_over(partial(is_running, spark)),
                        after_error=limits.after_error,
                        on_tick=tick,
                    )
    for sink in sinks:
        sink.close()
    return [stream.progress for stream in (*streams, *documents)], errors


def draw_progress(sinks: "Sequence[Progress]") -> RenderableType:
    """Draw one line per sink, as `cdc run` shows it on a terminal, and what the sinks wait for."""
    grid = Grid("sink", "state", ">changes", ">per s", ">waiting", ">behind for")
    for sink in sinks:
        state = Text(sink.state, COLOURS.get(sink.state, ""))
        grid.add_row(
            sink.sink,
            state,
            f"{sink.applied.rows:,}",
            f"{sink.rows_per_s:,.0f}",
            waiting_text(sink),
            _behind(sink),
        )
    return Group(grid, *(Text(trouble, "yellow") for sink in sinks for trouble in _troubles(sink)))


def waiting_text(sink: "Progress") -> str:
    measured = sink.lag_records is not None and sink.looked_s < HUNG_S
    return f"{sink.lag_records:,}" if measured else UNKNOWN


def _behind(sink: "Progress") -> str:
    if sink.lag_seconds is None or sink.looked_s >= HUNG_S:
        return UNKNOWN
    return duration(sink.lag_seconds) if sink.lag_records else "-"


def _troubles(sink: "Progress") -> "Iterator[str]":
    """Say what a sink and its tables wait for, and since when."""
    if sink.looked_s >= HUNG_S and sink.state == "running":
        yield f"{sink.sink} hasn't answered for {duration(sink.looked_s)}"
    if sink.error:
        yield with_since(
            f"{sink.sink}: {with_advice(sink.error, sink.hint or '')}", sink.state_since
        )
    for table, (message, hint) in sink.aside.items():
        yield with_since(
            f"{sink.sink}: {table} waits: {with_advice(message, hint)}",
            sink.aside_since.get(table),
        )


@contextmanager
def show_progress(
    console: Console, *, quiet: bool
) -> "Iterator[Callable[[Sequence[Progress]], None]]":
    """Show the progress of all sinks: a live table on a terminal, elsewhere a dated line for each
    change.
    """
    if quiet:
        yield lambda _: None
    elif console.is_terminal:
        with Live(console=console, refresh_per_second=4) as screen:
            yield lambda sinks: screen.update(draw_progress(sinks))
    else:
        progress_log = ProgressLog()

        def show(sinks: "Sequence[Progress]") -> None:
            for line in progress_log.lines(sinks, time.time()):
                console.print(line, soft_wrap=True)

        yield show


class ProgressLog:
    """Chooses lines for a log: a new state or error at once, numbers every ten seconds at most."""

    def __init__(self) -> None:
        self._shown: dict[str, tuple[Any, Any, float]] = {}

    def lines(self, sinks: "Sequence[Progress]", now: float) -> "Iterator[str]":
        """Yield the lines that are due at `now`, Unix seconds. Called at every tick of `cdc
        run`.
        """
        for sink in sinks:
            state = (sink.state, sink.error, tuple(sink.aside.items()), sink.looked_s >= HUNG_S)
            numbers = (sink.applied.rows, waiting_text(sink))
            shown_state, shown_numbers, shown_at = self._shown.get(sink.sink, (None, None, 0.0))
            if state != shown_state or (
                numbers != shown_numbers and now - shown_at >= OCCASIONALLY_S
            ):
                self._shown[sink.sink] = state, numbers, now
                yield f"{clock(now)} {_line(sink)}"
                yield from (
                    f"{clock(now)} {trouble}"
                    for trouble in (_troubles(sink) if state != shown_state else ())
                )


def _line(sink: "Progress") -> str:
    behind = "" if _behind(sink) in (UNKNOWN, "-") else f" for {_behind(sink)}"
    applied = f"{sink.applied.rows:,} changes applied, {sink.rows_per_s:,.0f}/s"
    return f"{sink.sink} {sink.state}: {applied}; waiting: {waiting_text(sink)}{behind}"


@recorded("pause")
def pause(context: typer.Context, sink: SinkName, as_json: Json = False) -> None:
    """Apply nothing to a sink until `resume`; other sinks go on.

    It takes effect within seconds, after the batch at hand, and holds for every host and through
    restarts.
    """
    from cdc.control.operations import current_operator
    from cdc.generations import pause as pauses
    from cdc.kafka.topics import Topics

    pipeline = context.obj.pipeline
    with Topics(pipeline.kafka) as kafka:
        current = pauses.pause(pipeline, kafka, sink, current_operator())
    document = {"sink": sink, "paused_since": current.since, "paused_by": current.by}
    answer(as_json, document, f"{sink} is paused since {clock(current.since)} by {current.by}")


@recorded("resume")
def resume(context: typer.Context, sink: SinkName, as_json: Json = False) -> None:
    """Let a paused sink go on from where it stopped."""
    from cdc.generations import pause as pauses
    from cdc.kafka.topics import Topics

    pipeline = context.obj.pipeline
    with Topics(pipeline.kafka) as kafka:
        previous = pauses.resume(pipeline, kafka, sink)
    outcome = "goes on from where it stopped" if previous else "wasn't paused"
    answer(as_json, {"sink": sink, "resumed": previous is not None}, f"{sink} {outcome}")
