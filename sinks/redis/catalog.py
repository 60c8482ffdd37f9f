"""The catalog of a cluster's generations: one hash, so that a change of it is one step.

Fields: <schema>.<table> is what the keys of the rows begin with that readers see;
<schema>.<table>@<generation> is where a generation lies; -<name> is one whose keys are being removed.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import redis

from cdc.model.generation import new_generation
from cdc.redis.server import position_key, view_key
from cdc.sinks.redis.cluster_scripts import CHANGE
from cdc.sinks.redis.database import Database
from cdc.sinks.redis.slots import SLOTS, ask, checked, tags
from cdc.sinks.redis.tables import remove_keys

PAGE_SLOTS = 1024
REMOVED = "-"


@dataclass(frozen=True)
class Place:
    """Where a generation of a table lies.

    name    what its keys have instead of the table's name; no two generations ever have the same
    copies  the slots in which copies of its position are
    """

    table: str
    generation: str
    name: str
    copies: tuple[int, ...] = ()

    @property
    def field(self) -> str:
        return f"{self.table}@{self.generation}"

    @property
    def text(self) -> str:
        return json.dumps([self.table, self.generation, self.name, self.copies])

    @staticmethod
    def parse(text: str) -> "Place":
        table, generation, name, copies = json.loads(text)
        return Place(table, generation, name, tuple(copies))

    @staticmethod
    def new(table: str, generation: str) -> "Place":
        return Place(table, generation, f"{table}@{new_generation()}")


@dataclass(frozen=True)
class Catalog:
    """What was read of it. begins: by table; places: by field."""

    begins: Mapping[str, str]
    places: Mapping[str, Place]
    removed: tuple[Place, ...]

    def live(self, prefix: str, table: str) -> Place | None:
        """Return the generation that readers see."""
        begin = self.begins.get(table)
        of_table = (place for place in self.places.values() if place.table == table)
        return next((at for at in of_table if view_key(prefix, at.name) == begin), None)

    def of(self, table: str) -> list[Place]:
        return sorted(
            (at for at in self.places.values() if at.table == table), key=lambda at: at.generation
        )


def catalog_key(prefix: str) -> str:
    return f"{prefix}:_cdc:catalog"


def read_catalog(database: Database) -> Catalog:
    key = catalog_key(database.prefix)
    fields: dict[str, str] = database.ask(lambda server: server.hgetall(key))
    places = {name: Place.parse(text) for name, text in fields.items() if text.startswith("[")}
    removed = [places.pop(name) for name in list(places) if name.startswith(REMOVED)]
    begins = {name: text for name, text in fields.items() if not text.startswith("[")}
    return Catalog(begins, places, tuple(removed))


def change(database: Database, *changes: tuple[str, str, str]) -> bool:
    """Change fields in one step: name, value, the one that it gets; '' for none. False if one of them
    has another value.
    """
    words = [word for one in changes for word in one]
    key = catalog_key(database.prefix)
    return bool(database.ask(lambda server: server.eval(CHANGE, 1, key, *words)))


def copy_key(prefix: str, name: str, slot: int) -> str:
    """Return the key of a position's copy in a slot."""
    return _key_in_slot(prefix, name, slot)


def applied_key(prefix: str, name: str, slot: int) -> str:
    """Return the key of the hash that says what is applied in a slot."""
    return _key_in_slot(prefix, name, slot) + ":applied"


def removal(place: Place) -> list[tuple[str, str, str]]:
    """The changes after which a generation is known only as one to remove."""
    return [(place.field, place.text, ""), (REMOVED + place.name, "", place.text)]


def remove_places(database: Database, places: Iterable[Place]) -> None:
    """Remove all keys of generations that readers don't see, then their names."""
    for place in places:
        for first in SLOTS[::PAGE_SLOTS]:
            slots = SLOTS[first : first + PAGE_SLOTS]
            database.ask(partial(_unlink_in_slots, slots, database.prefix, place.name))
        remove_keys(database.row_keys(place.name), database)
        change(database, (REMOVED + place.name, place.text, ""))


def _unlink_in_slots(slots: Sequence[int], prefix: str, name: str, server: redis.Redis) -> None:
    keys = [(copy_key(prefix, name, slot), applied_key(prefix, name, slot)) for slot in slots]
    checked(ask(server, [(slot, ("UNLINK", *two)) for slot, two in zip(slots, keys, strict=True)]))


def _key_in_slot(prefix: str, name: str, slot: int) -> str:
    # The tag comes first: a name may have braces.
    return position_key(f"{prefix}:_cdc:{{{tags()[slot]}}}", name)
