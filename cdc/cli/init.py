"""Verb `cdc init`: write a first pipeline file from the catalog of a database."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from cdc.cli.console import Json, answer, say
from cdc.config import draft
from cdc.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from cdc.config.settings import Pipeline
    from cdc.postgres.source import Connection

Dsn = Annotated[
    str | None,
    typer.Option("--dsn", help="Database to read. Default: the one that `cdc up` starts."),
]
TableOptions = Annotated[
    list[str] | None,
    typer.Option("--tables", help="Table, or a pattern like 'public.*'. Repeatable."),
]


def init(
    context: typer.Context, dsn: Dsn = None, tables: TableOptions = None, as_json: Json = False
) -> None:
    """Write a first pipeline file from a database's catalog.

    The file explains itself in comments. An existing file is never overwritten.
    """
    path = context.obj.path
    if path.exists():
        draft.write(path, "")
    name = draft.name_for(path)
    patterns = [
        table.strip() for option in tables or () for table in option.split(",") if table.strip()
    ]
    stack_draft = draft.PipelineDraft(name, draft.STACK, patterns or ["public.*"])
    pipeline_draft = _draft_from_database(name, dsn, patterns) if dsn else stack_draft
    draft.write(path, draft.text(pipeline_draft).replace("cdc -p FILE", f"cdc -p {path}"))
    captured = [table for table in pipeline_draft.tables if table not in pipeline_draft.refused]
    refused = {table: why for table, (why, _) in pipeline_draft.refused.items()}
    left_out = {**pipeline_draft.left_out, **refused}
    lines = [
        f"wrote {path}: {', '.join(captured)}",
        *(f"left out {table}: {why}" for table, why in left_out.items()),
    ]
    variable = f"{pipeline_draft.pipeline.upper()}_POSTGRES"
    if dsn and pipeline_draft.dsn == f"${{{variable}}}":
        lines.append(
            f"then: export {variable}=... (the value of --dsn: its password isn't in the file)"
        )
    lines.append(
        f"then: cdc -p {path} up, or your own servers in the file; then migrate, register, run"
    )
    document = {"file": str(path), "tables": captured, "left_out": left_out}
    answer(as_json, document, "\n".join(lines))


def _draft_from_database(name: str, dsn: str, patterns: "Sequence[str]") -> draft.PipelineDraft:
    from cdc.config.source_settings import TableSettings
    from cdc.postgres import catalog, source

    with source.connect(dsn) as connection:
        candidates = catalog.candidates(connection)
        usable = [candidate.qualified for candidate in candidates if candidate.obstacle is None]
        unusable = {
            candidate.qualified: candidate.obstacle
            for candidate in candidates
            if candidate.obstacle
        }
        no_patterns = not patterns
        if no_patterns:
            patterns = _ask_tables(usable, unusable) if sys.stdin.isatty() else usable
        if not patterns:
            raise SettingsError(
                f"There is no table to capture in database {connection.info.dbname}.",
                hint="create one, then run the command again",
            )
        pipeline = _checked_pipeline(name, dsn, patterns)
        choice = catalog.choose_tables(pipeline, candidates)
        refused = _find_refused(
            connection,
            pipeline.with_tables(choice.names),
            patterns,
            {candidate.qualified for candidate in candidates},
        )
    wildcards = [TableSettings(table=table) for table in patterns if "*" in table]
    matches = {
        entry.table: [name for name in choice.names if entry.matches(name)] for entry in wildcards
    }
    left_out = (
        {name: why for name, why in unusable.items() if name not in patterns}
        if no_patterns
        else choice.left_out
    )
    return draft.PipelineDraft(
        name, draft.reference(dsn, name), patterns, matches, left_out, refused
    )


def _ask_tables(usable: "Sequence[str]", unusable: "Mapping[str, str]") -> list[str]:
    """Ask somebody at a terminal for tables: numbers of the list, names or patterns."""
    for number, table in enumerate(usable, 1):
        say(f"{number:>3}  {table}")
    for table, why in unusable.items():
        say(f"  -  {table}: {why}")
    typed = typer.prompt(
        "Which tables? Numbers, names or patterns, separated by commas", default="all", err=True
    )
    if typed.strip() == "all":
        return list(usable)
    numbers = {str(number): table for number, table in enumerate(usable, 1)}
    words = [word.strip() for word in typed.split(",")]
    return [numbers.get(word, word) for word in words if word]


def _checked_pipeline(name: str, dsn: str, tables: "Sequence[str]") -> "Pipeline":
    from pydantic import ValidationError

    from cdc.config.settings import Pipeline

    try:
        return Pipeline.from_tree(
            {
                "pipeline": name,
                "source": {"dsn": dsn, "tables": list(tables)},
                "sinks": {"warehouse": {"type": "delta", "path": "/none"}},
                "kafka": "none:1",
                "connect": "http://none",
            }
        )
    except ValidationError as error:
        mistake = error.errors(include_url=False, include_input=False)[0]
        problem = (
            mistake["msg"].removeprefix("Value error, ")
            if mistake["type"] == "value_error"
            else "not schema.table"
        )
        raise SettingsError(
            f"--tables {', '.join(tables)}: {problem}.", hint="for example: 'public.*'"
        ) from None


def _find_refused(
    connection: "Connection",
    pipeline: "Pipeline",
    names: "Sequence[str]",
    existing: "Collection[str]",
) -> "Mapping[str, tuple[str, str]]":
    """Find the tables that can't be captured as they are: message and hint, by table.

    Raises:
        SourceError: such a table was not named but matched by a pattern, or doesn't exist, or no
            table is left.
    """
    from cdc.postgres import table_survey

    refused = table_survey.survey(connection, pipeline).refused
    for table, error in refused.items():
        if table not in names or table not in existing or len(refused) == len(names):
            raise error
    return {table: (error.message, error.hint) for table, error in refused.items()}
