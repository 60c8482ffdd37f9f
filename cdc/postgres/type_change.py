"""Which changes of a column's type leave the text of every stored value as it is.

In:  two types as `format_type` prints them. Out: yes or no.
Invariant: yes only where it is certain; a needless no costs sending rows again, a wrong yes leaves views wrong.
"""

import re

TYPE = re.compile(r"([a-z ]+?)(?:\((\d+)(?:,(-?\d+))?\))?((?:\[\])*)")
UNLIMITED = 1 << 31


def same_text(old: str, new: str) -> bool:
    """Whether values of type `old` read the same after ALTER COLUMN ... TYPE `new`, without a USING clause."""
    if old == new:
        return True
    a, b = TYPE.fullmatch(old), TYPE.fullmatch(new)
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


def _length(found: "re.Match[str]") -> int:
    return int(found[2]) if found[2] else UNLIMITED
