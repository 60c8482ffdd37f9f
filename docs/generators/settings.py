"""reference/settings.md: every setting of a pipeline file, as its models have them."""

import typing
from collections.abc import Iterator
from datetime import date
from typing import Any

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from cdc.config.server_settings import ConnectSettings, KafkaSettings
from cdc.config.settings import Pipeline, ProofSettings
from cdc.config.sink_kinds import ListedTable
from cdc.config.source_settings import (
    ConnectorCertificate,
    IndexSettings,
    Source,
    TableSettings,
)
from cdc.config.view_settings import (
    GroupedViewSettings,
    IncludeSettings,
    PatternSettings,
    PatternViewSettings,
    StepSettings,
    ViewSettings,
    WindowSettings,
)
from cdc.sinks import SETTINGS
from cdc.sinks.redis.settings import CachedTable

HEAD = """\
# Settings

Every setting of a pipeline file. Made from the code by `python -m docs.generate`; a test compares them.
`${NAME}` is an environment variable, `${NAME:-value}` one that may be missing, `${file:/path}` what a file holds.
"""
SECTIONS: tuple[tuple[str, type[BaseModel]], ...] = (
    ("The file", Pipeline),
    ("`kafka`, if it isn't an address", KafkaSettings),
    ("`connect`, if it isn't an address", ConnectSettings),
    ("`source`", Source),
    ("An entry of `source.tables`", TableSettings),
    ("`index` of such an entry", IndexSettings),
    ("`replication_certificate` of `source`", ConnectorCertificate),
    *(
        (f"A sink of `type: {typing.get_args(kind.model_fields['type'].annotation)[0]}`", kind)
        for kind in SETTINGS
    ),
    ("An entry of a sink's `tables`", ListedTable),
    ("An entry of `tables` of a sink of `type: redis`", CachedTable),
    ("A view with `root`: a document for each row", ViewSettings),
    ("An entry of `include`, of a view or of another entry", IncludeSettings),
    ("A view with `from`: a document for each group of rows", GroupedViewSettings),
    ("`window` of such a view", WindowSettings),
    (
        "A view with `from` and `pattern`: a document for each row that completes it",
        PatternViewSettings,
    ),
    ("`pattern` of such a view", PatternSettings),
    ("An entry of `steps`, of a pattern", StepSettings),
    ("`proof`", ProofSettings),
)
WORDS = {
    str: "text",
    int: "whole number",
    float: "number",
    bool: "true or false",
    SecretStr: "text",
    date: "date",
    tuple: "list",
    dict: "mapping",
}


def page() -> str:
    """Return the whole text."""
    return HEAD + "".join(
        f"\n{part}" for title, model in SECTIONS for part in _section(title, model)
    )


def _section(title: str, model: type[BaseModel]) -> Iterator[str]:
    rows = [_row(field.alias or name, field) for name, field in model.model_fields.items()]
    yield f"## {title}\n"
    yield (
        "\n".join(["| setting | accepts | without it | what it does |", "|---|---|---|---|", *rows])
        + "\n"
    )


def _row(name: str, field: FieldInfo) -> str:
    description = " ".join((field.description or "").split())
    default = (
        "required" if field.is_required() else _shown(field.get_default(call_default_factory=True))
    )
    return f"| `{name}` | {_accepted(field.annotation)} | {default} | {description} |"


def _accepted(kind: Any) -> str:
    """A type in a word or two."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return " or ".join(f"`{value}`" for value in inner)
    if origin is typing.Annotated:
        return _accepted(inner[0])
    if type(None) in inner:
        return _accepted(next(member for member in inner if member is not type(None)))
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return "mapping"
    return WORDS[origin or kind]


def _shown(default: Any) -> str:
    if default is None or default in ((), {}) or isinstance(default, BaseModel):
        return "none"
    return f"`{default:g}`" if isinstance(default, float) else f"`{default}`"
