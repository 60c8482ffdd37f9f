"""Places of Delta tables: what a folder and a bucket have in common, and how each one fails."""

import errno
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

import deltalake
import pyarrow as pa
import pytest

from cdc.errors import SinkRejected, SinkUnavailable
from cdc.sinks.delta import parquet
from cdc.sinks.delta.log import NO_TABLE, TableLog, creation
from cdc.sinks.delta.place import (
    Bucket,
    FileMissing,
    Place,
    locate,
    place,
    table_uri,
    writing,
)
from tests.support import buckets
from tests.support.answering import answering
from tests.support.warehouse import struct

ROWS = pa.table({"_cdc_id": ["a", "b"], "n": [1, 2]})


@pytest.fixture(params=["folder", "bucket"])
def warehouse(request: pytest.FixtureRequest, tmp_path: Path, unique: str) -> str:
    """The location of a warehouse."""
    return str(tmp_path) if request.param == "folder" else f"{buckets.new_bucket(unique)}/house"


def test_files_are_written_read_listed_and_removed(warehouse: str) -> None:
    table = place(f"{warehouse}/public.größe/mirror@1")
    assert table.read("a") is None
    assert list(table.files()) == []
    assert place(f"{warehouse}/public.größe").folders() == []
    table.write("a", b"first")
    table.write("a", b"second")
    table.write("_delta_log/1.json", b"{}")
    assert table.read("a") == b"second"
    assert table.read_range("a", 2, 3) == b"con"
    listed = {file.path: file for file in table.files()}
    assert {path: file.size for path, file in listed.items()} == {"a": 6, "_delta_log/1.json": 2}
    assert all(abs(time.time() - file.written_at) < 60 for file in listed.values())
    assert [file.path for file in table.files("_delta_log")] == ["_delta_log/1.json"]
    assert place(f"{warehouse}/public.größe").folders() == ["mirror@1"]
    table.remove(["a", "nothing"])
    assert [file.path for file in table.files()] == ["_delta_log/1.json"]
    place(f"{warehouse}/public.größe").remove_all()
    assert list(place(warehouse).files()) == []


def test_rows_are_written_and_read(warehouse: str) -> None:
    location = f"{warehouse}/mirror"
    place(location).make()
    file = parquet.write_file(location, "part-1.parquet", [ROWS, ROWS])
    assert file
    (listed,) = place(location).files()
    assert (listed.path, listed.size) == (file["path"], file["size"])
    read = pa.concat_tables(parquet.read_rows(f"{location}/part-1.parquet", ROWS.schema))
    assert read == pa.concat_tables([ROWS, ROWS])
    assert parquet.row_count(f"{location}/part-1.parquet") == 4
    parquet.remove_files_with(location, "part-2")
    assert len(list(place(location).files())) == 1
    parquet.remove_files_with(location, "part")
    assert list(place(location).files()) == []


def test_a_file_that_could_not_be_written_leaves_nothing(warehouse: str) -> None:
    location = f"{warehouse}/mirror"
    place(location).make()

    def groups() -> Iterator[pa.Table]:
        yield ROWS
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        parquet.write_file(location, "part-1.parquet", groups())
    assert list(place(location).files()) == []


@pytest.mark.parametrize("path", ["part%20%C3%A9+1.parquet", "{}/part%20%C3%A9+1.parquet"])
def test_a_file_is_shared_by_two_tables(warehouse: str, path: str) -> None:
    source = place(f"{warehouse}/public.items/mirror@1")
    target = place(f"{warehouse}/public.items/mirror")
    source.write("part é+1.parquet", b"rows")
    target.share(locate(source.location, path.format(source.location)), "one.parquet")
    target.share(f"{source.location}/part é+1.parquet", "one.parquet")
    source.remove_all()
    assert target.read("one.parquet") == b"rows"
    with pytest.raises(FileMissing, match=r"mirror@1/nothing\.parquet: it isn't there") as caught:
        target.share(f"{source.location}/nothing.parquet", "two.parquet")
    assert "--table public.items" in caught.value.hint


def test_a_shared_file_of_a_folder_is_young(tmp_path: Path) -> None:
    """A VACUUM of somebody else removes what is old, and in no commit yet."""
    source = tmp_path / "deletion_vector_1.bin"
    source.write_bytes(b"marks")
    target = place(str(tmp_path / "mirror"))
    for _ in range(2):
        os.utime(source, (1.0, 1.0))
        target.share(str(source), source.name)
        assert (tmp_path / "mirror" / source.name).stat().st_mtime > time.time() - 60
    assert source.stat().st_nlink == 2


@pytest.fixture
def no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file system has none, or Linux refuses to link a file of another user."""

    def refused(*_: object) -> NoReturn:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)


@pytest.mark.usefixtures("no_links")
def test_a_file_system_without_links_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SinkUnavailable, match="has no hard links"):
        place(str(tmp_path)).write_new("1.json", b"{}")
    assert list(tmp_path.iterdir()) == []


def test_what_others_have_removed_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generation = tmp_path / "generation"
    (generation / "_delta_log").mkdir(parents=True)
    (generation / "part.parquet").touch()
    (tmp_path / "part.parquet").touch()
    remove_tree: Callable[[str], None] = shutil.rmtree

    def race(path: str) -> None:
        monkeypatch.undo()
        remove_tree(f"{path}/_delta_log")
        raise FileNotFoundError(path)

    monkeypatch.setattr(shutil, "rmtree", race)
    place(str(generation)).remove_all()
    place(str(tmp_path)).remove(["part.parquet", "gone"])
    assert list(tmp_path.iterdir()) == []


CALLS: dict[str, Callable[[Place], object]] = {
    "read": lambda table: table.read("a"),
    "read_range": lambda table: table.read_range("a", 0, 1),
    "write": lambda table: table.write("a", b"1"),
    "write_new": lambda table: table.write_new("a", b"1"),
    "files": lambda table: list(table.files()),
    "folders": lambda table: table.folders(),
    "share": lambda table: table.share(f"{table.location}/a", "b"),
    "remove": lambda table: table.remove(["a"]),
    "remove_all": lambda table: table.remove_all(),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_missing_bucket_is_not_an_empty_one(unique: str, call: str) -> None:
    buckets.new_bucket(unique)
    missing = place(f"s3://no-{unique.replace('_', '-')}/mirror")
    with pytest.raises(SinkUnavailable, match="NoSuchBucket") as caught:
        CALLS[call](missing)
    assert "bucket exists" in caught.value.hint
    with pytest.raises(OSError, match="no such bucket"):
        parquet.row_count(f"{missing.location}/part.parquet")
    with pytest.raises(OSError, match="NoSuchBucket"):
        parquet.write_file(missing.location, "part.parquet", [ROWS])


def refusal(status: str, code: str, client: socket.socket) -> None:
    """Answer as S3 does that it won't."""
    client.recv(65_536)
    body = f"<Error><Code>{code}</Code><Message>Not so.</Message><Key>secret</Key></Error>"
    head = f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    client.sendall((head + body).encode())


@pytest.mark.parametrize(
    ("status", "code"),
    [
        ("403 Forbidden", "InvalidAccessKeyId"),
        ("403 Forbidden", "SignatureDoesNotMatch"),
        ("403 Forbidden", "AccessDenied"),
        ("400 Bad Request", "ExpiredToken"),
        ("400 Bad Request", "AuthorizationHeaderMalformed"),
    ],
)
def test_what_a_store_answers_is_reported(status: str, code: str) -> None:
    with answering(partial(refusal, status, code)) as port:
        table = bucket_at(port)
        for call in ("read", "write_new", "files"):
            with pytest.raises(SinkUnavailable) as caught:
                CALLS[call](table)
            assert caught.value.message.endswith(f": {code} (Not so).")
            assert "secret" not in caught.value.message


def test_a_store_that_is_away_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    away = r"s3://lake-\d+/mirror can't be read: it doesn't answer"
    with pytest.raises(SinkUnavailable, match=away):
        bucket_at(port).read("a")


def accepting(client: socket.socket) -> None:
    """Take every object, whatever the request's conditions are."""
    client.recv(65_536)
    body = b"<DeleteResult><Deleted><Key>k</Key></Deleted></DeleteResult>"
    length = f"content-length: {len(body)}\r\nconnection: close"
    client.sendall(f'HTTP/1.1 200 OK\r\netag: "1"\r\n{length}\r\n\r\n'.encode() + body)


def test_a_store_where_two_can_create_one_file_is_refused() -> None:
    refusal = "lets two writers create the same file"
    with answering(accepting) as port, pytest.raises(SinkRejected, match=refusal):
        bucket_at(port).require_one_winner()


def test_settings_of_the_environment_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "localhost:9000")
    with pytest.raises(SinkUnavailable, match="settings in the environment can't be used"):
        place("s3://lake-without-a-scheme/mirror").read("a")
    monkeypatch.setenv("AWS_ENDPOINT_URL", buckets.ENDPOINT)
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(SinkUnavailable, match=r"can't be read: .*[Ss]ecret"):
        place("s3://lake-without-a-secret/mirror").read("a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    with pytest.raises(SinkUnavailable, match="AWS_ALLOW_HTTP=true"):
        place("s3://lake-without-tls/mirror").read("a")


def test_a_full_temporary_folder_is_named(tmp_path: Path) -> None:
    """A file of a bucket is there before it is uploaded."""
    for location, reason in (("s3://lake/house", "TMPDIR"), (str(tmp_path), "No space left")):
        with pytest.raises(SinkUnavailable, match=reason), writing(location):
            raise OSError(errno.ENOSPC, "No space left on device")


def test_a_file_of_another_bucket_is_not_taken_for_a_missing_one(unique: str) -> None:
    table = place(f"{buckets.new_bucket(unique)}/mirror")
    with pytest.raises(SinkUnavailable, match="is in another bucket"):
        table.read("s3://other/mirror/a")
    with pytest.raises(SinkUnavailable, match="is in another bucket"):
        table.share("s3://other/mirror/a", "a")


def test_deltalake_finds_a_table_whatever_its_name_is(unique: str) -> None:
    location = f"{buckets.new_bucket(unique)}/100% #1?/public.größe/mirror@1"
    TableLog(location).commit(NO_TABLE, creation(struct(n="long")), "WRITE", None)
    assert deltalake.DeltaTable(table_uri(location)).version() == 0


@pytest.mark.usefixtures("no_links")
def test_a_file_of_another_user_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a copy that is cut leaves isn't taken for the file."""

    def cut(_: str, destination: Path) -> NoReturn:
        destination.write_bytes(b"ro")
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "source").write_bytes(b"rows")
    target = place(str(tmp_path / "mirror"))
    with monkeypatch.context() as patch:
        patch.setattr("shutil.copyfile", cut)
        with pytest.raises(SinkUnavailable, match="can't be written: No space left"):
            target.share(str(tmp_path / "source"), "one.parquet")
    assert target.read("one.parquet") is None
    target.share(str(tmp_path / "source"), "one.parquet")
    assert target.read("one.parquet") == b"rows"


def bucket_at(port: int) -> Bucket:
    """A bucket of a store at a port of this machine."""
    bucket = Bucket(f"s3://lake-{port}/mirror")
    with pytest.MonkeyPatch.context() as patch, suppress(SinkUnavailable):
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        # The environment is read by the first call.
        bucket.read("first")
    return bucket


def test_of_several_writers_one_creates_a_file(warehouse: str) -> None:
    table = place(f"{warehouse}/mirror")
    barrier = threading.Barrier(4, timeout=60)
    table.make()

    def write(data: bytes) -> list[bool]:
        won = []
        for number in range(20):
            barrier.wait()
            won.append(table.write_new(f"{number}.json", data))
        return won

    with ThreadPoolExecutor(4) as pool:
        written = list(pool.map(write, (b"a", b"b", b"c", b"d")))
    assert [sum(won) for won in zip(*written, strict=True)] == [1] * 20
