"""Name a generation, one build of a view, and read its time from the name. Standard library
only.
"""

from datetime import UTC, datetime

FIRST = ""
"""The name of a view's first generation."""
GENERATION = "%Y%m%dt%H%M%S%f"


def new_generation() -> str:
    """A name for a generation that begins now. Names sort by time and suit files, indices and
    keys.
    """
    return datetime.now(UTC).strftime(GENERATION)


def generation_of_copy(generation: str) -> str:
    """A new name for a copy of that generation, with the time of the original: a copy has missed
    what the original has missed.
    """
    return f"{_original(generation)}-{new_generation()}"


def generation_time(generation: str) -> float:
    """When the generation of that name, or what it was copied from, was begun, in Unix seconds; 0 if
    the name holds no time.
    """
    try:
        return datetime.strptime(_original(generation), GENERATION).replace(tzinfo=UTC).timestamp()
    except ValueError:
        return 0.0


def _original(generation: str) -> str:
    return generation.partition("-")[0]
