"""Random records of a table: as the connector writes them, and as it never would."""

import json
import random
from base64 import b64encode
from collections.abc import Callable, Sequence
from typing import Any
from uuid import UUID

from cdc.model.table import Table
from tests.support.envelopes import PLACEHOLDER, Row, envelope
from tests.support.twin import Raw, placeholders

SHAPES = placeholders(PLACEHOLDER)
TYPES = (
    "text",
    "bigint",
    "text",
    "integer",
    "boolean",
    "numeric(10,2)",
    "text[]",
    "integer[]",
    "jsonb",
)
"""Of columns whose values it can write, the key's first."""
Pair = tuple[bytes | None, bytes | None]


def packed(value: object, *, ascii_only: bool = False) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=ascii_only).encode()


class Scribe:
    """Writes records of one table; texts and keys are what it chooses from."""

    def __init__(
        self,
        table: Table,
        seed: int,
        texts: Sequence[str],
        keys: Sequence[Row],
        partitions: int = 2,
    ) -> None:
        self.table, self.rng, self.texts, self.keys = (
            table,
            random.Random(seed),
            list(texts),
            list(keys),
        )
        self.next = [0] * partitions
        self.lsn = 100
        self._nulls: dict[bytes, set[str]] = {}
        """By key: the columns that its last row has as null. Of these an update leaves none out."""

    def log(self, records: int, *, garbage: float = 0.0, lacking: float = 0.3) -> list[Raw]:
        return [self.record(garbage, lacking) for _ in range(records)]

    def record(self, garbage: float, lacking: float) -> Raw:
        index = self.rng.randrange(len(self.keys))
        partition = index % len(self.next)
        key = self.keys[index]
        self.lsn += self.rng.choice((0, 1))
        nulls = dict(self._nulls)
        if self.rng.random() < garbage:
            pair, self._nulls = self.wrong(key), nulls
        else:
            pair = self.right(key, lacking)
        self.next[partition] += self.rng.choice((1, 1, 1, 2, 7))
        return Raw(*pair, self.table.topic, partition, self.next[partition])

    def right(self, key: Row, lacking: float) -> Pair:
        op, ascii_only = self.rng.choice("crruuuudT"), self.rng.random() < 0.2
        nulls = self._nulls.pop(packed(key), set())
        if op == "T":
            return packed(key), None
        row = {**{column.name: self.value(column.type) for column in self.table.columns}, **key}
        if op == "d":
            return packed(key), packed(self.envelope("d", row, None), ascii_only=ascii_only)
        self._nulls[packed(key)] = {name for name, value in row.items() if value in (None, "null")}
        for column in self.table.columns:
            if (
                # A snapshot has all values.
                op != "r"
                and column.name not in nulls
                and column.name not in key
                and self.rng.random() < lacking
                and (shapes := masks(column.type))
            ):
                row[column.name] = self.rng.choice(shapes)
                self._nulls[packed(key)].discard(column.name)
        old_row = row if self.rng.random() < 0.2 else None
        return packed(key), packed(self.envelope(op, old_row, row), ascii_only=ascii_only)

    def value(self, type_: str) -> Any:
        if self.rng.random() < 0.1:
            return None
        if type_.endswith("[]"):
            elements = [self.value(type_.removesuffix("[]")) for _ in range(self.rng.randrange(4))]
            # Nothing but nulls is what the connector makes of an array of two dimensions.
            return elements if any(element is not None for element in elements) else []
        makers: dict[str, Callable[[], Any]] = {
            "integer": lambda: self.rng.choice((0, -1, 2**31 - 1, -(2**31))),
            "bigint": lambda: self.rng.choice((0, -1, 2**53 + 1, 2**63 - 1, -(2**63))),
            "boolean": lambda: self.rng.random() < 0.5,
            "numeric(10,2)": lambda: self.rng.choice(("0.00", "-1.50", "99999999.99")),
            "bytea": lambda: b64encode(self.text().encode()).decode(),
            "uuid": lambda: str(UUID(int=self.rng.getrandbits(128))),
            "jsonb": lambda: self.rng.choice(
                (json.dumps(self.text()), '{"a": [1, null, 1.50], "": {}}', "null", "[]")
            ),
            "hstore": lambda: json.dumps({self.text(): self.text(), "n": None}, ensure_ascii=False),
        }
        return makers.get(type_, self.text)()

    def text(self) -> str:
        return self.rng.choice(self.texts)

    def envelope(self, op: str, before: Row | None, after: Any) -> Row:
        message = envelope(op, before, after, lsn=self.lsn)
        message["source"] |= {"schema": self.table.schema, "table": self.table.name}
        if op == "r" and self.rng.random() < 0.5:
            message["source"] |= {"lsn": None, "sequence": f'[null,"{self.lsn}"]'}
        return message

    def wrong(self, key: Row) -> Pair:
        """A record that is no change, or no change of this table."""
        good_key, good = self.right(key, 0.1)
        while good is None or b'"op":"d"' in good:
            good_key, good = self.right(key, 0.1)
        name = self.rng.choice(self.table.key)
        keys = [None, b"", b"nope", b"[]", b"7", b'"a"', packed({**key, name: None})]
        keys += [packed({column: key[column] for column in key if column != name})]
        keys += [
            packed({**key, column: "no number"})
            for column in self.table.key
            if self.table.column(column).type == "bigint"
        ]
        if self.rng.random() < 0.3:
            return self.rng.choice(keys), good
        return good_key, self._wrong_value(good)

    def _wrong_value(self, good: bytes) -> bytes:
        message = json.loads(good)
        values: list[Any] = [{**message, "op": op} for op in ("t", "m", "x", "", None)]
        no_rows: list[Any] = [None, [], "a", 7, True]
        values += [{**message, "after": row} for row in no_rows]
        values += [
            {name: value for name, value in message.items() if name != field}
            for field in ("op", "after")
        ]
        values += [[message], [], 7, "a", None, {}]
        values += [{**message, "source": {**message["source"], "table": "elsewhere"}}]
        values += [
            {**message, "after": {**message["after"], name: bad}} for name, bad in self._misfits()
        ]
        texts = [packed(value) for value in values]
        texts += [b"", b"nope", b"\xff\xfe", good[: self.rng.randrange(1, len(good))]]
        texts += [good.replace(b'"after":{"', b'"after":{"\xff":null,"')]
        return self.rng.choice(texts)

    def _misfits(self) -> list[tuple[str, Any]]:
        bad = {
            "integer": ("a", 1.5, True, [1], {}, 2**40, 2**63),
            "bigint": ("a", 1.5, True, [1], 2**63),
            "boolean": ("a", 1, []),
            "text[]": ("a", 1, {"a": 1}, [None, None]),
            "integer[]": ("a", ["a"], [1, [2]], [None]),
        }
        return [
            (c.name, value)
            for c in self.table.columns
            if c.name not in self.table.key
            for value in bad.get(c.type, ())
        ]


def masks(type_: str) -> list[Any]:
    """The placeholders that a column of this type may have."""
    if type_ in ("jsonb", "json"):
        return [SHAPES["text"]]
    if type_ == "bigint[]":
        return [SHAPES["integer[]"]]
    return [
        shape for kind, shape in SHAPES.items() if kind.split(" ")[0] == type_ and type_ != "uuid"
    ]
