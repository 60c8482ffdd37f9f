"""reference/*.schema.json: JSON Schemas of the documents that monitors read."""

import json
from dataclasses import dataclass
from typing import Any

import msgspec

from cdc.model.finding import Finding
from cdc.observe.status import Status


@dataclass(frozen=True)
class StatusDocument(Status):
    """What `cdc status --json` prints."""

    verdict: str = ""
    exit_code: int = 0
    slow_hop: str = ""


@dataclass(frozen=True)
class DoctorDocument:
    """What `cdc doctor --json` prints."""

    pipeline: str
    verdict: str
    exit_code: int
    findings: tuple[Finding, ...]


def doctor() -> str:
    """Return the schema of `cdc doctor --json`."""
    return _schema(DoctorDocument)


def status() -> str:
    """Return the schema of `cdc status --json`."""
    return _schema(StatusDocument)


def _schema(document: type[Any]) -> str:
    schema = _complete(msgspec.json.schema(document))
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    return json.dumps(schema, indent=2) + "\n"


def _complete(node: Any) -> Any:
    """Every field is always there, so all are required; defaults say nothing to a reader."""
    if isinstance(node, list):
        return [_complete(entry) for entry in node]
    if not isinstance(node, dict):
        return node
    completed = {name: _complete(entry) for name, entry in node.items() if name != "default"}
    if isinstance(node.get("properties"), dict):
        completed["required"] = list(node["properties"])
    return completed
