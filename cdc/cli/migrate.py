"""Verb `cdc migrate`: prepare Postgres, or print what that would do, or what an administrator has
to run.
"""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from cdc.cli.console import Json, out, print_json
from cdc.cli.operations import recorded
from cdc.errors import SettingsError

if TYPE_CHECKING:
    from cdc.postgres.source import Connection
    from cdc.readiness.facts import SourceRequirements
    from cdc.runtime.context import Context

Sample = Annotated[bool, typer.Option("--sample", help="Create the tables of the sample as well.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print what would be done; change nothing.")
]
Sql = Annotated[
    bool, typer.Option("--sql", help="Print what is missing as SQL for psql; change nothing.")
]


def add_to(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    changes = recorded("migrate", lambda options: not (options["dry_run"] or options["sql"]))
    app.command()(changes(migrate))


def migrate(
    context: typer.Context,
    sample: Sample = False,
    dry_run: DryRun = False,
    sql: Sql = False,
    as_json: Json = False,
) -> None:
    """Prepare Postgres for the pipeline.

    Creates the control schema, the connector's role, the publication and the triggers. What exists
    already is left as it is, so running it twice is safe.
    """
    from cdc.postgres import catalog, source, table_survey

    if sample and (dry_run or sql):
        raise SettingsError(
            "--sample makes the tables that --dry-run and --sql look at.",
            hint="run it without them",
        )
    catalog_context = context.obj.from_catalog()
    with source.connect(catalog_context.load().source.dsn) as connection:
        if not (sql or dry_run):
            return _run(catalog_context, connection, sample, as_json)
        catalog.refuse_published(connection, catalog_context.pipeline)
        catalog_context.require_supported_columns(connection)
        print_missing = _print_sql if sql else _print_plan
        return print_missing(
            connection, table_survey.requirements(catalog_context.pipeline), as_json
        )


def _run(context: "Context", connection: "Connection", sample: bool, as_json: bool) -> None:
    from cdc import migrations
    from cdc.postgres import catalog, table_survey

    applied = migrations.migrate(connection)
    if sample:
        applied |= migrations.migrate(connection, migrations.SAMPLE)
    catalog.refuse_published(connection, context.pipeline)
    findings = catalog.find_tables(connection, context.pipeline).findings
    context.require_supported_columns(connection)
    now = [name for name, is_new in applied.items() if is_new]
    try:
        messages = migrations.prepare_source(
            connection, table_survey.requirements(context.pipeline)
        )
    except migrations.Unprivileged as error:
        if not as_json:
            _print_lines([*(f"applied {name}" for name in now), *error.messages])
        raise
    # Once the tables have their replica identity.
    context.check_views(connection)
    if as_json:
        return print_json(
            {"applied": now, "recorded": list(applied), "done": messages, "findings": findings}
        )
    _print_lines([*(f"applied {name}" for name in now), *messages])
    if not now and all(line.startswith("note: ") for line in messages):
        out.print("nothing to do")
    _print_lines(
        [f"{finding.severity:<9}{finding.message} ({finding.code})" for finding in findings]
    )
    return None


def _print_plan(
    connection: "Connection", requirements: "SourceRequirements", as_json: bool
) -> None:
    from cdc import migrations

    missing = migrations.plan(connection, requirements)
    if as_json:
        return print_json(
            {
                "would": [
                    {"done": statement.lines, "sql": statement.text(connection)}
                    for statement in missing
                ]
            }
        )
    out.print(
        "Nothing has been done. What cdc migrate would say, and run:"
        if missing
        else "nothing to do"
    )
    _print_lines(
        [
            line
            for statement in missing
            for line in migrations.describe_statement(connection, statement)
        ]
    )
    return None


def _print_sql(connection: "Connection", requirements: "SourceRequirements", as_json: bool) -> None:
    from cdc import migrations

    text = migrations.script(connection, requirements, migrations.plan(connection, requirements))
    if as_json:
        return print_json({"sql": text})
    sys.stdout.write(text)
    return None


def _print_lines(lines: list[str]) -> None:
    for line in lines:
        out.print(line, highlight=False, markup=False, soft_wrap=True)
