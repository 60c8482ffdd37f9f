"""Random lives of many rows side by side: what Postgres holds, and the log that its connector leaves."""

import random
from collections.abc import Mapping, Sequence

from cdc.model.table import Column, Table, row_id
from tests.support.envelopes import Row, Topic

NAMES = ("k", 'quote"', "sep,", "ü😀", "", "a]", "\\")
LARGE = ("v", "w")
"""Columns whose unchanged values an update doesn't carry."""


def table(topic: str) -> Table:
    """Rows that count their changes in `n`."""
    columns = (
        Column("a", "text"),
        Column("b", "bigint"),
        Column("v", "text"),
        Column("w", "text[]"),
        Column("n", "bigint"),
    )
    return Table("public", "lives", columns, ("a", "b"), topic)


class World:
    """The source and its log. Every change has a number: it is the row's `n` and the log's LSN."""

    def __init__(self, table: Table, partitions: int = 2, keys: int = 300) -> None:
        self.topic = Topic(table, partitions)
        self.table = table
        self.rows: dict[str, Row] = {}
        self.floor = 0
        self.lives = 0
        self._clock = 0
        # Far beyond what a double tells apart.
        self._keys = [
            (NAMES[number % len(NAMES)], (number - 5) * (2**53 + 1)) for number in range(keys)
        ]

    def write(self, seed: int, changes: int) -> None:
        """Transactions of one to five changes, each with its commit marker where it has written."""
        rng = random.Random(seed)
        while changes > 0:
            ends, several = self.topic.ends, rng.randint(1, 5)
            for _ in range(several):
                self._change(rng)
            changes -= several
            for partition, (old_end, new_end) in enumerate(zip(ends, self.topic.ends, strict=True)):
                if new_end > old_end and rng.random() < 0.5:
                    self.topic.gap(partition)

    def truncate(self) -> None:
        """Rows vanish without a record; the log's changes until now are dead from here on."""
        self.rows.clear()
        self._clock += 1
        self.floor = self._clock

    def _change(self, rng: random.Random) -> None:
        key = rng.choice(self._keys)
        if row_id(list(key)) not in self.rows:
            self._insert(rng, key)
            return
        kind = rng.random()
        if kind < 0.2:
            self._delete(key)
        elif kind < 0.3:
            self._rename(rng, key)
        else:
            self._update(rng, key)

    def _insert(self, rng: random.Random, key: tuple[str, int]) -> None:
        self.lives += 1
        self._put(rng.choice("cccr"), {"a": key[0], "b": key[1], **_large(rng), "n": self._tick()})

    def _update(self, rng: random.Random, key: tuple[str, int]) -> None:
        row = self.rows[row_id(list(key))]
        # The log leaves out large values only, of which null is none.
        lacking = [name for name in LARGE if row[name] is not None and rng.random() < 0.6]
        fresh = {name: value for name, value in _large(rng).items() if name not in lacking}
        self._put("u", {**row, **fresh, "n": self._tick()}, lacking)

    def _delete(self, key: tuple[str, int]) -> None:
        row = self.rows.pop(row_id(list(key)))
        self.topic.add("d", row, lsn=self._tick())

    def _rename(self, rng: random.Random, key: tuple[str, int]) -> None:
        """A row under another key: Debezium writes a delete and, perhaps in another partition, a create."""
        free = [key for key in self._keys if row_id(list(key)) not in self.rows]
        if not free:
            return
        to = rng.choice(free)
        row = self.rows[row_id(list(key))]
        self._delete(key)
        self.lives += 1
        self._put("c", {**row, "a": to[0], "b": to[1], "n": self._tick()})

    def _put(self, op: str, row: Row, lacking: Sequence[str] = ()) -> None:
        self.rows[row_id([row["a"], row["b"]])] = row
        self.topic.add(op, row, lacking, lsn=self._clock)

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def model(self, ends: Sequence[int]) -> dict[str, Row]:
        """The view that the records below `ends` make, dead ones left out."""
        return self.topic.model(ends, self.floor)


def _large(rng: random.Random) -> Row:
    texts = ("x", "", 'a "b" \\ \n ü', "large " * 20)
    return {
        "v": rng.choice((*texts, None)),
        "w": rng.choice((None, [], ["y", None], [rng.choice(texts)])),
    }


class Reader:
    """Looks at a view again and again, and remembers the newest version of each row that it has seen."""

    def __init__(self) -> None:
        self.versions: dict[str, int] = {}
        self.absent: set[str] = set()
        self.restarts = 0

    def check(self, view: Mapping[str, Row]) -> None:
        for key, row in view.items():
            last = self.versions.get(key, 0)
            assert row["n"] >= last, f"version {row['n']} of a row after version {last}"
            assert row["n"] > last or key not in self.absent, (
                f"version {row['n']} of a row is back after its end"
            )
            self.versions[key] = row["n"]
        self.absent = self.versions.keys() - view.keys()

    def restart(self) -> None:
        """The view is made again from an earlier place: what was seen doesn't bind it."""
        self.restarts += 1
        self.versions.clear()
        self.absent.clear()
