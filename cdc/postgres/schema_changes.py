"""Decide what a change of a table's definition means for the rows that a view already holds.

In:  the definitions of the journal. Out: a consequence of each change that happened while capturing.
Invariant: pure; a consequence of "none" means that every stored row is still what a new snapshot
would send.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from cdc.model.mask import Mask
from cdc.postgres.table_definition import ColumnDefinition, Definition, TypeDefinition

Impact = Literal["none", "refresh", "cleanse", "gone"]
STRENGTH: tuple[Impact, ...] = ("none", "refresh", "cleanse", "gone")
Verdict = tuple[Impact, str]
"""An impact, and its reason."""
MIGRATE_COMMANDS = ("PUBLISH", "DESCRIBE")
"""Commands in entries that `cdc migrate` writes for a captured table; others are Postgres' own
tags.
"""
BELATED_COMMANDS = ("DESCRIBE", "COMPARE")
"""Commands in entries that were written by a comparison: changes made before it, under the new
definition, were read under the old one.
"""
TYPE = re.compile(r"([a-z ]+?)(?:\((\d+)(?:,(-?\d+))?\))?((?:\[\])*)")
UNLIMITED = 1 << 31
UNMASKED: Mapping[str, Mask] = MappingProxyType({})


@dataclass(frozen=True)
class Consequence:
    """The consequence of one definition, whose id it has.

    kind: none; refresh: rows changed without events, all have to be sent again; cleanse: rows
    vanished without events, a new floor and then all rows again; gone: the table isn't captured any
    more.
    """

    id: int
    table: str
    kind: Impact
    reason: str


def consequences(
    history: Sequence[Definition],
    captured: Collection[str],
    events: Collection[str] = (),
    masks: Mapping[str, Mask] = UNMASKED,
) -> list[Consequence]:
    """The consequences of streamed definitions of captured tables, in the order of the journal.

    `history` holds all records of the topic. Of an entry that occurs twice, as after another
    snapshot, the last counts. `events`: tables whose views keep rows that vanish.
    `masks`: of columns, as schema.table.column.
    """
    journal = _Journal(events, masks)
    results = []
    newest = {entry.id: entry for entry in history}
    for entry in sorted(newest.values(), key=lambda entry: entry.id):
        if entry.streamed:
            for table, impact, reason in journal.classify(entry):
                if table in captured:
                    results.append(Consequence(entry.id, table, impact, reason))
        journal.add(entry)
    return results


def last_silent_change_lsn(
    history: Sequence[Definition], table: str, masks: Mapping[str, Mask] = UNMASKED
) -> int:
    """The LSN of the last definition that changed rows of a table without events; 0 if there is
    none.

    A row whose newest record is older has to be sent again, and hasn't been.
    """
    silent = {
        consequence.id
        for consequence in consequences(history, [table], masks=masks)
        if consequence.kind in ("refresh", "cleanse")
    }
    return max((entry.lsn for entry in history if entry.id in silent), default=0)


@dataclass
class _Journal:
    """The state of the journal before the next entry. `events`, `masks`: see `consequences`."""

    events: Collection[str] = ()
    masks: Mapping[str, Mask] = field(default_factory=dict)
    by_relation: dict[int, Definition] = field(default_factory=dict)
    published: dict[str, int] = field(default_factory=dict)
    """The relation that a captured name stands for."""
    dropped: dict[int, set[str]] = field(default_factory=dict)
    """Names of columns that a table had once, by relation."""
    renamed: dict[str, Definition] = field(default_factory=dict)
    """By the old name: the entry with the new name."""

    def classify(self, entry: Definition) -> Iterator[tuple[str, Impact, str]]:
        """The table, the impact and the reason for each table that the entry concerns."""
        previous = self.by_relation.get(entry.relation)
        if previous and previous.table != entry.table:
            yield previous.table, "gone", f"{previous.table} was renamed to {entry.table}"
        yield entry.table, *self._verdict(entry, previous)

    def add(self, entry: Definition) -> None:
        previous = self.by_relation.get(entry.relation)
        if previous and previous.table != entry.table:
            self.renamed[previous.table] = entry
        lost = {column.name for column in (previous.columns or () if previous else ())}
        lost -= {column.name for column in entry.columns or ()}
        self.dropped.setdefault(entry.relation, set()).update(lost)
        self.by_relation[entry.relation] = entry
        if entry.command in MIGRATE_COMMANDS:
            self.published[entry.table] = entry.relation
        if entry.columns is None:
            del self.by_relation[entry.relation]

    def _verdict(self, entry: Definition, previous: Definition | None) -> Verdict:
        if entry.columns is None:
            return "gone", f"{entry.table} was dropped"
        if identity := self._identity(entry, previous):
            return identity
        if entry.command == "TRUNCATE PARTITION":
            return self._lost(entry.table), f"a partition of {entry.table} was truncated alone"
        if entry.command == "PUBLICATION":
            return "cleanse", f"a publication left out changes of {entry.table} for a while"
        verdict = self._compare(entry, previous)
        if entry.command == "DETACH PARTITION":
            reason = f"a partition of {entry.table} was another one, or detached, for a while"
            impact: Impact = "refresh" if entry.table in self.events else "cleanse"
            return max(verdict, (impact, reason), key=_strength)
        if entry.command == "REWRITE TABLE":
            return max(("refresh", f"{entry.table} was rewritten"), verdict, key=_strength)
        return verdict

    def _identity(self, entry: Definition, previous: Definition | None) -> Verdict | None:
        """The verdict if the name no longer stands for the captured table; None if it does."""
        stood_for = self.published.get(entry.table)
        if stood_for not in (None, entry.relation):
            if entry.command in MIGRATE_COMMANDS:
                return "cleanse", f"{entry.table} is another table than the one that was captured"
            return (
                "gone",
                f"another table now has the name {entry.table}: cdc migrate and cdc register capture it",
            )
        if previous and previous.table != entry.table and stood_for is not None:
            return (
                "cleanse",
                f"{entry.table} had another name for a while, under which it wasn't captured",
            )
        return None

    def _compare(self, entry: Definition, previous: Definition | None) -> Verdict:
        if previous is None:
            return "none", f"the first that is known of {entry.table}"
        verdicts: list[Verdict] = [("none", f"rows of {entry.table} stay as they are")]
        dropped = self.dropped.get(entry.relation, set())
        verdicts += _compare_columns(previous, entry, dropped, self.masks)
        # Only later renames count: an older name may have been given to another partition.
        renamed = {
            name: definition.table
            for name, definition in self.renamed.items()
            if definition.id > previous.id
        }
        verdicts += _compare_partitions(previous, entry, renamed, self._lost(entry.table))
        return max(verdicts, key=_strength)

    def _lost(self, table: str) -> Impact:
        """The impact of rows that have vanished without an event."""
        return "none" if table in self.events else "cleanse"


def _strength(verdict: Verdict) -> int:
    return STRENGTH.index(verdict[0])


def _compare_columns(
    previous: Definition,
    current: Definition,
    dropped: Collection[str],
    masks: Mapping[str, Mask],
) -> Iterator[Verdict]:
    old_columns = previous.columns or ()
    new_columns = current.columns or ()
    by_number = {column.number: column for column in old_columns}
    used_names = {*dropped, *(column.name for column in old_columns)}
    if previous.key != current.key:
        yield "cleanse", f"the primary key of {current.table} is another one"
    for column in new_columns:
        was = by_number.get(column.number)
        if was is None:
            belated = current.command in BELATED_COMMANDS
            yield from _column_added(column, current.table, used_names, belated=belated)
        else:
            yield from _column_changed(was, column, current.table, has_key=bool(current.key))
            mask = masks.get(f"{current.table}.{column.name}")
            if mask and mask.sql(was.type, "") != mask.sql(column.type, ""):
                yield "refresh", f"the mask of {column.name} of {current.table} has another length"


def _column_added(
    definition: ColumnDefinition, table: str, used_names: Collection[str], *, belated: bool
) -> Iterator[Verdict]:
    column = f"column {definition.name} of {table}"
    if definition.default is not None or definition.missing:
        yield "refresh", f"{column} was added with a default"
    elif definition.name in used_names:
        yield "refresh", f"{column} was dropped and added again"
    elif belated:
        yield "refresh", f"{column} was added some time before it was noticed"


def _column_changed(
    was: ColumnDefinition, now: ColumnDefinition, table: str, *, has_key: bool
) -> Iterator[Verdict]:
    column = f"column {now.name} of {table}"
    if was.name != now.name:
        yield "refresh", f"column {was.name} of {table} was renamed to {now.name}"
    # A key of another form is another key, in another partition.
    impact: Impact = "refresh" if now.key is None else "cleanse"
    # Without a primary key the columns that the pipeline file names are the key; it may be this one.
    if now.identified and not was.identified and (now.key is not None or not has_key):
        yield "cleanse", f"{column} was missing from what the log holds of deleted rows"
    if not same_text(was.type, now.type):
        yield impact, f"{column} has another type"
    else:
        yield from ((impact, reason) for reason in _types_changed(was.types, now.types, column))


def _types_changed(
    was: Sequence[TypeDefinition], now: Sequence[TypeDefinition], column: str
) -> Iterator[str]:
    """Reasons why values of a column read differently although its type has the same name.

    Labels are matched by their oids, because two labels may swap names.
    """
    current = {part.oid: part for part in now}
    for old in was:
        new = current.get(old.oid)
        if new is None:
            yield f"a part of the type of {column} was replaced"
            continue
        if any(new.labels.get(oid) != label for oid, label in old.labels.items()):
            yield f"a label of {column} was renamed"
        if new.attributes != old.attributes:
            yield f"the composite type of {column} was changed"
        if new.base != old.base:
            yield f"the domain of {column} has another base"


def _compare_partitions(
    previous: Definition, current: Definition, renamed: dict[str, str], lost_rows: Impact
) -> Iterator[Verdict]:
    if previous.partitions is None or current.partitions is None:
        return
    old_names = {renamed.get(name, name) for name in previous.partitions}
    new_names = set(current.partitions)
    if lost := sorted(old_names - new_names):
        yield lost_rows, f"{current.table} has lost {', '.join(lost)}"
    # A table that is created as a partition has no rows; its rows come as events.
    if (added := sorted(new_names - old_names)) and not current.command.startswith("CREATE"):
        yield "refresh", f"{current.table} has got {', '.join(added)}"


def same_text(old_type: str, new_type: str) -> bool:
    """Whether values of `old_type` read the same after ALTER COLUMN ... TYPE `new_type`, without
    USING.
    """
    if old_type == new_type:
        return True
    a = TYPE.fullmatch(old_type)
    b = TYPE.fullmatch(new_type)
    if a is None or b is None or a[4] != b[4]:
        return False
    texts = ("text", "character varying")
    if a[1] in texts and b[1] in texts:
        return _length(a) <= _length(b)
    if a[1] == b[1] in ("bit varying", "varbit"):
        return _length(a) <= _length(b)
    if a[1] == b[1] == "numeric" and a[2] and b[2]:
        # Digits after the point are printed, so that another scale is another text.
        return int(a[3] or 0) == int(b[3] or 0) and int(a[2]) <= int(b[2])
    return False


def _length(match: "re.Match[str]") -> int:
    return int(match[2]) if match[2] else UNLIMITED
