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
class Writer:
    """A kind of server and its version."""

    server: str
    version: str

    def __str__(self) -> str:
        return f"{self.server} {self.version}"

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(int(part) for part in re.findall(r"\d+", self.version))


def readable(written: Writer, own: Writer) -> bool:
    """Whether a server can go on with what another has written: newer ones of its kind can."""
    if written.server != own.server:
        return (written.server, own.server) == ("Redis", "Valkey") and written.numbers[:2] <= REDIS_READABLE
    if own.server == "Postgres":
        return written.numbers[:1] == own.numbers[:1]
    if own.server == "Elasticsearch":
        # Its nodes compare all three numbers, and take over from the major version before at most.
        return written.numbers <= own.numbers and own.numbers[0] - written.numbers[0] <= 1
    return written.numbers[:2] <= own.numbers[:2]


def require_readable(state: Path, written: Mapping[str, Writer], own: Mapping[str, Writer]) -> None:
    """Raises StackError for the first server, by the name it has in a stack, that can't read its data."""
    for name, writer in own.items():
        before = written.get(name)
        if before and not readable(before, writer):
            raise StackError(
                f"{name}'s data in {state} was written by {before}, which {writer} can't read",
                hint=f"start it with {before} or a newer one that reads it, or stop what runs (cdc down) and begin"
                " with an empty state: cdc -p FILE --state OTHER_FOLDER up",
                service=name,
                path=str(state),
            )


def of_snapshot(head: bytes) -> Writer | None:
    """Who wrote a file of the cache's, by its first bytes; None when they don't say."""
    found = re.search(rb"(redis|valkey)-ver.([0-9]+(?:\.[0-9]+)+)", head, re.DOTALL)
    return Writer(found[1].decode().capitalize(), found[2].decode()) if found else None
