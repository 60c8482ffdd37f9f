"""A view's checkpoint as the fields of a hash: how `ViewCheckpoint` is stored in the cache."""

import itertools
import json
from collections.abc import Mapping

from cdc.model.position import ViewCheckpoint

TEXT_FIELDS = ("topic_id", "writer", "generation")
"""Fields that are stored as plain text; the others are JSON."""
SCRIPT_FIELDS = ("topic_id", "offsets", "writer", "rows", "at", "generation")
"""Fields that the scripts store by themselves; the others travel along as they are."""
VOLATILE_FIELDS = ("writer", "takeovers", "rows", "at")
"""Fields that may change while a position stays the same."""


def checkpoint_of(fields: Mapping[str, str]) -> ViewCheckpoint | None:
    """Parse the fields of a position; None where nothing has been applied yet."""
    if "topic_id" not in fields:
        return None
    count = int(fields["partitions"])
    offsets = [int(fields.get(str(partition), 0)) for partition in range(count)]
    values = {
        name: value if name in TEXT_FIELDS else json.loads(value) for name, value in fields.items()
    }
    return ViewCheckpoint.from_mapping({**values, "offsets": offsets})


def extra_fields(checkpoint: ViewCheckpoint) -> tuple[str, ...]:
    """List what the scripts store as it is: field, value, field, value, ..."""
    fields = json.loads(checkpoint.to_json())
    pairs = (
        (name, json.dumps(value)) for name, value in fields.items() if name not in SCRIPT_FIELDS
    )
    return tuple(itertools.chain.from_iterable(pairs))


def expected_fields(fields: Mapping[str, str]) -> dict[str, str]:
    """Select the fields that must be the same at an exchange of databases; '' for an absent one."""
    partitions = range(int(fields.get("partitions", 0)))
    absent = dict.fromkeys(["topic_id", "generation", *map(str, partitions)], "")
    return absent | {name: value for name, value in fields.items() if name not in VOLATILE_FIELDS}
