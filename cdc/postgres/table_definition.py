"""Read the journal of table definitions: what each captured table looked like after a command.

In:  records of the topic `<pipeline>.cdc.ddl`. Out: a `Definition` of each; DecodeError.
Invariant: pure; entries that earlier versions of the journal wrote are read, without what they lack.
"""

import json
from base64 import b64decode
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cdc.errors import DecodeError


@dataclass(frozen=True)
class TypeDefinition:
    """A type that values of a column are made of.

    An enum has `labels`, by the oid that rows hold; a domain has a `base`; a composite type has
    `attributes`, each with its type.
    """

    oid: int
    base: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    attributes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ColumnDefinition:
    """One column in the journal; `number` survives a rename, and is None in old entries.

    `labels` and `attributes` belong to the outermost type. `types` has its parts at any depth; it is
    None in old entries. `identified` is False if the replica identity is an index without the column.
    """

    name: str
    type: str
    number: int | None = None
    default: str | None = None
    missing: bool = False
    key: int | None = None
    labels: tuple[str, ...] | None = None
    attributes: tuple[str, ...] | None = None
    types: tuple[TypeDefinition, ...] | None = None
    identified: bool = True


@dataclass(frozen=True)
class Definition:
    """The definition of a table after a command; `streamed`: the command ran while the pipeline
    captured.
    """

    id: int
    table: str
    relation: int | None
    lsn: int
    command: str
    columns: tuple[ColumnDefinition, ...] | None
    """None after a drop."""
    partitions: tuple[str, ...] | None
    streamed: bool

    @property
    def key(self) -> tuple[str, ...]:
        """The columns of the primary key, in its order."""
        ordered = sorted(
            (shape.key, shape.name) for shape in self.columns or () if shape.key is not None
        )
        return tuple(name for _, name in ordered)


def parse(value: bytes) -> Definition | None:
    """The definition in a record; None for a tombstone or a deletion.

    Raises:
        DecodeError: the value isn't a record of the journal.
    """
    if not value:
        return None
    try:
        envelope = json.loads(value)
        after = envelope["after"]
        if after is None:
            return None
        return Definition(
            id=int(after["id"]),
            table=after["table_name"],
            relation=after.get("relation"),
            lsn=lsn_number(after["lsn"]),
            command=after["command"],
            columns=_columns(_loaded(after["columns"])),
            partitions=_tuple(_loaded(after.get("partitions"))),
            streamed=envelope["op"] == "c",
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        raise DecodeError(
            "A record of cdc.ddl isn't one of the journal of table definitions.",
            hint="does anything but the connector write that topic, or anything but its triggers that table?",
        ) from None


def _columns(columns: list[dict[str, Any]] | None) -> tuple[ColumnDefinition, ...] | None:
    if columns is None:
        return None
    return tuple(
        ColumnDefinition(
            name=column["name"],
            type=column["type"],
            number=column.get("number"),
            default=column.get("default"),
            missing=bool(column.get("missing")),
            key=column.get("key"),
            labels=_tuple(column.get("labels")),
            attributes=_tuple(column.get("attributes")),
            types=_types(column.get("types")),
            identified=column.get("identified", True),
        )
        for column in columns
    )


def _types(types: list[dict[str, Any]] | None) -> tuple[TypeDefinition, ...] | None:
    if types is None:
        return None
    return tuple(
        TypeDefinition(
            oid=part["oid"],
            base=part.get("base"),
            labels=part.get("labels", {}),
            attributes=tuple(part.get("attributes", ())),
        )
        for part in types
    )


def _tuple(names: list[str] | None) -> tuple[str, ...] | None:
    return None if names is None else tuple(names)


def _loaded(text: Any) -> Any:
    return json.loads(text) if isinstance(text, str) else text


def lsn_number(text: str) -> int:
    """A pg_lsn as the number that records carry.

    Debezium knows no pg_lsn, so it comes as the bytes of its text; in a test it may come as the
    text itself.
    """
    high, low = (text if "/" in text else b64decode(text).decode()).split("/")
    return (int(high, 16) << 32) + int(low, 16)
