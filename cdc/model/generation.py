"""Name a generation, one build of a view, and read its time from the name. Standard library
only.
"""

from datetime import UTC, datetime

GENERATION = "%Y%m%dt%H%M%S%f"


def new_generation() -> str:
    """A name for a generation that begins now. Names sort by time and suit files, indices and
    keys.
    """
    return datetime.now(UTC).strftime(GENERATION)


def generation_time(generation: str) -> float:
    """When the generation of that name was begun, in Unix seconds; 0 if the name holds no time."""
    try:
        return datetime.strptime(generation, GENERATION).replace(tzinfo=UTC).timestamp()
    except ValueError:
        return 0.0
