"""The name of one build of a view, and the moment that it tells. Standard library only."""

from datetime import UTC, datetime

GENERATION = "%Y%m%dt%H%M%S%f"


def new_generation() -> str:
    """A name for a build of a view, made now: in order of time, and good for a file, an index and a key."""
    return datetime.now(UTC).strftime(GENERATION)


def made_at(generation: str) -> float:
    """When a build of that name was begun, in Unix seconds; 0 when the name doesn't tell."""
    try:
        return datetime.strptime(generation, GENERATION).replace(tzinfo=UTC).timestamp()
    except ValueError:
        return 0.0
