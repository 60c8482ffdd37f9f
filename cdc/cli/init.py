"""Verb `cdc init`: write a first pipeline file from the catalog of a database."""

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
import yaml
from psycopg.conninfo import conninfo_to_dict

from cdc.cli.console import Json, answer, say
from cdc.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Collection

    from cdc.config.settings import Pipeline
    from cdc.postgres.source import Connection

STACK = "${CDC_POSTGRES}"
"""The Postgres that `cdc up` starts."""


@dataclass(frozen=True)
class PipelineDraft:
    """The contents of a draft. `tables`: names and patterns; `left_out`, `refused`: the reasons."""

    pipeline: str
    dsn: str
    tables: Sequence[str]
    matches: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """By pattern: the tables that it matches today."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Tables that can't be captured as they are: the problem, and a hint."""


def name_for(path: Path) -> str:
    name = re.sub(r"[^a-z0-9_]", "_", path.stem.lower()).lstrip("_0123456789")[:48]
    return name or "pipeline"


def dsn_reference(dsn: str, pipeline: str, environment: Mapping[str, str] = os.environ) -> str:
    """The database as the file names it: by a variable if the DSN has a password.

    A password belongs into the environment.
    """
    if variable := next(
        (name for name, value in sorted(environment.items()) if value == dsn), None
    ):
        return f"${{{variable}}}"
    return f"${{{pipeline.upper()}_POSTGRES}}" if conninfo_to_dict(dsn).get("password") else dsn


def draft_text(first: PipelineDraft) -> str:
    is_own = first.dsn != STACK
    comment = (
        "an owner of the tables; wal_level = logical" if is_own else "the Postgres of `cdc up`"
    )
    return f"""\
# What to capture, and where to put it. Next:
#   cdc -p FILE up         local servers, for everything below that begins with CDC_
#   cdc -p FILE migrate    prepares the database (a role, a publication, triggers)
#   cdc -p FILE register   starts to capture
#   cdc -p FILE run        keeps the views current, until it is stopped
#   cdc -p FILE status     where each table stands; `verify` compares every row
pipeline: {_quoted(first.pipeline)}  # names the slot, the publication, the topics and the connector
source:
  dsn: {_quoted(first.dsn)}  # {comment}
  tables:  # schema.table, or a pattern: public.* (new tables: at the next migrate and register)
{_tables(first)}
sinks:  # take out what you don't need
  search:  # an index {first.pipeline}-<schema>.<table> for each table, _id is the row's key
    type: elasticsearch
    url: "${{CDC_ELASTICSEARCH}}"  # or your own: http://user:password@localhost:9200
  cache:  # a JSON document {first.pipeline}:<schema>.<table>:<key> for each row
    type: redis
    url: "${{CDC_REDIS}}"  # or your own: redis://localhost:6379/0
    prefix: {_quoted(first.pipeline)}
  warehouse:  # Delta tables <path>/<schema>.<table>/mirror, and every change in .../changes
    type: delta
    path: "${{CDC_WAREHOUSE}}"  # or a folder; a relative one is this file's
    # without_deletion_vectors: ["*.*"]  # for to_pandas(), to_pyarrow_table(): merges rewrite whole files
# Your own Kafka and Connect instead of the ones that `cdc up` starts:
# kafka: localhost:9092
# connect: http://localhost:8083
"""


def write_draft(path: Path, content: str) -> None:
    """Write the file. Raises SettingsError if there is one already, which stays as it is."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(content)
    except FileExistsError:
        raise SettingsError(
            f"{path} is there already; it isn't overwritten.",
            hint="name another one: cdc -p NEW.yaml init",
        ) from None
    except OSError as error:
        raise SettingsError(
            f"{path} can't be written: {error.strerror}.",
            hint="name another one: cdc -p NEW.yaml init",
        ) from None


def _tables(first: PipelineDraft) -> str:
    lines = []
    for table in first.tables:
        if table in first.refused:
            why, hint = first.refused[table]
            lines += [f"    # - {table}", f"    #   {why}", f"    #   {hint}"]
            continue
        lines.append(f"    - {_quoted(table)}")
        lines += [f"    #   {name}" for name in first.matches.get(table, ())]
    lines += [f"    # left out: {name}: {why}" for name, why in first.left_out.items()]
    return "\n".join(re.sub(r"[\r\n]", " ", line) for line in lines)


def _quoted(value: str) -> str:
    """The value in a form that YAML reads as that text."""
    try:
        plain = yaml.safe_load(f"a: {value}") == {"a": value}
    except yaml.YAMLError:
        plain = False
    return value if plain and "#" not in value else json.dumps(value)


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
        write_draft(path, "")
    name = name_for(path)
    patterns = [
        table.strip() for option in tables or () for table in option.split(",") if table.strip()
    ]
    stack_draft = PipelineDraft(name, STACK, patterns or ["public.*"])
    pipeline_draft = _draft_from_database(name, dsn, patterns) if dsn else stack_draft
    write_draft(path, draft_text(pipeline_draft).replace("cdc -p FILE", f"cdc -p {path}"))
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


def _draft_from_database(name: str, dsn: str, patterns: "Sequence[str]") -> PipelineDraft:
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
    return PipelineDraft(name, dsn_reference(dsn, name), patterns, matches, left_out, refused)


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
