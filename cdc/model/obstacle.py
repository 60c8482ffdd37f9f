"""Obstacles: why a change can't be sent, and its table is set aside."""

from enum import StrEnum


class Obstacle(StrEnum):
    """Why a change can't be sent."""

    KEYLESS = "keyless"
    TOO_LARGE = "too large"
    UNREADABLE = "unreadable"

    @property
    def in_definition(self) -> bool:
        """Whether the table's definition is the cause, and shows when it is mended."""
        return self is Obstacle.KEYLESS

    @property
    def reason(self) -> str:
        """The reason, to follow a table's name and a colon."""
        return REASONS[self]

    @property
    def remedy(self) -> str:
        """What to do about it, as a sentence."""
        return REMEDIES[self]


REASONS = {
    Obstacle.KEYLESS: "one of its changes has no key",
    Obstacle.TOO_LARGE: "one of its rows is larger than a message can be (16 MiB)",
    Obstacle.UNREADABLE: "the connector can't read one of its changes",
}
REMEDIES = {
    Obstacle.KEYLESS: "Give it a primary key; a running `run` then captures it again",
    Obstacle.TOO_LARGE: "Shorten the row or exclude its column with `exclude`, then run register",
    Obstacle.UNREADABLE: "Read the reason in the worker's log, change the value or exclude its column"
    " with `exclude`, then run register",
}
