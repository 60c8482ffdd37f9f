"""Layouts: what the index of a table is made with, and whether one that is there was made with the
same.

An index has its layout noted in its mapping's `_meta`. The server refuses some changes of a field,
but takes others without a word, and what it holds already is found by none of them: so what was
asked for is compared, not what it says.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cdc.model.table import IndexOptions, Table
from cdc.sink.contract import SchemaMismatch
from cdc.sinks.elasticsearch.client import CLOSED, Refusal
from cdc.sinks.elasticsearch.index.fields import DOUBLE, INTEGER, KEYWORD, member_field, merge_field
from cdc.sinks.elasticsearch.scan import OWN_ID

INDEX_SETTINGS = {"number_of_shards": 1, "auto_expand_replicas": "0-1", "gc_deletes": "5m"}
"""gc_deletes: how long a delete's version is held in the server's memory. It is for bulks that the
server itself has in hand when their writer's alias goes; a client waits a minute for an answer.
"""
BULK_LOAD_SETTINGS = {
    "refresh_interval": "-1",
    "auto_expand_replicas": False,
    "number_of_replicas": 0,
}
"""Settings that make a bulk load cheap while nobody reads."""
OWN_FIELDS = {OWN_ID: {"type": "keyword", "index": False, "doc_values": False}}
NOTE = "cdc"
NUMBERS = (DOUBLE["type"], INTEGER["type"])
FIELD_LIMIT_REASON = "Limit of total fields"


@dataclass(frozen=True)
class Layout:
    """The fields of an index by column, and what the pipeline file asks for: settings, and options of
    fields.
    """

    fields: Mapping[str, Any]
    settings: Mapping[str, Any]
    options: Mapping[str, Any]

    @classmethod
    def of(cls, table: Table) -> "Layout":
        options = table.index.fields
        fields = {
            column.name: merge_field(member_field(column), options.get(column.name, {}))
            for column in table.columns
        }
        return cls(fields, table.index.settings, options)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> "Layout":
        """Read the layout that an index was made with.

        Without a note it is empty: a user who puts a mapping with another `_meta` removes the note.
        The server itself refuses fields that differ then.
        """
        note = mapping.get("_meta", {}).get(NOTE, {"fields": {}, "settings": {}})
        return cls(note["fields"], note["settings"], note.get("options", {}))

    def as_made(self, table: Table) -> "Layout":
        """Build the layout of a table's columns as they are now, with what the file asked for when this
        one was made.
        """
        return Layout.of(replace(table, index=IndexOptions(self.options, self.settings)))

    @property
    def live_settings(self) -> dict[str, Any]:
        """All settings of an index that is live."""
        is_fixed = "number_of_replicas" in self.settings
        replica_settings = {"auto_expand_replicas": False} if is_fixed else {}
        return {**INDEX_SETTINGS, **replica_settings, **self.settings}

    @property
    def shards(self) -> int:
        return int(self.live_settings["number_of_shards"])

    @property
    def restored_settings(self) -> dict[str, Any]:
        """What takes `BULK_LOAD_SETTINGS` back; None stands for the server's own default."""
        return {
            name: self.live_settings.get(name)
            for name in BULK_LOAD_SETTINGS
            if name in self.live_settings or name == "refresh_interval"
        }

    def mapping(self, previous: "Layout | None" = None) -> dict[str, Any]:
        """Build the mapping: fields and note. Notes of dropped columns stay."""
        noted_fields = {**previous.fields, **self.fields} if previous else self.fields
        options = {**previous.options, **self.options} if previous else self.options
        note = {"fields": noted_fields, "settings": self.settings, "options": options}
        return {"_meta": {NOTE: note}, "properties": {**self.fields, **OWN_FIELDS}}

    def body(self, *, is_live: bool) -> dict[str, Any]:
        """Build the request for a new index. Not strict: the log may have older columns."""
        settings = self.live_settings if is_live else self.live_settings | BULK_LOAD_SETTINGS
        return {"settings": settings, "mappings": {"dynamic": False, **self.mapping()}}

    def probe_body(self) -> dict[str, Any]:
        """Build the request for an index that is only to show whether the server makes it."""
        settings = self.live_settings | {"auto_expand_replicas": False, "number_of_replicas": 0}
        return {**self.body(is_live=True), "settings": settings}

    def changes(self, existing: "Layout") -> list[str]:
        """List what differs in an existing index, in words."""
        fields = [
            f"field {name}"
            for name, field in self.fields.items()
            if name not in existing.fields or not _extends(existing.fields[name], field)
        ]
        return [*fields, *(f"setting {name}" for name in sorted(self.changed_settings(existing)))]

    def changed_fields(self, existing: "Layout") -> list[str]:
        """List the columns whose fields differ in an existing index."""
        return [
            name
            for name, field in self.fields.items()
            if not _extends(field, existing.fields.get(name, field))
        ]

    def changed_settings(self, existing: "Layout") -> dict[str, Any]:
        """Return the settings that differ; None for one that is the server's default now."""
        settings = self.live_settings
        existing_settings = existing.live_settings
        return {
            name: settings.get(name)
            for name in {**existing_settings, **settings}
            if settings.get(name) != existing_settings.get(name)
        }


def require_same_fields(table: Table, sink: str, layout: Layout, existing: Layout) -> None:
    """Raise SchemaMismatch when an index was made with other fields than its columns have now."""
    if not (differing := layout.changed_fields(existing)):
        return
    if not existing.as_made(table).changed_fields(existing):
        raise outdated_error(table, sink, "fields", differing)
    lexical = [
        name
        for name in differing
        if existing.fields[name] == KEYWORD and layout.fields[name]["type"] in NUMBERS
    ]
    text = (
        f" It holds {', '.join(lexical)} as text, which ranges and sorts compare letter by letter."
    )
    raise SchemaMismatch(
        table,
        sink,
        f"The index of {table.qualified} in {sink} was made with other fields than it would get now:"
        f" {', '.join(differing)}.{text if lexical else ''}",
    )


def outdated_error(table: Table, sink: str, what: str, names: Sequence[str]) -> SchemaMismatch:
    """Build the error of an index that goes on as it was made: only the pipeline file asks for others."""
    return SchemaMismatch(
        table,
        sink,
        f"The index of {table.qualified} in {sink} was made with other {what} than the file asks for now:"
        f" {', '.join(names)}. It stays current, as it was made.",
        waits=False,
    )


def layout_error(
    table: Table, sink: str, error: Refusal, *properties: Mapping[str, Any]
) -> SchemaMismatch | Refusal:
    """Build the error for a refused layout.

    properties: of the mappings that the index would combine. The server's message concerns only the
    layout, so it may be shown.
    """
    if error.status != 400 or error.kind == CLOSED:
        return error
    reason = error.reason.removeprefix("Failed to parse mapping: ").partition(". ")[0].rstrip(".")
    columns = list(_columns_concerned(table, reason))
    hint = f"correct `index` in the entry of {table.qualified} in the pipeline file, then: cdc -p FILE run"
    if FIELD_LIMIT_REASON in reason:
        needed = len({path for listed in properties for path in _paths(listed)})
        reason = f"{reason}, it needs {needed:,}"
        hint = (
            f"write index: {{settings: {{mapping.total_fields.limit: {needed}}}}} in the entry of"
            f" {table.qualified} in the pipeline file, then: cdc -p FILE run"
        )
    subject = f"column{'s' if len(columns) > 1 else ''} {', '.join(columns)}: " if columns else ""
    return SchemaMismatch(
        table,
        sink,
        f"The server of {sink} can't make the index of {table.qualified}: {subject}{reason or error.kind}.",
        hint=hint,
    )


def _extends(field: Mapping[str, Any], existing: Mapping[str, Any]) -> bool:
    """Whether an index takes this field: it has the same, or an object with fewer members."""
    if "properties" not in field or "properties" not in existing:
        return field == existing
    if field["type"] != existing["type"]:
        return False
    members = field["properties"]
    existing_members = existing["properties"]
    return all(
        _extends(member, existing_members.get(name, member)) for name, member in members.items()
    )


def _paths(properties: Mapping[str, Any], outer: str = "") -> Iterator[str]:
    """List the paths of everything that the server counts as a field, including sub-fields, objects,
    and the objects that names with dots create.
    """
    for name, field in properties.items():
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            yield f"{outer}{'.'.join(parts[:count])}"
        yield from _paths(
            {**field.get("fields", {}), **field.get("properties", {})}, f"{outer}{name}."
        )


def _columns_concerned(table: Table, reason: str) -> Iterator[str]:
    """List the columns that a refusal names, or else those whose options it names."""
    quoted = set(re.findall(r"\[([^\]]+)\]", reason))
    columns = [column.name for column in table.columns if column.name in quoted]
    if columns:
        yield from columns
        return
    for name, options in table.index.fields.items():
        texts = re.findall(r'"((?:[^"\\]|\\.)*)"', json.dumps(options, ensure_ascii=False))
        if quoted & set(texts):
            yield name
