"""Draft a pipeline file, which `cdc init` writes once and a person goes on from.

In:  a name, tables to capture, tables left out with the reasons. Out: the text of a file that is
accepted as it is.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from psycopg.conninfo import conninfo_to_dict

from cdc.errors import SettingsError

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


def reference(dsn: str, pipeline: str, environment: Mapping[str, str] = os.environ) -> str:
    """The database as the file names it: by a variable if the DSN has a password.

    A password belongs into the environment.
    """
    if variable := next(
        (name for name, value in sorted(environment.items()) if value == dsn), None
    ):
        return f"${{{variable}}}"
    return f"${{{pipeline.upper()}_POSTGRES}}" if conninfo_to_dict(dsn).get("password") else dsn


def text(first: PipelineDraft) -> str:
    is_own = first.dsn != STACK
    comment = (
        "an owner of the tables; wal_level = logical" if is_own else "the Postgres of `cdc up`"
    )
    return f"""\
# What to capture, and where to put it. Next:
#   cdc -p FILE up         servers of its own, for everything below that begins with CDC_
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


def write(path: Path, content: str) -> None:
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
