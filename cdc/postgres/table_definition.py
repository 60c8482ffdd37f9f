"""Read the journal of table definitions: what each captured table looked like after a command.

In:  records of the topic `<pipeline>.cdc.ddl`. Out: a `Definition` of each; DecodeError.
Invariant: pure.
"""

import json
from base64 import b64decode
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

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
    """One column in the journal; `number` survives a rename.

    `types` has the parts of its type at any depth. `identified` is False if the replica identity is
    an index without the column.
    """

    name: str
    type: str
    number: int
    default: str | None = None
    missing: bool = False
    key: int | None = None
    types: tuple[TypeDefinition, ...] = ()
    identified: bool = True


@dataclass(frozen=True)
class Definition:
    """The definition of a table after a command; `streamed`: the command ran while the pipeline
    captured.
    """

    id: int
    table: str
    relation: int
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
            relation=after["relation"],
            lsn=lsn_number(after["lsn"]),
            command=after["command"],
            columns=_loaded(after["columns"], _decode_columns),
            partitions=_loaded(after["partitions"], _decode_partitions),
            streamed=envelope["op"] == "c",
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        raise DecodeError(
            "A record of cdc.ddl isn't one of the journal of table definitions.",
            hint="does anything but the connector write that topic, or anything but its triggers that table?",
        ) from None


# Made here, in one thread: threads that decode a class for the first time at the same time crash msgspec 0.22.
_decode_columns = msgspec.json.Decoder(tuple[ColumnDefinition, ...] | None).decode
_decode_partitions = msgspec.json.Decoder(tuple[str, ...] | None).decode


def _loaded(value: Any, decode: Callable[[str], Any]) -> Any:
    """Decode a value of json, which Debezium sends as its text."""
    return decode(value if isinstance(value, str) else json.dumps(value))


def lsn_number(text: str) -> int:
    """A pg_lsn as the number that records carry.

    Debezium knows no pg_lsn, so it comes as the bytes of its text; in a test it may come as the
    text itself.
    """
    high, low = (text if "/" in text else b64decode(text).decode()).split("/")
    return (int(high, 16) << 32) + int(low, 16)
