"""Verb `cdc migrate`: prepare Postgres, or print what that would do, or what an administrator has
to run.
"""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from cdc.cli.console import Json, answer, print_json, print_lines
from cdc.cli.operations import recorded
from cdc.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cdc.migrations.statement import Statement
    from cdc.postgres.source import Connection
    from cdc.runtime.context import Context

Sample = Annotated[bool, typer.Option("--sample", help="Create the tables of the sample as well.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print what would be done; change nothing.")
]
Sql = Annotated[
    bool, typer.Option("--sql", help="Print what is missing as SQL for psql; change nothing.")
]


@recorded("migrate", lambda options: not (options["dry_run"] or options["sql"]))
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
    from cdc import migrations
    from cdc.postgres import catalog, source, table_survey

    if sample and (dry_run or sql):
        raise SettingsError(
            "--sample makes the tables that --dry-run and --sql look at.",
            hint="run it without them",
        )
    catalog_context = context.obj.from_catalog(as_owner=True)
    with source.connect(catalog_context.load().source.dsn) as connection:
        if not (sql or dry_run):
            return _run(catalog_context, connection, sample, as_json)
        catalog.refuse_published(connection, catalog_context.pipeline)
        catalog_context.require_supported_columns(connection)
        requirements = table_survey.requirements(catalog_context.pipeline, connection.info.user)
        missing = migrations.plan(connection, requirements)
        if not sql:
            return _print_plan(connection, missing, as_json)
        text = migrations.script(connection, requirements, missing)
        if as_json:
            return print_json({"sql": text})
        sys.stdout.write(text)
        return None


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
    applied_lines = [f"applied {name}" for name in now]
    try:
        messages = migrations.prepare_source(
            connection,
            table_survey.requirements(context.pipeline, connection.info.user),
        )
    except migrations.Unprivileged as error:
        if not as_json:
            print_lines([*applied_lines, *error.messages])
        raise
    # Once the tables have their replica identity.
    context.check_views(connection)
    if as_json:
        return print_json(
            {"applied": now, "recorded": list(applied), "done": messages, "findings": findings}
        )
    lines = [*applied_lines, *messages]
    if not now and all(line.startswith("note: ") for line in messages):
        lines.append("nothing to do")
    lines += [f"{finding.severity:<9}{finding.message} ({finding.code})" for finding in findings]
    return print_lines(lines)


def _print_plan(connection: "Connection", missing: "Sequence[Statement]", as_json: bool) -> None:
    from cdc.migrations import describe_statement

    would = [{"done": entry.lines, "sql": entry.text(connection)} for entry in missing]
    heading = "Nothing has been done. What cdc migrate would say, and run:"
    lines = [heading if missing else "nothing to do"]
    for entry in missing:
        lines += describe_statement(connection, entry)
    answer(as_json, {"would": would}, "\n".join(lines))
