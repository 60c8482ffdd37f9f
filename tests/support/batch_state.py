"""The rows of some documents in dictionaries, asked as `assemble` asks the state of documents.

It is made of rows alone: nothing in it was kept current by changes.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from cdc.views.rows import GROUP, LISTING, TALLY, StoredRow, split_entries, unescape
from cdc.views.scalar.amounts import count_amounts


class Entry(NamedTuple):
    """An entry of a row, taken apart: what it is of, such as `0`, `l0` or `c0`; the text of the
    joined values; and what follows.
    """

    name: str
    text: str
    details: tuple[str, ...]


def parse_entries(head: str) -> list[Entry]:
    """Take apart the entries of a row."""
    entries = []
    for part in split_entries(head):
        name, text, *details = part.split(GROUP)
        entries.append(Entry(name, unescape(text), tuple(details)))
    return entries


class BatchState:
    """Rows by table and id, and what joins compare. Add all rows first. One thread uses it."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[str, StoredRow]] = {}
        self._entries: dict[tuple[str, str, str], dict[str, tuple[str, ...]]] = {}
        """By table, name and text: the details of each row's entry, by id."""

    def add(self, table: str, row_id: str, row: StoredRow) -> None:
        """Add a row. The same one may be added again."""
        self._rows.setdefault(table, {})[row_id] = row
        for entry in parse_entries(row.head.decode()):
            self._entries.setdefault((table, entry.name, entry.text), {})[row_id] = entry.details

    def rows(self, table: str, ids: Collection[str]) -> dict[str, StoredRow]:
        """See `State.rows`."""
        rows = self._rows.get(table, {})
        return {row_id: rows[row_id] for row_id in ids if row_id in rows}

    def members(self, table: str, slot: int, texts: Collection[str]) -> dict[str, set[str]]:
        """See `State.members`."""
        return {text: set(rows) for text, rows in self._by_text(table, str(slot), texts)}

    def listed(
        self, table: str, number: int, texts: Collection[str], limit: int
    ) -> dict[str, list[str]]:
        """See `State.listed`: in the order of the bytes of `<order> <id>`."""
        lists = {}
        for text, rows in self._by_text(table, f"{LISTING}{number}", texts):
            members = sorted(f"{order} {row_id}".encode() for row_id, (order,) in rows.items())
            lists[text] = [member.decode().partition(" ")[2] for member in members[:limit]]
        return lists

    def tallied(self, table: str, number: int, texts: Collection[str]) -> dict[str, dict[str, int]]:
        """See `State.tallied`."""
        return {
            text: count_amounts(rows.values())
            for text, rows in self._by_text(table, f"{TALLY}{number}", texts)
        }

    def deleted_keys(self, view: str, ids: Collection[str]) -> dict[str, bytes]:
        """Return nothing: only rows that exist are asked for."""
        return {}

    def _by_text(
        self, table: str, name: str, texts: Collection[str]
    ) -> Iterable[tuple[str, Mapping[str, tuple[str, ...]]]]:
        for text in texts:
            if rows := self._entries.get((table, name, text)):
                yield text, rows
