"""The pipeline file: what to capture, where to put it. Wrong input is named with its line and the accepted form."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
)

from cdc.errors import SettingsError

REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
QUOTED = re.compile(r"(['\"])[^'\"]{2,}\1")
TABLE = r"^[^.]+\.[^.]+$"
CARRIED = r"[A-Za-z0-9_-]+"
"""What a topic's name can have of a table's; the connector would put _ in the place of anything else."""


class Section(BaseModel):
    keeps_changes: ClassVar[bool] = False
    """Of a sink: whether it keeps every change, not only what a row is by now."""
    model_config = ConfigDict(extra="forbid", frozen=True)


class TableSettings(Section):
    table: str = Field(pattern=TABLE, description="schema.table")
    partitions: int = Field(default=4, ge=1, le=1000)
    exclude: tuple[str, ...] = ()
    key: tuple[str, ...] = ()
    """Columns that tell rows apart where there is no primary key: those of a unique index, none of them nullable."""


def _table(value: object) -> object:
    return {"table": value} if isinstance(value, str) else value


class Source(Section):
    dsn: str
    tables: tuple[Annotated[TableSettings, BeforeValidator(_table)], ...] = Field(min_length=1)
    replication_user: str | None = None
    replication_password: SecretStr | None = None
    heartbeat_s: float = Field(default=2.0, gt=0)

    @field_validator("tables")
    @classmethod
    def _once(cls, tables: tuple[TableSettings, ...]) -> tuple[TableSettings, ...]:
        names = [entry.table for entry in tables]
        if strange := [name for name in names if not all(re.fullmatch(CARRIED, part) for part in name.split("."))]:
            raise ValueError(
                f"a topic's name can't have other characters than letters, digits, _ and -: {', '.join(strange)}"
            )
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"listed twice: {', '.join(sorted(twice))}")
        lowered = [name.lower() for name in names]
        if alike := {name for name in names if lowered.count(name.lower()) > 1}:
            raise ValueError(f"an index's name is in lower case, so these would share one: {', '.join(sorted(alike))}")
        # The broker takes one of them only: its metrics tell . and _ not apart.
        flat = [name.replace(".", "_") for name in names]
        if alike := {name for name in names if flat.count(name.replace(".", "_")) > 1}:
            raise ValueError(f"topics that differ only in . and _ can't both be: {', '.join(sorted(alike))}")
        return tables


class Elasticsearch(Section):
    type: Literal["elasticsearch"]
    url: str
    trigger_s: float = Field(default=0.2, ge=0)
    """Seconds from the start of a batch to that of the next, at least; none while a batch takes longer."""


class Redis(Section):
    type: Literal["redis"]
    url: str
    prefix: str = Field(pattern=r"^[^\s:]+$")
    spare: int | None = Field(default=None, ge=0)
    """The number of the database where `cdc rebuild` makes the next generation: the one after the url's when None."""
    trigger_s: float = Field(default=0.2, ge=0)


class Delta(Section):
    keeps_changes: ClassVar[bool] = True
    type: Literal["delta"]
    path: str
    trigger_s: float = Field(default=5.0, ge=0)


SinkSettings = Annotated[Elasticsearch | Redis | Delta, Field(discriminator="type")]


class Pipeline(Section):
    """One pipeline. Its name is also the slot, the publication, the topic prefix and the connector."""

    pipeline: str = Field(pattern=r"^[a-z][a-z0-9_]{0,47}$", description="lower case letters, digits and _")
    source: Source
    sinks: dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]*$")], SinkSettings] = Field(min_length=1)
    kafka: str = "${CDC_KAFKA}"
    connect: str = "${CDC_CONNECT}"
    delete_retention_hours: float = Field(default=168.0, gt=0)
    """How long tombstones stay readable: must exceed the longest outage of a sink."""
    changes_retention_hours: float = Field(default=24.0, ge=0)
    """How long superseded records stay in the topics of a pipeline whose sinks keep every change: must exceed the
    longest outage of these."""
    on_error: Literal["quarantine", "stop"] = "quarantine"
    """What a sink does with a record that can't be decoded or held: put it aside and go on, or stop."""

    @property
    def changes_kept_s(self) -> float:
        """How long superseded records have to stay in the topics of tables, in seconds."""
        keeps = any(sink.keeps_changes for sink in self.sinks.values())
        return self.changes_retention_hours * 3600 if keeps else 0.0

    @property
    def replication_user(self) -> str:
        return self.source.replication_user or f"{self.pipeline}_replication"

    def topic(self, table: str) -> str:
        return f"{self.pipeline}.{table}"

    @property
    def heartbeat_topic(self) -> str:
        return self.topic("cdc.heartbeat")

    @property
    def quarantine_topic(self) -> str:
        return f"{self.pipeline}.quarantine"

    @property
    def generations_topic(self) -> str:
        """What is built and kept beside the live views, see `cdc.generations`."""
        return f"{self.pipeline}.generations"

    @property
    def message_topic(self) -> str:
        """Where the connector sends logical messages, see `cdc.client`."""
        return f"{self.pipeline}.message"

    @property
    def registered_topic(self) -> str:
        """What the connector was registered with, see `cdc.registered`."""
        return f"{self.pipeline}.registered"

    @property
    def settings_topic(self) -> str:
        """What settings of topics were before they were lowered for a while, see `cdc.compaction`."""
        return f"{self.pipeline}.settings"


def load(path: Path, environment: Mapping[str, str] | None = None) -> Pipeline:
    """Read and check a pipeline file, with `${NAME}` replaced from the environment.

    Raises:
        SettingsError: naming the file, the line and the accepted form.
    """
    text, tree = _read(path)
    known = os.environ if environment is None else environment
    document = _defaults(tree)
    missing: dict[str, str] = {}
    resolved = _resolve(document, known, missing, ())
    if missing:
        name, where = next(iter(missing.items()))
        raise SettingsError(
            f"{_place(path, text, where.split('.'))}: {where} refers to ${{{name}}}, which is not set.",
            hint=f"export {name}=..., or start the local stack: cdc -p {path} up",
            variable=name,
        )
    try:
        return Pipeline.model_validate(resolved)
    except ValidationError as error:
        raise _explain(path, text, error) from None


def name_of(path: Path) -> str:
    """The pipeline's name alone, readable before any server runs."""
    _, tree = _read(path)
    name = tree.get("pipeline")
    if not isinstance(name, str) or not re.match(r"^[a-z][a-z0-9_]{0,47}$", name):
        raise SettingsError(
            f"{path}: `pipeline` must be a name of lower case letters, digits and _.",
            hint="for example: pipeline: shop",
        )
    return name


def _read(path: Path) -> tuple[str, dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise SettingsError(
            f"The pipeline file {path} can't be read: {error.strerror}.",
            hint="name it with: cdc -p FILE.yaml ...",
        ) from None
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        # It may quote a password that isn't in quotes itself: one that begins with * or !.
        problem = QUOTED.sub("'...'", getattr(error, "problem", None) or "not YAML")
        raise SettingsError(f"{path}{line}: {problem}.", hint="see sample/airport.yaml for a whole file") from None
    if not isinstance(tree, dict):
        raise SettingsError(f"{path}: a pipeline file is a mapping.", hint="see sample/airport.yaml for a whole file")
    return text, tree


def _defaults(tree: dict[str, Any]) -> dict[str, Any]:
    return {"kafka": "${CDC_KAFKA}", "connect": "${CDC_CONNECT}", **tree}


def _resolve(node: Any, known: Mapping[str, str], missing: dict[str, str], where: tuple[str, ...]) -> Any:
    if isinstance(node, dict):
        return {key: _resolve(value, known, missing, (*where, str(key))) for key, value in node.items()}
    if isinstance(node, list):
        return [_resolve(value, known, missing, (*where, str(at))) for at, value in enumerate(node)]
    if not isinstance(node, str):
        return node

    def replace(match: re.Match[str]) -> str:
        name = match.group(1)
        if name not in known:
            missing.setdefault(name, ".".join(where))
        return known.get(name, "")

    return REFERENCE.sub(replace, node)


def _explain(path: Path, text: str, error: ValidationError) -> SettingsError:
    first = error.errors(include_url=False, include_input=False)[0]
    where = [str(part) for part in first["loc"] if part not in ("elasticsearch", "redis", "delta")]
    name = ".".join(where) or "the file"
    problem = first["msg"].removeprefix("Value error, ")
    hint = "see sample/airport.yaml for a whole file"
    if first["type"] == "extra_forbidden":
        problem, hint = "no such setting", f"accepted here: {', '.join(_accepted(where[:-1]))}"
    elif first["type"] == "missing":
        problem = "required, but missing"
    elif first["type"] == "union_tag_invalid":
        problem, hint = "no such sink type", "accepted: elasticsearch, redis, delta"
    elif first["type"] == "string_pattern_mismatch" and where[-1] == "table":
        problem, hint = "a table is written schema.table", "for example: public.flights; a name with a dot can't be one"
    elif where[-1:] == ["tables"] and first["type"] == "value_error":
        hint = "rename the table (ALTER TABLE ... RENAME TO ...), or take it out of source.tables"
    return SettingsError(f"{_place(path, text, where)}: {name}: {problem}.", hint=hint)


def _accepted(where: list[str]) -> list[str]:
    models: dict[str, type[Section]] = {"source": Source}
    if not where:
        model: type[Section] = Pipeline
    elif where[0] == "sinks":
        return sorted({name for sink in (Elasticsearch, Redis, Delta) for name in sink.model_fields})
    else:
        model = TableSettings if "tables" in where else models.get(where[0], Pipeline)
    return sorted(model.model_fields)


def _place(path: Path, text: str, where: list[str]) -> str:
    """`file:line` of the deepest part of `where` that the text has."""
    node, line = yaml.compose(text), None
    for part in where:
        if isinstance(node, yaml.MappingNode):
            found = next(((key, value) for key, value in node.value if key.value == part), None)
            if found is None:
                break
            line, node = found[0].start_mark.line + 1, found[1]
        elif isinstance(node, yaml.SequenceNode) and part.isdigit() and int(part) < len(node.value):
            node = node.value[int(part)]
            line = node.start_mark.line + 1
        else:
            break
    return f"{path}:{line}" if line else str(path)
