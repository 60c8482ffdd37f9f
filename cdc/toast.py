"""Values that the log doesn't carry: a large value that an update left alone, without REPLICA IDENTITY FULL.

Debezium writes a placeholder in its place, whose shape follows the column's type (UnchangedToastedPlaceholder.java).
Ours is a secret of 128 bits per deployment, so wherever it stands it is one: data can't look like it.
"""

import json
import uuid
from base64 import b64encode
from dataclasses import dataclass
from functools import cached_property, reduce
from hashlib import md5

from pyspark.sql import Column
from pyspark.sql import functions as F


@dataclass(frozen=True)
class Placeholder:
    """One deployment's placeholder. The expressions take the row of any table as the connector's JSON text."""

    text: str

    @cached_property
    def shapes(self) -> tuple[object, ...]:
        """Every JSON value that stands for a value that isn't there."""
        raw = self.text.encode()
        encoded = b64encode(raw).decode()
        # java.util.UUID.nameUUIDFromBytes: version 3 without a namespace.
        named = str(uuid.UUID(bytes=md5(raw, usedforsecurity=False).digest(), version=3))
        pair = {self.text: self.text}
        texts = (self.text, encoded, named)
        return (*texts, *([one] for one in texts), list(raw), pair, _compact(pair))

    def suspected(self, row: Column) -> Column:
        """Whether a placeholder may be in there: cheap, for every record."""
        text, encoded, named, *_ = map(str, self.shapes)
        # From a character on that rows have few of: at each of them more is compared.
        marks = (text, encoded, named[8:], _compact(list(self.text.encode()))[3:-1])
        return reduce(lambda a, b: a | b, (row.contains(F.lit(mark)) for mark in marks))

    def kept(self, row: Column, suspected: Column) -> Column:
        """The names of the columns without a value, array<string>; null when there is none, or none is suspected."""
        values = F.from_json(row, "map<string, string>")
        # Spark gives a nested value as its JSON text, a string as itself.
        listed = [shape if isinstance(shape, str) else _compact(shape) for shape in self.shapes]
        names = F.map_keys(F.map_filter(values, lambda _, value: value.isin(listed)))
        return F.when(suspected, F.when(F.size(names) > 0, names))

    def masked(self, row: Column, suspected: Column) -> Column:
        """The row with null in the place of every placeholder."""
        fragments = sorted((_compact(shape) for shape in self.shapes), key=len, reverse=True)
        cleaned = reduce(lambda text, part: F.replace(text, F.lit(part), F.lit("null")), fragments, row)
        return F.when(suspected, cleaned).otherwise(row)


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))
