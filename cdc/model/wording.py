"""How sentences and moments are put, the same on every screen."""

import time

ENDS = (".", "?", "!", ":")
UNKNOWN = "unknown"


def ended(text: str) -> str:
    """With a full stop, unless it has an end of its own."""
    text = text.rstrip()
    return text if text.endswith(ENDS) else f"{text}."


def advice(message: str, hint: str) -> str:
    """What is the matter, and what to do next."""
    return f"{ended(message)} Next: {ended(hint)}"


def length(seconds: float) -> str:
    """A length of time as people say it."""
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def since(moment: float | None) -> str:
    """Empty when nobody knows."""
    return "" if moment is None else f"since {clock(moment)}, {length(max(0.0, time.time() - moment))}"


def clock(moment: float) -> str:
    """The time of day here, with the date when that isn't today's."""
    there = time.localtime(moment)
    today = there[:3] == time.localtime()[:3]
    return time.strftime("%H:%M:%S" if today else "%Y-%m-%d %H:%M:%S", there)
