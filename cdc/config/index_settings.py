"""What a table's entry in the pipeline file may ask of its search index, in Elasticsearch's own words."""

import json
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from cdc.config.mistakes import InvalidSetting

KEPT_FROM_FILES = (
    *("gc_deletes.", "blocks.", "mode.", "mapping.source.", "default_pipeline.", "final_pipeline."),
    # Rows that aren't on disk when their position is would be gone with the node, and nobody would send them again.
    "translog.",
)
"""Settings of an index that decide whether its documents are what was sent, and whether a late bulk is refused."""


def _plain(tree: object) -> object:
    """As JSON has it: YAML makes dates of what looks like one."""
    return json.loads(json.dumps(tree, default=str))


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of an index by their whole names, without `index.`, however they are nested."""
    whole: dict[str, Any] = {}
    for name, value in settings.items():
        inner = _flat(value) if isinstance(value, dict) else {"": value}
        whole |= {f"{name}.{rest}".rstrip(".").removeprefix("index."): each for rest, each in inner.items()}
    return whole


def _index_fields(fields: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    for name, asked in fields.items():
        if not isinstance(asked.get("fields", {}), dict):
            raise InvalidSetting(
                f"sub-fields of {name} are settings by name", "for example: fields: {raw: {type: keyword}}"
            )
    return fields


def _index_settings(settings: dict[str, Any]) -> dict[str, Any]:
    whole = _flat(settings)
    if ours := [name for name in whole if f"{name}.".startswith(KEPT_FROM_FILES)]:
        raise InvalidSetting(f"{ours[0]} can't be set, for the view wouldn't be sure to be right", "take it out")
    for name in ("number_of_shards", "number_of_replicas"):
        if name in whole and not str(whole[name]).isdecimal():
            raise InvalidSetting(f"{name} is a whole number", f"for example: {name}: 1")
    return whole


class IndexSettings(BaseModel):
    """How the search index of a table is made, beside what the types of its columns ask for."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    fields: Annotated[dict[str, dict[str, Any]], AfterValidator(_plain), AfterValidator(_index_fields)] = Field(
        default={}, examples=["{name: {analyzer: simple}}"]
    )
    """Fields by column: with a `type` as they are, without one as additions to the type's own."""
    settings: Annotated[dict[str, Any], AfterValidator(_plain), AfterValidator(_index_settings)] = Field(
        default={}, examples=["{number_of_shards: 3}"]
    )
    """Settings of the index in Elasticsearch's own words."""
