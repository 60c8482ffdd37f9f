"""Folders of this machine, or of a disk that all machines mount, as places of Delta tables."""

import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

from cdc.sinks.delta.files.failures import StoreError, reading, writing
from cdc.sinks.delta.place import Place, StoredFile, file_missing

TEMPORARY = ".tmp"
"""How names of files end that are about to get theirs. They begin with a dot: no reader of a table takes
one for a file of it.
"""
NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS}
"""How a file system refuses hard links: of FAT, of some network disks."""


class Folder(Place):
    """A folder."""

    def read(self, path: str) -> bytes | None:
        with reading(self.location):
            try:
                return self._path(path).read_bytes()
            except FileNotFoundError:
                return None

    def read_range(self, path: str, start: int, length: int) -> bytes:
        with reading(self.location), self._path(path).open("rb") as file:
            file.seek(start)
            return file.read(length)

    def write(self, path: str, data: bytes) -> None:
        with writing(self.location):
            temporary = self._write_temporary(path, data)
            temporary.replace(self._path(path))
            _sync_folder(self._path(path).parent)

    def write_new(self, path: str, data: bytes) -> bool:
        with writing(self.location):
            temporary = self._write_temporary(path, data)
            try:
                os.link(temporary, self._path(path))
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno in NO_LINKS:
                    raise StoreError(
                        "its file system has no hard links, which commits need"
                    ) from None
                raise
            finally:
                temporary.unlink()
            _sync_folder(self._path(path).parent)
            return True

    def files(self, path: str = "") -> Iterator[StoredFile]:
        with reading(self.location):
            try:
                entries = list(os.scandir(self._path(path)))
            except FileNotFoundError:
                return
            for entry in entries:
                entry_path = f"{path}/{entry.name}" if path else entry.name
                if entry.is_dir():
                    yield from self.files(entry_path)
                    continue
                with suppress(FileNotFoundError):
                    status = entry.stat()
                    yield StoredFile(entry_path, status.st_size, status.st_mtime)

    def folders(self) -> list[str]:
        with reading(self.location), suppress(FileNotFoundError):
            return [entry.name for entry in os.scandir(self.location) if entry.is_dir()]
        return []

    def share(self, source: str, path: str) -> None:
        """Link a file. Where another machine's clean-up removes files that are old and in no commit,
        this one is in no commit yet: a new time stamp protects it.
        """
        destination = self._path(path)
        with writing(self.location):
            destination.parent.mkdir(parents=True, exist_ok=True)
            try:
                with suppress(PermissionError):
                    os.utime(source)
                os.link(source, destination)
            except FileExistsError:
                pass
            except FileNotFoundError:
                raise file_missing(source, self.location) from None
            except OSError:
                # Linux refuses links to files of another user (fs.protected_hardlinks): they are copied,
                # under a name that the clean-up removes where the copy is cut off.
                partial_copy = destination.with_name(f".{uuid4()}{TEMPORARY}")
                shutil.copyfile(source, partial_copy)
                partial_copy.replace(destination)

    def make(self) -> None:
        with writing(self.location):
            Path(self.location).mkdir(parents=True, exist_ok=True)

    def require_one_winner(self) -> None:
        """A file system either makes one link of a name or refuses links: see `write_new`."""

    def remove(self, paths: Iterable[str]) -> None:
        """Remove files, with the checksums that Spark puts beside them."""
        with writing(self.location):
            for path in map(self._path, paths):
                path.unlink(missing_ok=True)
                path.with_name(f".{path.name}.crc").unlink(missing_ok=True)

    def remove_all(self) -> None:
        with writing(self.location):
            while Path(self.location).is_dir():
                # Others may remove parts of it meanwhile: then the rest is removed.
                with suppress(FileNotFoundError):
                    shutil.rmtree(self.location)

    def open(self, path: str) -> Any:
        import pyarrow as pa

        return pa.OSFile(str(self._path(path)))

    def create(self, path: str) -> IO[bytes]:
        return self._path(path).open("xb")

    def finish(self, path: str, file: IO[bytes]) -> int:  # noqa: ARG002  # the file knows its path
        with file:
            file.flush()
            # A commit that is durable must not name a file that isn't.
            os.fsync(file)
            return file.tell()

    def _path(self, path: str) -> Path:
        return Path(self.location, path)

    def _write_temporary(self, path: str, data: bytes) -> Path:
        folder = self._path(path).parent
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f".{uuid4()}{TEMPORARY}"
        try:
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        return temporary


def _sync_folder(folder: Path) -> None:
    """Make new names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
