"""What a change of a table's definition means for the rows that a view holds already.

In:  records of the topic `<pipeline>.cdc.ddl`. Out: consequences, one for each change that happened while capturing.
Invariant: pure; a consequence of "none" means that every stored row is still what a new snapshot would send.
"""

import json
from base64 import b64decode
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from cdc.errors import DecodeError
from cdc.postgres.type_change import same_text

Impact = Literal["none", "refresh", "cleanse", "gone"]
STRENGTH: tuple[Impact, ...] = ("none", "refresh", "cleanse", "gone")
Found = tuple[Impact, str]
MIGRATE_COMMANDS = ("PUBLISH", "DESCRIBE")
"""Commands that `cdc migrate` notes for a captured table; the others are Postgres' own tags."""
BELATED_COMMANDS = ("DESCRIBE", "COMPARE")
"""Noted when somebody looked: changes made in between, under the new definition, were read under the old one."""


@dataclass(frozen=True)
class ColumnDefinition:
    """One column as the journal has it; `number` is what a rename leaves alone, None in old entries."""

    name: str
    type: str
    number: int | None = None
    default: str | None = None
    missing: bool = False
    key: int | None = None
    labels: tuple[str, ...] | None = None
    attributes: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Definition:
    """What a table looked like after a command; `streamed`: the command ran while the pipeline captured."""

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
        ordered = sorted((shape.key, shape.name) for shape in self.columns or () if shape.key is not None)
        return tuple(name for _, name in ordered)


@dataclass(frozen=True)
class Consequence:
    """Of one definition, by its id.

    kind: none; refresh: rows changed without events, all have to be sent again; cleanse: rows vanished without
    events, a new floor and then all rows again; gone: the table isn't captured any more.
    """

    id: int
    table: str
    kind: Impact
    what: str


def parse(value: bytes) -> Definition | None:
    """A record's definition; None for what tells of none: a tombstone, a deletion.

    Raises:
        DecodeError: for what isn't a record of the journal.
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
            columns=_shapes(_loaded(after["columns"])),
            partitions=_tuple(_loaded(after.get("partitions"))),
            streamed=envelope["op"] == "c",
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        raise DecodeError(
            "A record of cdc.ddl isn't one of the journal of table definitions.",
            hint="does anything but the connector write that topic, or anything but its triggers that table?",
        ) from None


def consequences(history: Sequence[Definition], captured: Collection[str]) -> list[Consequence]:
    """What the streamed definitions of captured tables mean, in the order of the journal.

    `history` is all that the topic holds; an entry that comes twice, as after another snapshot, counts as it came last.
    """
    journal = _Journal()
    found = []
    for entry in sorted({entry.id: entry for entry in history}.values(), key=lambda entry: entry.id):
        if entry.streamed:
            found += [Consequence(entry.id, *one) for one in journal.judge(entry) if one[0] in captured]
        journal.add(entry)
    return found


def last_silent_change_lsn(history: Sequence[Definition], table: str) -> int:
    """The LSN of the last definition that changed rows of a table without events; 0 when none did.

    A row whose newest record is from before it has to be sent again, and hasn't been.
    """
    silent = {one.id for one in consequences(history, [table]) if one.kind in ("refresh", "cleanse")}
    return max((entry.lsn for entry in history if entry.id in silent), default=0)


@dataclass
class _Journal:
    """What is known before the next entry."""

    by_relation: dict[int, Definition] = field(default_factory=dict)
    by_name: dict[str, Definition] = field(default_factory=dict)
    published: dict[str, int] = field(default_factory=dict)
    """The relation that a captured name stood for."""
    dropped: dict[int | str, set[str]] = field(default_factory=dict)
    """Names of columns that a table once had."""
    renamed: dict[str, Definition] = field(default_factory=dict)
    """By the old name: the entry that has the new one."""

    def before(self, entry: Definition) -> Definition | None:
        if entry.relation in self.by_relation:
            return self.by_relation[entry.relation]
        # An entry from before the journal had oids, or of a table that now is gone.
        named = self.by_name.get(entry.table)
        return named if named and None in (named.relation, entry.relation) and named.columns is not None else None

    def judge(self, entry: Definition) -> Iterator[tuple[str, Impact, str]]:
        before = self.before(entry)
        if before and before.table != entry.table:
            yield before.table, "gone", f"{before.table} was renamed to {entry.table}"
        yield entry.table, *self._verdict(entry, before)

    def add(self, entry: Definition) -> None:
        before = self.before(entry)
        if before and before.table != entry.table:
            self.renamed[before.table] = entry
        lost = {shape.name for shape in (before.columns or () if before else ())}
        lost -= {shape.name for shape in entry.columns or ()}
        self.dropped.setdefault(entry.relation or entry.table, set()).update(lost)
        self.by_name[entry.table] = entry
        if entry.relation is not None:
            self.by_relation[entry.relation] = entry
            if entry.command in MIGRATE_COMMANDS:
                self.published[entry.table] = entry.relation
            if entry.columns is None:
                del self.by_relation[entry.relation]

    def _verdict(self, entry: Definition, before: Definition | None) -> Found:
        if entry.columns is None:
            return "gone", f"{entry.table} was dropped"
        if identity := self._identity(entry, before):
            return identity
        if entry.command == "TRUNCATE PARTITION":
            return "cleanse", f"a partition of {entry.table} was truncated alone"
        found = self._compared(entry, before)
        if entry.command == "DETACH PARTITION":
            away = f"a partition of {entry.table} was another one, or detached, for a while"
            return max(found, ("cleanse", away), key=_strength)
        if entry.command == "REWRITE TABLE":
            return max(("refresh", f"{entry.table} was rewritten"), found, key=_strength)
        return found

    def _identity(self, entry: Definition, before: Definition | None) -> Found | None:
        """Whether the name stands for what it stood for when it was captured."""
        stood_for = self.published.get(entry.table)
        if stood_for is not None and entry.relation not in (None, stood_for):
            if entry.command in MIGRATE_COMMANDS:
                return "cleanse", f"{entry.table} is another table than the one that was captured"
            return "gone", f"another table now has the name {entry.table}: cdc migrate and cdc register capture it"
        if before and before.table != entry.table and stood_for is not None:
            return "cleanse", f"{entry.table} had another name for a while, under which it wasn't captured"
        return None

    def _compared(self, entry: Definition, before: Definition | None) -> Found:
        if before is None:
            return "none", f"the first that is known of {entry.table}"
        found: list[Found] = [("none", f"rows of {entry.table} stay as they are")]
        found += _columns(before, entry, self.dropped.get(entry.relation or entry.table, set()))
        # A name that was given up before then may since be another partition's.
        renamed = {old: to.table for old, to in self.renamed.items() if to.id > before.id}
        found += _partitions(before, entry, renamed)
        return max(found, key=_strength)


def _strength(found: Found) -> int:
    return STRENGTH.index(found[0])


def _columns(before: Definition, now: Definition, dropped: Collection[str]) -> Iterator[Found]:
    old, new = before.columns or (), now.columns or ()
    numbered = all(shape.number is not None for shape in (*old, *new))
    known = {shape.number if numbered else shape.name: shape for shape in old}
    if before.key != now.key:
        yield "cleanse", f"the primary key of {now.table} is another one"
    for shape in new:
        was = known.get(shape.number if numbered else shape.name)
        if was is None:
            late = now.command in BELATED_COMMANDS
            yield from _added(shape, now.table, {*dropped, *(each.name for each in old)}, late=late)
        else:
            yield from _changed(was, shape, now.table)


def _added(shape: ColumnDefinition, table: str, known: Collection[str], *, late: bool) -> Iterator[Found]:
    column = f"column {shape.name} of {table}"
    if shape.default is not None or shape.missing:
        yield "refresh", f"{column} was added with a default"
    elif shape.name in known:
        yield "refresh", f"{column} was dropped and added again"
    elif late:
        yield "refresh", f"{column} was added some time before it was noticed"


def _changed(was: ColumnDefinition, now: ColumnDefinition, table: str) -> Iterator[Found]:
    column = f"column {now.name} of {table}"
    if was.name != now.name:
        yield "refresh", f"column {was.name} of {table} was renamed to {now.name}"
    if not same_text(was.type, now.type):
        # A key of another form is another key, in another partition.
        yield "refresh" if now.key is None else "cleanse", f"{column} has another type"
    elif was.labels is not None and not set(was.labels) <= set(now.labels or ()):
        yield "refresh" if now.key is None else "cleanse", f"a label of {column} was renamed"
    elif was.attributes is not None and was.attributes != now.attributes:
        yield "refresh" if now.key is None else "cleanse", f"the composite type of {column} was changed"


def _partitions(before: Definition, now: Definition, renamed: dict[str, str]) -> Iterator[Found]:
    if before.partitions is None or now.partitions is None:
        return
    old, new = {renamed.get(name, name) for name in before.partitions}, set(now.partitions)
    if lost := sorted(old - new):
        yield "cleanse", f"{now.table} has lost {', '.join(lost)}"
    # One that is created as a partition has no rows; its rows come as events.
    if (more := sorted(new - old)) and not now.command.startswith("CREATE"):
        yield "refresh", f"{now.table} has got {', '.join(more)}"


def _shapes(columns: list[dict[str, Any]] | None) -> tuple[ColumnDefinition, ...] | None:
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
        )
        for column in columns
    )


def _tuple(names: list[str] | None) -> tuple[str, ...] | None:
    return None if names is None else tuple(names)


def _loaded(text: Any) -> Any:
    return json.loads(text) if isinstance(text, str) else text


def lsn_number(text: str) -> int:
    """A pg_lsn as the number that records carry.

    Debezium knows no pg_lsn, so it comes as the bytes of its text; in a test it may come as the text itself.
    """
    high, low = (text if "/" in text else b64decode(text).decode()).split("/")
    return (int(high, 16) << 32) + int(low, 16)
