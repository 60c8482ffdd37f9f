"""Notes of what documents are current in, as fields of the hash of documents.

A field is `<view> <topic>`, its value the JSON of topic id, offsets and floor; or `<view> now()`, its
value the time of the view's clock. No name of a view has a space, nor have the hash's other fields.
"""

import json
from collections.abc import Collection, Iterable, Mapping

from cdc.model.position import Position, ViewCheckpoint

CLOCK = "now()"
"""No name of a topic has parentheses."""


def note_field(view: str, topic: str) -> str:
    """Name the field of what a view's documents are current in."""
    return f"{view} {topic}"


def to_fields(
    reached: Mapping[str, Mapping[str, ViewCheckpoint | None]], clocks: Mapping[str, int]
) -> list[str]:
    """List field, value, field, value, ... of notes by view and topic, and of clocks by view."""
    fields = []
    for view, now in clocks.items():
        fields += [note_field(view, CLOCK), str(now)]
    for view, checkpoints in reached.items():
        for topic, checkpoint in checkpoints.items():
            if checkpoint:
                position = checkpoint.position
                value = json.dumps([position.topic_id, position.offsets, checkpoint.floor])
                fields += [note_field(view, topic), value]
    return fields


def from_fields(fields: Mapping[bytes, bytes]) -> dict[str, dict[str, ViewCheckpoint]]:
    """Return the notes among the fields of a hash, by view and topic."""
    notes: dict[str, dict[str, ViewCheckpoint]] = {}
    for field, text in fields.items():
        view, _, topic = field.decode().partition(" ")
        if topic and topic != CLOCK:
            topic_id, offsets, floor = json.loads(text)
            position = Position(topic_id, tuple(offsets))
            notes.setdefault(view, {})[topic] = ViewCheckpoint(position, floor=floor)
    return notes


def clocks_from_fields(fields: Mapping[bytes, bytes]) -> dict[str, int]:
    """Return the clocks among the fields of a hash, by view."""
    clocks = {}
    for field, text in fields.items():
        view, _, topic = field.decode().partition(" ")
        if topic == CLOCK:
            clocks[view] = int(text)
    return clocks


def stale_fields(fields: Iterable[bytes], current: Collection[str]) -> list[bytes]:
    """List the fields of notes of other views than these."""
    parts = ((field, *field.decode().partition(" ")) for field in fields)
    return [field for field, view, space, _ in parts if space and view not in current]
