"""Decide whether a change of a column's type leaves the text of every stored value as it is.

In:  two types as `format_type` prints them. Out: yes or no.
Invariant: yes only if it is certain. A needless no costs sending rows again, a wrong yes leaves
views wrong.
"""

import re

TYPE = re.compile(r"([a-z ]+?)(?:\((\d+)(?:,(-?\d+))?\))?((?:\[\])*)")
UNLIMITED = 1 << 31


def same_text(old_type: str, new_type: str) -> bool:
    """Whether values of `old_type` read the same after ALTER COLUMN ... TYPE `new_type`, without
    USING.
    """
    if old_type == new_type:
        return True
    a, b = TYPE.fullmatch(old_type), TYPE.fullmatch(new_type)
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
