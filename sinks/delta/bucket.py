"""Buckets of object stores as places of Delta tables: S3 and what speaks its protocol, Google's, Azure's.

By obstore, for which the environment names the credentials, region and endpoint, on the driver and on each
executor: AWS_ACCESS_KEY_ID, AWS_REGION, AWS_ENDPOINT_URL and the like, or the role of the machine. So no
plan and no log has a secret.
"""

import io
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from typing import IO, TYPE_CHECKING, Any
from uuid import uuid4

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import from_url

from cdc.errors import SinkRejected
from cdc.sinks.delta.files.failures import StoreError, reading, writing
from cdc.sinks.delta.place import Place, StoredFile, file_missing

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

NO_BUCKET = re.compile("NoSuchBucket|ContainerNotFound|bucket does not exist")
"""How S3, Azure and Google call a missing bucket. For a missing file they use the same status, 404."""
ANSWER = re.compile(r"<Code>(\w+)</Code>.*?<Message>([^<]*)", re.DOTALL)
"""How an S3 store says what is wrong: InvalidAccessKeyId, ExpiredToken, AccessDenied and others."""
RETRIES: "RetryConfig" = {"max_retries": 3, "retry_timeout": timedelta(seconds=10)}
"""What is left after these is ours to try again: the loop does, and `status` shows it meanwhile."""
YES = {"true", "1", "yes", "y", "on"}
CLIENT: "ClientConfig" = {"connect_timeout": timedelta(seconds=5), "timeout": timedelta(seconds=20)}


class Bucket(Place):
    """What is below a path of a bucket."""

    def __init__(self, location: str) -> None:
        super().__init__(location)
        self._bucket, self._prefix = _split(location)

    @property
    def _store(self) -> Any:
        """Made when it is needed first: settings that can't be used are an error of the store."""
        return _store(self._bucket)

    def read(self, path: str) -> bytes | None:
        with reading(self.location), _translated():
            try:
                return bytes(obstore.get(self._store, self._key(path)).bytes())
            except FileNotFoundError as error:
                _require_bucket(error)
                return None

    def read_range(self, path: str, start: int, length: int) -> bytes:
        with reading(self.location), _translated():
            return bytes(
                obstore.get_range(self._store, self._key(path), start=start, length=length)
            )

    def write(self, path: str, data: bytes) -> None:
        with writing(self.location), _translated():
            obstore.put(self._store, self._key(path), data)

    def write_new(self, path: str, data: bytes) -> bool:
        with writing(self.location), _translated():
            try:
                obstore.put(self._store, self._key(path), data, mode="create")
            except AlreadyExistsError:
                return False
            return True

    def files(self, path: str = "") -> Iterator[StoredFile]:
        with reading(self.location), _translated():
            root = self._key(path)
            for entries in obstore.list(self._store, root):
                for entry in entries:
                    relative = entry["path"].removeprefix(f"{self._prefix}/")
                    yield StoredFile(relative, entry["size"], entry["last_modified"].timestamp())

    def folders(self) -> list[str]:
        with reading(self.location), _translated():
            listed = obstore.list_with_delimiter(self._store, self._prefix)
            return [prefix.rpartition("/")[2] for prefix in listed["common_prefixes"]]

    def share(self, source: str, path: str) -> None:
        """Copy a file within the store: there are no links."""
        with writing(self.location), _translated():
            try:
                obstore.copy(self._store, self._key(source), self._key(path))
            except FileNotFoundError as error:
                _require_bucket(error)
                raise file_missing(source, self.location) from None

    def make(self) -> None:
        """Nothing needs to be made: folders are parts of names."""

    def remove(self, paths: Iterable[str]) -> None:
        keys = [self._key(path) for path in paths]
        if not keys:
            return
        with writing(self.location), _translated():
            try:
                obstore.delete(self._store, keys)
            except FileNotFoundError as error:
                # S3 passes over what doesn't exist, Google's store doesn't.
                _require_bucket(error)
                for key in keys:
                    with suppress(FileNotFoundError):
                        obstore.delete(self._store, key)

    def remove_all(self) -> None:
        self.remove([file.path for file in self.files()])

    def open(self, path: str) -> Any:
        import pyarrow as pa

        with _translated():
            return pa.PythonFile(_Reader(obstore.open_reader(self._store, self._key(path))), "r")

    def create(self, path: str) -> IO[bytes]:  # noqa: ARG002  # it gets its path by `finish`
        """Open a file of this machine without a name: of one that isn't finished nothing stays."""
        return tempfile.TemporaryFile()

    def finish(self, path: str, file: IO[bytes]) -> int:
        with file, _translated():
            size = file.seek(0, io.SEEK_END)
            file.seek(0)
            obstore.put(self._store, self._key(path), file)
            return size

    def require_one_winner(self) -> None:
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


class _Reader(io.RawIOBase):
    """obstore's reader as pyarrow takes one: it asks whether a file is closed."""

    def __init__(self, reader: Any) -> None:
        self._reader = reader

    def read(self, size: int = -1) -> bytes:
        with _translated():
            return bytes(self._reader.read(None if size < 0 else size))

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        with _translated():
            position: int = self._reader.seek(offset, whence)
            return position

    def tell(self) -> int:
        position: int = self._reader.tell()
        return position

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True


def _split(location: str) -> tuple[str, str]:
    """Return the URL of a location's bucket, and the path in the bucket."""
    scheme, _, rest = location.partition("://")
    bucket, _, path = rest.partition("/")
    return f"{scheme}://{bucket}", path.strip("/")


@cache
def _store(bucket: str) -> Any:
    """Return the store of a bucket. It keeps connections open, so there is one in a process."""
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
