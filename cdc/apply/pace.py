"""How much of a backlog one batch takes: what a sink applies in ten seconds.

A large batch costs most of a second besides its records, and writes a row once that has changed often. One that takes
long is stopped late and, after a crash, done again. Its bytes, whatever a record's size, are what the sink takes in
that time.
"""

LEAST, MOST = 10_000, 1_000_000
"""Offsets: the bounds of a batch."""
FIRST, FIRST_BYTES = 500_000, 64 << 20
"""Of a sink's first batch, at most: offsets, and bytes as the broker keeps them, compressed."""
TARGET_S = 10.0


def first(offsets: int, kept_bytes: int) -> int:
    """How many offsets the first batch may span, when so many take so many bytes; 0 where that isn't known."""
    return max(LEAST, min(FIRST, offsets * FIRST_BYTES // kept_bytes)) if kept_bytes else FIRST


def fitting(limit: int, offsets: int, took_s: float, left: int) -> int:
    """How many offsets a batch may span from now on, when one of so many has taken so long and so many are left.

    The same as before unless it is far off: another limit costs a start of the query, and half a batch takes more than
    half the time.
    """
    ideal = min(MOST, max(LEAST, int(offsets * TARGET_S / took_s)))
    slower, quicker = ideal < limit / 4 and left > ideal, ideal > limit * 2 and left > limit * 2
    return ideal if slower or quicker else limit
