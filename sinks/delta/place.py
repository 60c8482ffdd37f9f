"""Places of Delta tables: a folder, or what is below a path of a bucket. The one way to a warehouse's
files, on the driver and on executors.

A place is named by its location: the path of a folder, or a URL such as s3://bucket/path. A path of a
file is relative to it. An absolute one, or a URL, may name a file of another place of the same kind.
"""

import errno
import io
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote, unquote
from uuid import uuid4

import obstore
from deltalake.exceptions import DeltaError
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import from_url

from cdc.errors import SinkRejected, SinkUnavailable

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

WRITE_HINT = (
    "make room there, or see who may write to it; executors of a cluster need the same folder under the same path;"
    " it is tried again"
)
READ_HINT = (
    "see whether it is mounted, on every host of a cluster, and who may read it; it is tried again"
)
STORE_HINT = (
    "see that the bucket exists, and the credentials, region and endpoint in the environment of the run and of"
    " Spark's executors; it is tried again"
)
OS_ERROR = re.compile(r"([A-Z][A-Za-z -]+) \(os error \d+\)|\[[Ee]rrno \d+\] ([A-Z][A-Za-z -]+)")
"""How Rust, Python and Arrow quote an error of the operating system. Arrow puts a word of its own before it."""


class StoreError(OSError):
    """What an object store answers, or a file system that can't be used, in words."""


def write_hint(location: str) -> str:
    return STORE_HINT if is_bucket(location) else WRITE_HINT


@contextmanager
def reading(location: str, done: str = "read", hint: str = READ_HINT) -> Iterator[None]:
    """Raise SinkUnavailable where the block can't read a table."""
    try:
        with _translated() if is_bucket(location) else nullcontext():
            yield
    except (OSError, DeltaError) as error:
        quoted = OS_ERROR.findall(str(error))
        reason = "".join(quoted[-1]).strip() if quoted else type(error).__name__
        if isinstance(error, StoreError):
            reason = str(error)
        elif is_bucket(location) and isinstance(error, OSError) and error.errno == errno.ENOSPC:
            reason = f"no space left in {tempfile.gettempdir()} (TMPDIR), where a file is before it is uploaded"
        name = location if is_bucket(location) else f"folder {location}"
        message = f"The warehouse {name} can't be {done}: {reason}."
        hint = STORE_HINT if is_bucket(location) else hint
        raise SinkUnavailable(message, hint=hint) from None


def writing(location: str) -> AbstractContextManager[None]:
    """Raise SinkUnavailable where the block can't write to a table."""
    return reading(location, "written", WRITE_HINT)


class CommitConflict(SinkUnavailable):
    """Another commit came in between.

    The batch is tried again with the table as that commit has left it.
    """

    def __init__(self) -> None:
        super().__init__(
            "Somebody else committed to the Delta table at the same time.",
            hint="no action needed; retried automatically",
        )


class StoredFile(NamedTuple):
    """A file of a place: its path, its size in bytes, when it was written in Unix seconds."""

    path: str
    size: int
    written_at: float


class FileMissing(SinkRejected):
    """A file that a table's log names doesn't exist.

    target: the location of the table that was to get it.
    """

    def __init__(self, source: str, target: str) -> None:
        table = target.rpartition("/")[0].rpartition("/")[2]
        super().__init__(
            f"The Delta table {target} can't be given the file {source}: it isn't there any more.",
            hint=f"make the view again: cdc -p FILE rebuild SINK --table {table}",
        )


TEMPORARY = ".tmp"
"""How names of files end that are about to get theirs. They begin with a dot: no reader of a table takes
one for a file of it.
"""
NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS}
"""How a file system refuses hard links: of FAT, of some network disks."""


class Folder:
    """A folder of this machine, or of a disk that all machines mount; any thread may use it.

    Methods raise SinkUnavailable where it can't be read or written; the three for pyarrow raise OSError.
    """

    def __init__(self, location: str) -> None:
        self.location = location

    def read(self, path: str) -> bytes | None:
        """Read a file; None where there is none."""
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
        """Write a file, durable on return, also where there is one."""
        target = self._path(path)
        with writing(self.location):
            self._write_temporary(target.parent, data).replace(target)
            _sync_folder(target.parent)

    def write_new(self, path: str, data: bytes) -> bool:
        """Write a file, durable on return, unless there is one. Returns whether it was written. Of
        several that try at once one succeeds.
        """
        target = self._path(path)
        with writing(self.location):
            temporary = self._write_temporary(target.parent, data)
            try:
                os.link(temporary, target)
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
            _sync_folder(target.parent)
            return True

    def files(self, path: str = "") -> Iterator[StoredFile]:
        """List the files below a path; none where it doesn't exist."""
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
        """List the names of the folders directly in it."""
        with reading(self.location), suppress(FileNotFoundError):
            return [entry.name for entry in os.scandir(self.location) if entry.is_dir()]
        return []

    def share(self, source: str, path: str) -> None:
        """Make a file of another location a file of this place, too, by a link. A file of this path that
        exists is taken for the same.

        Where another machine's clean-up removes files that are old and in no commit, this one is in no
        commit yet: a new time stamp protects it.

        Raises FileMissing: the source doesn't exist.
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
                raise FileMissing(source, self.location) from None
            except OSError:
                # Linux refuses links to files of another user (fs.protected_hardlinks): they are copied,
                # under a name that the clean-up removes where the copy is cut off.
                partial_copy = destination.with_name(f".{uuid4()}{TEMPORARY}")
                shutil.copyfile(source, partial_copy)
                partial_copy.replace(destination)

    def make(self) -> None:
        """Make the place: files can only be written to one that exists."""
        with writing(self.location):
            Path(self.location).mkdir(parents=True, exist_ok=True)

    def remove(self, paths: Iterable[str]) -> None:
        """Remove files, with the checksums that Spark puts beside them; what doesn't exist is passed over."""
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
        """Open a file for pyarrow to read. The caller closes it."""
        import pyarrow as pa

        return pa.OSFile(str(self._path(path)))

    def create(self, path: str) -> IO[bytes]:
        """Open a new file for pyarrow to write. The caller hands it to `finish`, or closes it and
        removes what there is of it.
        """
        return self._path(path).open("xb")

    def finish(self, path: str, file: IO[bytes]) -> int:  # noqa: ARG002  # the file knows its path
        """Close a new file, durable on return. Returns its size in bytes."""
        with file:
            file.flush()
            # A commit that is durable must not name a file that isn't.
            os.fsync(file)
            return file.tell()

    def _path(self, path: str) -> Path:
        return Path(self.location, path)

    def _write_temporary(self, folder: Path, data: bytes) -> Path:
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


NO_BUCKET = re.compile("NoSuchBucket|ContainerNotFound|bucket does not exist")
"""How S3, Azure and Google call a missing bucket. For a missing file they use the same status, 404."""
ANSWER = re.compile(r"<Code>(\w+)</Code>.*?<Message>([^<]*)", re.DOTALL)
"""How an S3 store says what is wrong: InvalidAccessKeyId, ExpiredToken, AccessDenied and others."""
RETRIES: "RetryConfig" = {"max_retries": 3, "retry_timeout": timedelta(seconds=10)}
"""What is left after these is ours to try again: the loop does, and `status` shows it meanwhile."""
YES = {"true", "1", "yes", "y", "on"}
CLIENT: "ClientConfig" = {"connect_timeout": timedelta(seconds=5), "timeout": timedelta(seconds=20)}


class Bucket:
    """What is below a path of a bucket: of S3 and what speaks its protocol, Google's, Azure's. It has the
    methods of `Folder`.

    The environment of the driver and of each executor names the credentials, region and endpoint, or the
    machine has a role. So no plan and no log has a secret.
    """

    def __init__(self, location: str) -> None:
        self.location = location
        self._bucket, self._prefix = _split(location)

    def read(self, path: str) -> bytes | None:
        with reading(self.location):
            try:
                return bytes(obstore.get(_store(self._bucket), self._key(path)).bytes())
            except FileNotFoundError as error:
                _require_bucket(error)
                return None

    def read_range(self, path: str, start: int, length: int) -> bytes:
        with reading(self.location):
            store = _store(self._bucket)
            return bytes(obstore.get_range(store, self._key(path), start=start, length=length))

    def write(self, path: str, data: bytes) -> None:
        with writing(self.location):
            obstore.put(_store(self._bucket), self._key(path), data)

    def write_new(self, path: str, data: bytes) -> bool:
        with writing(self.location):
            try:
                obstore.put(_store(self._bucket), self._key(path), data, mode="create")
            except AlreadyExistsError:
                return False
            return True

    def files(self, path: str = "") -> Iterator[StoredFile]:
        with reading(self.location):
            root = self._key(path)
            for entries in obstore.list(_store(self._bucket), root):
                for entry in entries:
                    relative = entry["path"].removeprefix(f"{self._prefix}/")
                    yield StoredFile(relative, entry["size"], entry["last_modified"].timestamp())

    def folders(self) -> list[str]:
        with reading(self.location):
            listed = obstore.list_with_delimiter(_store(self._bucket), self._prefix)
            return [prefix.rpartition("/")[2] for prefix in listed["common_prefixes"]]

    def share(self, source: str, path: str) -> None:
        """Copy a file within the store: there are no links."""
        with writing(self.location):
            try:
                obstore.copy(_store(self._bucket), self._key(source), self._key(path))
            except FileNotFoundError as error:
                _require_bucket(error)
                raise FileMissing(source, self.location) from None

    def make(self) -> None:
        """Nothing needs to be made: folders are parts of names."""

    def remove(self, paths: Iterable[str]) -> None:
        keys = [self._key(path) for path in paths]
        if not keys:
            return
        with writing(self.location):
            try:
                obstore.delete(_store(self._bucket), keys)
            except FileNotFoundError as error:
                # S3 passes over what doesn't exist, Google's store doesn't.
                _require_bucket(error)
                for key in keys:
                    with suppress(FileNotFoundError):
                        obstore.delete(_store(self._bucket), key)

    def remove_all(self) -> None:
        self.remove([file.path for file in self.files()])

    def open(self, path: str) -> Any:
        import pyarrow as pa

        with _translated():
            reader = obstore.open_reader(_store(self._bucket), self._key(path))
            return pa.PythonFile(_Reader(reader), "r")

    def create(self, path: str) -> IO[bytes]:  # noqa: ARG002  # it gets its path by `finish`
        """Open a file of this machine without a name: of one that isn't finished nothing stays."""
        return tempfile.TemporaryFile()

    def finish(self, path: str, file: IO[bytes]) -> int:
        with file, _translated():
            size = file.seek(0, io.SEEK_END)
            file.seek(0)
            obstore.put(_store(self._bucket), self._key(path), file)
            return size

    def require_one_winner(self) -> None:
        """Raise SinkRejected where two writers can create one file: each would take the commit of the
        other for its own. A file system either makes one link of a name or refuses links.
        """
        path = f".cdc-{uuid4()}"
        self.write_new(path, b"one")
        is_overwritten = self.write_new(path, b"two")
        self.remove([path])
        if is_overwritten:
            raise SinkRejected(
                f"The object store of {self.location} lets two writers create the same file, so that commits would"
                " get lost.",
                hint="use a store whose PutObject supports If-None-Match, as S3 does",
            )

    def _key(self, path: str) -> str:
        if "://" in path:
            bucket, key = _split(path)
            if bucket != self._bucket:
                raise StoreError(f"{path} is in another bucket")
            return key
        return f"{self._prefix}/{path}" if path else self._prefix


class _Reader:
    """obstore's reader as pyarrow takes one: it asks whether a file is closed."""

    closed = False

    def __init__(self, reader: Any) -> None:
        self._reader = reader
        self.tell = reader.tell
        self.close = reader.close

    def read(self, size: int) -> bytes:
        with _translated():
            return bytes(self._reader.read(size))

    def seek(self, offset: int, whence: int) -> int:
        with _translated():
            position: int = self._reader.seek(offset, whence)
            return position


def _split(location: str) -> tuple[str, str]:
    """Return the URL of a location's bucket, and the path in the bucket."""
    scheme, _, rest = location.partition("://")
    bucket, _, path = rest.partition("/")
    return f"{scheme}://{bucket}", path.strip("/")


@cache
def _store(bucket: str) -> Any:
    """Return the store of a bucket. It keeps connections open, so there is one in a process. Made when it is
    needed first: settings that can't be used are an error of the store.
    """
    # With options of ours obstore doesn't read this variable any more, and deltalake does.
    allows_http = os.environ.get("AWS_ALLOW_HTTP", "").lower() in YES
    client: ClientConfig = {**CLIENT, "allow_http": allows_http}
    return from_url(bucket, retry_config=RETRIES, client_options=client)


def _require_bucket(error: OSError) -> None:
    """Raise StoreError where what wasn't found is the bucket."""
    if NO_BUCKET.search(str(error)):
        raise StoreError(_reason(error)) from None


@contextmanager
def _translated() -> Iterator[None]:
    """Turn errors of obstore into errors of the operating system."""
    try:
        yield
    except (BaseError, FileNotFoundError) as error:
        if isinstance(error, FileNotFoundError) and error.errno is not None:
            # Of this machine, for example of its TMPDIR.
            raise
        raise StoreError(_reason(error)) from None
    except BaseException as error:
        # obstore panics where AWS_ENDPOINT_URL has no http:// or https://, and that is no Exception.
        if type(error).__name__ != "PanicException":
            raise
        raise StoreError(f"its settings in the environment can't be used: {error}") from None


def _reason(error: Exception) -> str:
    text = str(error)
    if match := ANSWER.search(text):
        return f"{match[1]} ({match[2].strip().rstrip('.')})"
    if isinstance(error, FileNotFoundError):
        return "there is no such file, or no such bucket"
    if "BadScheme" in text:
        return "its endpoint is http://, which AWS_ALLOW_HTTP=true allows"
    if "error sending request" in text or "HTTP error" in text:
        return "it doesn't answer"
    return text.partition("\n")[0]


Place = Folder | Bucket


def place(location: str) -> Place:
    return Bucket(location) if is_bucket(location) else Folder(location)


def is_bucket(location: str) -> bool:
    return "://" in location


def table_uri(location: str) -> str:
    """A table's location as deltalake takes it: of a bucket's URL, `#` and `?` are quoted."""
    scheme, separator, rest = location.partition("://")
    return f"{scheme}://{quote(rest, safe='/@')}" if separator else location


def locate(location: str, path: str) -> str:
    """Return the location of a file by its path in the log of the table that has this location."""
    if path.startswith("/") or re.match("[a-z0-9]+:/", path):
        return unquote(re.sub("^file:/+", "/", path))
    return f"{location}/{unquote(path)}"
