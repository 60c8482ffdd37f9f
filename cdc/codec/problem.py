"""Errors of a record or value that can't be decoded.

Messages name a column at most, never a value.
"""

MISFIT = "it does not fit the columns of its table"


class Unreadable(ValueError):
    """A record isn't a change of its topic's table, or a view can't hold a value.

    `problem` says why.
    """

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem


class EventChanged(Unreadable):
    """A record changes an event."""

    def __init__(self) -> None:
        super().__init__("it changes an event")

    def __reduce__(self) -> tuple[type["EventChanged"], tuple[()]]:
        return EventChanged, ()


class Undecided(Unreadable):
    """A record lacks a value that the sink's condition on rows needs."""

    def __init__(self) -> None:
        super().__init__("the log doesn't carry a value that the sink's `where` needs")

    def __reduce__(self) -> tuple[type["Undecided"], tuple[()]]:
        return Undecided, ()


class ValueNotRepresentable(Unreadable):
    """A value that a view has no way to hold, or that the connector has damaged; column is
    schema.table.name (type).
    """

    def __init__(self, problem: str, column: str) -> None:
        super().__init__(problem)
        self.column = column

    def __reduce__(self) -> tuple[type["ValueNotRepresentable"], tuple[str, str]]:
        return ValueNotRepresentable, (self.problem, self.column)
