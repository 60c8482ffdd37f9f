"""What wrote the data of a state folder, and which servers can read it.

A server that meets data of a newer one, or of another kind, dies with a line in its log at best. So a stack notes who
is about to write before it starts it, and asks here first.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cdc.errors import StackError

REDIS_READABLE = (7, 2)
"""The last Redis whose files Valkey reads: the two have gone different ways since."""


@dataclass(frozen=True)
class ServerVersion:
    """A kind of server and its version."""

    server: str
    version: str

    def __str__(self) -> str:
        return f"{self.server} {self.version}"

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(int(part) for part in re.findall(r"\d+", self.version))


def readable(previous: ServerVersion, current: ServerVersion) -> bool:
    """Whether a server can go on with what another has written: newer ones of its kind can."""
    if previous.server != current.server:
        return (previous.server, current.server) == ("Redis", "Valkey") and previous.numbers[:2] <= REDIS_READABLE
    if current.server == "Postgres":
        return previous.numbers[:1] == current.numbers[:1]
    if current.server == "Elasticsearch":
        # Its nodes compare all three numbers, and take over from the major version before at most.
        return previous.numbers <= current.numbers and current.numbers[0] - previous.numbers[0] <= 1
    return previous.numbers[:2] <= current.numbers[:2]


def require_readable(
    state: Path, previous_versions: Mapping[str, ServerVersion], versions: Mapping[str, ServerVersion]
) -> None:
    """Raises StackError for the first server, by the name it has in a stack, that can't read its data."""
    for name, writer in versions.items():
        previous = previous_versions.get(name)
        if previous and not readable(previous, writer):
            raise StackError(
                f"{name}'s data in {state} was written by {previous}, which {writer} can't read",
                hint=f"start it with {previous} or a newer one that reads it, or stop what runs (cdc down) and begin"
                " with an empty state: cdc -p FILE --state OTHER_FOLDER up",
                service=name,
                path=str(state),
            )


def version_of_snapshot(head: bytes) -> ServerVersion | None:
    """Who wrote a file of the cache's, by its first bytes; None when they don't say."""
    match = re.search(rb"(redis|valkey)-ver.([0-9]+(?:\.[0-9]+)+)", head, re.DOTALL)
    return ServerVersion(match[1].decode().capitalize(), match[2].decode()) if match else None
