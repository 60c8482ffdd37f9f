"""The settings of a table's search index in the pipeline file, in Elasticsearch's own words."""

import json
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from cdc.config.mistakes import InvalidSetting

RESERVED_SETTINGS = (
    *("gc_deletes.", "blocks.", "mode.", "mapping.source.", "default_pipeline.", "final_pipeline."),
    # A row that isn't on disk when its position is would be lost with the node, and nobody would
    # send it again.
    "translog.",
)
"""Settings that a file can't change: documents would differ from what was sent, or a late bulk be
accepted.
"""


def _plain(tree: object) -> object:
    """The tree as JSON: YAML turns a text that looks like a date into one."""
    return json.loads(json.dumps(tree, default=str))


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of an index by their full names, without `index.`, however they are nested."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        inner = _flat(value) if isinstance(value, dict) else {"": value}
        for suffix, setting in inner.items():
            full_name = f"{name}.{suffix}".rstrip(".").removeprefix("index.")
            flat[full_name] = setting
    return flat


def _index_fields(fields: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    for name, field in fields.items():
        if not isinstance(field.get("fields", {}), dict):
            raise InvalidSetting(
                f"sub-fields of {name} are settings by name",
                "for example: fields: {raw: {type: keyword}}",
            )
    return fields


def _index_settings(settings: dict[str, Any]) -> dict[str, Any]:
    flat = _flat(settings)
    if reserved := [name for name in flat if f"{name}.".startswith(RESERVED_SETTINGS)]:
        raise InvalidSetting(
            f"{reserved[0]} can't be set, for the view wouldn't be sure to be right", "take it out"
        )
    for name in ("number_of_shards", "number_of_replicas"):
        if name in flat and not str(flat[name]).isdecimal():
            raise InvalidSetting(f"{name} is a whole number", f"for example: {name}: 1")
    return flat


class IndexSettings(BaseModel):
    """The search index of a table, as far as the types of its columns don't decide it."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    fields: Annotated[
        dict[str, dict[str, Any]], AfterValidator(_plain), AfterValidator(_index_fields)
    ] = Field(default={}, examples=["{name: {analyzer: simple}}"])
    """Fields by column: with a `type` as they are, without one as additions to the type's own."""
    settings: Annotated[dict[str, Any], AfterValidator(_plain), AfterValidator(_index_settings)] = (
        Field(default={}, examples=["{number_of_shards: 3}"])
    )
    """Settings of the index in Elasticsearch's own words."""
