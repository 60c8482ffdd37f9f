"""Places of Delta tables: a folder of this machine (`folder`), or what is below a path of a bucket
(`bucket`). The one way to a warehouse's files, on the driver and on executors.

A place is named by its location: the path of a folder, or a URL such as s3://bucket/path. A path of a
file is relative to it. An absolute one, or a URL, may name a file of another place of the same kind.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import IO, Any, NamedTuple
from urllib.parse import quote, unquote

from cdc.errors import SinkRejected

URI = re.compile(r"[a-z0-9]+:/")


class StoredFile(NamedTuple):
    """A file of a place: its path, its size in bytes, when it was written in Unix seconds."""

    path: str
    size: int
    written_at: float


class FileMissing(SinkRejected):
    """A file that a table's log names doesn't exist."""


class Place(ABC):
    """A place; any thread may use it. Methods raise SinkUnavailable where it can't be read or written;
    the three for pyarrow raise OSError.
    """

    def __init__(self, location: str) -> None:
        self.location = location

    @abstractmethod
    def read(self, path: str) -> bytes | None:
        """Read a file; None where there is none."""

    @abstractmethod
    def read_range(self, path: str, start: int, length: int) -> bytes:
        """Read a part of a file."""

    @abstractmethod
    def write(self, path: str, data: bytes) -> None:
        """Write a file, durable on return, also where there is one."""

    @abstractmethod
    def write_new(self, path: str, data: bytes) -> bool:
        """Write a file, durable on return, unless there is one. Returns whether it was written. Of
        several that try at once one succeeds.
        """

    @abstractmethod
    def files(self, path: str = "") -> Iterator[StoredFile]:
        """List the files below a path; none where it doesn't exist."""

    @abstractmethod
    def folders(self) -> list[str]:
        """List the names of its folders, not of folders in them."""

    @abstractmethod
    def share(self, source: str, path: str) -> None:
        """Make a file of another location a file of this place, too: by a link where there are links.
        A file of this path that exists is taken for the same.

        Raises FileMissing: the source doesn't exist.
        """

    @abstractmethod
    def make(self) -> None:
        """Make the place, where files can only be written to one that exists."""

    @abstractmethod
    def require_one_winner(self) -> None:
        """Raise SinkRejected where two writers can create one file: each would take the commit of the
        other for its own.
        """

    @abstractmethod
    def remove(self, paths: Iterable[str]) -> None:
        """Remove files; what doesn't exist is passed over."""

    @abstractmethod
    def remove_all(self) -> None:
        """Remove the place with all that it contains."""

    @abstractmethod
    def open(self, path: str) -> Any:
        """Open a file for pyarrow to read. The caller closes it."""

    @abstractmethod
    def create(self, path: str) -> IO[bytes]:
        """Open a new file for pyarrow to write. The caller hands it to `finish`, or closes it and
        removes what there is of it.
        """

    @abstractmethod
    def finish(self, path: str, file: IO[bytes]) -> int:
        """Close a new file, durable on return. Returns its size in bytes."""


def place(location: str) -> Place:
    """Return the place of a location. Nothing is read for it."""
    if is_bucket(location):
        from cdc.sinks.delta.bucket import Bucket

        return Bucket(location)
    from cdc.sinks.delta.folder import Folder

    return Folder(location)


def is_bucket(location: str) -> bool:
    """Whether a location is in an object store."""
    return "://" in location


def table_uri(location: str) -> str:
    """Return a table's location as deltalake takes it: a bucket's is a URL, so what it has of `#` and
    `?` is quoted.
    """
    scheme, separator, rest = location.partition("://")
    return f"{scheme}://{quote(rest, safe='/@')}" if separator else location


def is_absolute(path: str) -> bool:
    """Whether a path is absolute or a URI, and so not within the table's place."""
    return path.startswith("/") or URI.match(path) is not None


def locate(location: str, path: str) -> str:
    """Return the location of a file by its path in the log of the table that has this location."""
    if is_absolute(path):
        return unquote(re.sub("^file:/+", "/", path))
    return f"{location}/{unquote(path)}"


def file_missing(source: str, target: str) -> FileMissing:
    """Make the error that says so. target: of the table that was to get the file."""
    table = target.rpartition("/")[0].rpartition("/")[2]
    return FileMissing(
        f"The Delta table {target} can't be given the file {source}: it isn't there any more.",
        hint=f"make the view again: cdc -p FILE rebuild SINK --table {table}",
    )
