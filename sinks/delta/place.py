"""The folder of a Delta table on this machine: its files read, written, listed.

Every path is relative to the folder. Methods raise SinkUnavailable where the folder can't be read or
written.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

from cdc.sinks.delta.files.failures import reading, write_failure

TEMPORARY = ".*.tmp"
"""Names of files that are about to get theirs: no reader of a table takes one for a file of it."""


class StoredFile(NamedTuple):
    """A file of a place: its path, its size in bytes."""

    path: str
    size: int


class Place:
    """A folder."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def read(self, path: str) -> bytes | None:
        """Read a file; None where there is none."""
        with reading(self.folder):
            try:
                return Path(self.folder, path).read_bytes()
            except FileNotFoundError:
                return None

    def read_range(self, path: str, start: int, length: int) -> bytes:
        """Read a part of a file."""
        with reading(self.folder), Path(self.folder, path).open("rb") as file:
            file.seek(start)
            return file.read(length)

    def write(self, path: str, data: bytes) -> None:
        """Write a file, durable on return, also where there is one."""
        with self._writing():
            temporary = self._write_temporary(path, data)
            temporary.replace(Path(self.folder, path))
            _sync(Path(self.folder, path).parent)

    def write_new(self, path: str, data: bytes) -> bool:
        """Write a file, durable on return, unless there is one. Returns whether it was written. Of
        several that try at once one succeeds.
        """
        with self._writing():
            temporary = self._write_temporary(path, data)
            try:
                os.link(temporary, Path(self.folder, path))
            except FileExistsError:
                return False
            finally:
                temporary.unlink()
            _sync(Path(self.folder, path).parent)
            return True

    def files(self, folder: str) -> Iterator[StoredFile]:
        """List the files of a folder, with those below it; none where it doesn't exist."""
        with reading(self.folder):
            try:
                entries = list(os.scandir(Path(self.folder, folder)))
            except FileNotFoundError:
                return
            for entry in entries:
                path = f"{folder}/{entry.name}"
                if entry.is_dir():
                    yield from self.files(path)
                    continue
                with suppress(FileNotFoundError):
                    yield StoredFile(path, entry.stat().st_size)

    def _write_temporary(self, path: str, data: bytes) -> Path:
        folder = Path(self.folder, path).parent
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / TEMPORARY.replace("*", str(uuid4()))
        try:
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        return temporary

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise write_failure(self.folder, error) from None


def _sync(folder: Path) -> None:
    """Make new names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
