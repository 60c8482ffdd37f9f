"""Obstacles: what keeps a change from being sent, so that its table is set aside."""

from enum import StrEnum


class Obstacle(StrEnum):
    """What the connector, or the log, can't take of a change."""

    KEYLESS = "keyless"
    TOO_LARGE = "too large"
    UNREADABLE = "unreadable"

    @property
    def in_definition(self) -> bool:
        """Whether it is the table's definition, which shows when it is over."""
        return self is Obstacle.KEYLESS

    @property
    def reason(self) -> str:
        """The reason, as the end of a sentence on a table."""
        return REASONS[self]

    @property
    def remedy(self) -> str:
        """What ends it, as a sentence."""
        return REMEDIES[self]


REASONS = {
    Obstacle.KEYLESS: "a change of it has no key",
    Obstacle.TOO_LARGE: "a row of it is larger than the largest message (16 MiB)",
    Obstacle.UNREADABLE: "the connector can't read a change of it",
}
REMEDIES = {
    Obstacle.KEYLESS: "Once it has a primary key, a running `run` captures it again by itself",
    Obstacle.TOO_LARGE: "Shorten the row, or leave its column out with `exclude`, then register",
    Obstacle.UNREADABLE: "The worker's log has the reason: change the value, or leave its column out"
    " with `exclude`, then register",
}
