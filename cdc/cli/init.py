"""`cdc init`: a first pipeline file, from the database's own catalog."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from cdc.cli.console import Json, out, print_json, say
from cdc.config import draft
from cdc.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

    from cdc.config.settings import Pipeline
    from cdc.postgres.source import Connection

Dsn = Annotated[str | None, typer.Option("--dsn", help="The database to look at; else that of `cdc up` is meant.")]
Wanted = Annotated[
    list[str] | None, typer.Option("--tables", help="A table or a pattern like 'public.*'; may be given again.")
]


def add_to(app: typer.Typer) -> None:
    app.command()(init)


def init(context: typer.Context, dsn: Dsn = None, tables: Wanted = None, as_json: Json = False) -> None:
    """Write a first pipeline file, with comments; one that is there stays as it is."""
    path = context.obj.path
    if path.exists():
        draft.write(path, "")
    name = draft.name_for(path)
    wanted = [table.strip() for each in tables or () for table in each.split(",") if table.strip()]
    of_stack = draft.First(name, draft.STACK, wanted or ["public.*"])
    made = _of_database(name, dsn, wanted) if dsn else of_stack
    draft.write(path, draft.text(made).replace("cdc -p FILE", f"cdc -p {path}"))
    captured = [table for table in made.tables if table not in made.refused]
    if as_json:
        refused = {table: why for table, (why, _) in made.refused.items()}
        print_json({"file": str(path), "tables": captured, "left_out": {**made.left_out, **refused}})
        return
    _tell(path, made, captured, dsn)


def _of_database(name: str, dsn: str, wanted: "Sequence[str]") -> draft.First:
    from cdc.config.settings import TableSettings
    from cdc.postgres import catalog, source

    with source.connect(dsn) as connection:
        there = catalog.candidates(connection)
        good = [candidate.qualified for candidate in there if candidate.obstacle is None]
        odd = {
            candidate.qualified: candidate.obstacle
            for candidate in there
            if candidate.obstacle and candidate.schema != "cdc"
        }
        everything = not wanted
        if everything:
            wanted = _asked(good, odd) if sys.stdin.isatty() else good
        if not wanted:
            raise SettingsError(
                f"There is no table to capture in database {connection.info.dbname}.", hint="create one, then again"
            )
        pipeline = _pipeline(name, dsn, wanted)
        choice = catalog.chosen(pipeline, there)
        refused = _refused(connection, pipeline.of(choice.names), wanted, {candidate.qualified for candidate in there})
    patterns = [TableSettings(table=table) for table in wanted if "*" in table]
    meant = {pattern.table: [name for name in choice.names if pattern.means(name)] for pattern in patterns}
    left_out = {name: why for name, why in odd.items() if name not in wanted} if everything else choice.left_out
    return draft.First(name, draft.reference(dsn, name), wanted, meant, left_out, refused)


def _asked(good: "Sequence[str]", odd: "Mapping[str, str]") -> list[str]:
    """Which tables somebody at a terminal wants."""
    for number, table in enumerate(good, 1):
        say(f"{number:>3}  {table}")
    for table, why in odd.items():
        say(f"  -  {table}: {why}")
    answer = typer.prompt("Which tables? Numbers, names or patterns, separated by commas", default="all", err=True)
    if answer.strip() == "all":
        return list(good)
    words = [word.strip() for word in answer.split(",") if word.strip()]
    return [good[int(word) - 1] if word.isdecimal() and 0 < int(word) <= len(good) else word for word in words]


def _pipeline(name: str, dsn: str, tables: "Sequence[str]") -> "Pipeline":
    from pydantic import ValidationError

    from cdc.config.settings import Pipeline

    try:
        return Pipeline.of_tree(
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
            mistake["msg"].removeprefix("Value error, ") if mistake["type"] == "value_error" else "not schema.table"
        )
        raise SettingsError(f"--tables {', '.join(tables)}: {problem}.", hint="for example: 'public.*'") from None


def _refused(
    connection: "Connection", pipeline: "Pipeline", wanted: "Sequence[str]", there: "Collection[str]"
) -> "Mapping[str, tuple[str, str]]":
    """Tables that can't be captured as they are.

    Raises:
        SourceError: for those that a pattern means, for those that aren't there, and when it is all of them.
    """
    from cdc.postgres import source

    refused = source.survey(connection, pipeline).refused
    for table, error in refused.items():
        if table not in wanted or table not in there or len(refused) == len(wanted):
            raise error
    return {table: (error.message, error.hint) for table, error in refused.items()}


def _tell(path: "Path", made: draft.First, captured: "Sequence[str]", dsn: str | None) -> None:
    left_out = {**made.left_out, **{table: why for table, (why, _) in made.refused.items()}}
    lines = [f"wrote {path}: {', '.join(captured)}", *(f"left out {table}: {why}" for table, why in left_out.items())]
    own = f"{made.pipeline.upper()}_POSTGRES"
    if dsn and made.dsn == f"${{{own}}}":
        lines.append(f"then: export {own}=... (what --dsn said: its password isn't written)")
    lines.append(f"then: cdc -p {path} up, or your own servers in the file; then migrate, register, run")
    for line in lines:
        out.print(line, highlight=False, markup=False, soft_wrap=True)
