"""Masks: what the connector writes into the log in place of a column's values.

In:  a mask of the pipeline file, a column's type. Out: Debezium's setting; the masked value in SQL.
Pure. Standard library only.

Debezium wraps a mask around its own conversion of a value (`MaskStrings`, `TruncateColumn`), so
that it also masks the placeholder of a value that the log doesn't carry.
"""

import re
from dataclasses import dataclass
from hashlib import sha256

STARS = 8
SURE = 32
"""A masked placeholder of so many characters can be no value: nobody can make one that equals it."""
UNLIMITED = 1 << 31
TYPES = ("text", "character varying", "character")
"""Types that Debezium masks. It sends values of most others as they are, without a word."""
SETTINGS = ("column.mask.", "column.truncate.")
"""Beginnings of the names of Debezium's settings. The salt is in the name."""
# Java counts a character beyond U+FFFF twice. Each is doubled before the text is cut; of one that was
# cut apart nothing remains, as in what `RecordDecoder` reads.
CUT = r"""
regexp_replace(left(regexp_replace(left({0}, {1}), '([\U00010000-\U0010FFFF])', '\1\1', 'g'), {1}),
    '([\U00010000-\U0010FFFF])\1|[\U00010000-\U0010FFFF]', '\1', 'g')
""".strip()


@dataclass(frozen=True)
class Mask:
    """One of three: `redact` writes the same characters for every value, also for NULL; `hash`, a salt,
    SHA-256 of salt and value in hexadecimal; `cut` the first so many characters, as Java counts them.
    """

    redact: bool = False
    hash: str = ""
    cut: int = 0

    def __str__(self) -> str:
        if self.redact:
            return "redact"
        return "hash" if self.hash else f"cut to {self.cut}"

    @property
    def setting(self) -> str:
        """The name of Debezium's setting that lists the columns."""
        if self.redact:
            return f"{SETTINGS[0]}with.{STARS}.chars"
        if self.hash:
            return f"{SETTINGS[0]}hash.v2.SHA-256.with.salt.{self.hash}"
        return f"{SETTINGS[1]}to.{self.cut}.chars"

    def sql(self, type_: str, name: str) -> str:
        """SQL of the masked value of a column of this type, whose quoted name is given."""
        masked = self._sql(type_, name)
        # As the column's own values, it is compared without the blanks at its end.
        return f"({masked})::bpchar" if type_.startswith("character(") else masked

    def _sql(self, type_: str, name: str) -> str:
        if self.redact:
            return f"'{'*' * STARS}'::text"
        # `concat` keeps the blanks of char(n), which a cast to text removes.
        if self.hash:
            digest = f"encode(sha256(convert_to(concat('{self.hash}', {name}), 'UTF8')), 'hex')"
            return f"CASE WHEN {name} IS NOT NULL THEN left({digest}, {hash_length(type_)}) END"
        # Debezium doesn't cut what the column declares to be no longer.
        if declared_length(type_) <= self.cut:
            return name
        text = f"concat({name})"
        wide = "getdatabaseencoding() = 'UTF8'"
        cut = (
            f"CASE WHEN {wide} THEN {CUT.format(text, self.cut)} ELSE left({text}, {self.cut}) END"
        )
        return f"CASE WHEN {name} IS NOT NULL THEN {cut} END"

    def shows(self, type_: str, value: object) -> bool:
        """Whether this mask can't have written a value in the log, so that it is from before the mask. A
        value that looks like a masked one isn't recognized. NULL and empty texts show nothing.
        """
        text = str(value or "")
        if self.cut:
            return self.cut < declared_length(type_) and java_length(text) > self.cut
        form = f"[0-9a-f]{{{hash_length(type_)}}}" if self.hash else re.escape("*" * STARS)
        return bool(text) and not re.fullmatch(form, text)

    def placeholder(self, type_: str, text: str) -> str | None:
        """What the mask makes of the placeholder in a column of this type; None if it doesn't matter."""
        if self.cut and self.cut < declared_length(type_):
            return text[: self.cut]
        if not self.hash:
            return None
        return sha256((self.hash + text).encode()).hexdigest()[: hash_length(type_)]


def java_length(text: str) -> int:
    """The characters of a text as Java counts them: those beyond U+FFFF twice."""
    return len(text.encode("utf-16-le", "surrogatepass")) // 2


def hash_length(type_: str) -> int:
    """The characters of a hash: Debezium cuts it to the declared length of the column."""
    return min(64, declared_length(type_))


def declared_length(type_: str) -> int:
    declared = re.search(r"\((\d+)\)", type_)
    return int(declared[1]) if declared else UNLIMITED
