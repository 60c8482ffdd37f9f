"""Files that two Delta tables have: one file with two names, or a copy where that can't be."""

import errno
import os
import time
from pathlib import Path
from typing import NoReturn

import pytest

from cdc.errors import SinkRejected, SinkUnavailable
from cdc.sinks.delta import capacity
from cdc.sinks.delta.files import links
from cdc.sinks.delta.files.links import FileMissing, share, share_as


def no_links(*_: object) -> NoReturn:
    """Raise the error of a file system without links."""
    raise PermissionError(errno.EPERM, "Operation not permitted")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "public.items" / "mirror@1"
    folder.mkdir(parents=True)
    (folder / "part é+1.parquet").write_bytes(b"rows")
    return folder


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("path", ["part%20%C3%A9+1.parquet", "file:{}/part%20%C3%A9+1.parquet"])
def test_a_file_is_in_either_folder(
    source: Path, monkeypatch: pytest.MonkeyPatch, links: bool, path: str
) -> None:
    """Under a new name at each time: a commit can't take a file out and put it in."""
    if not links:
        monkeypatch.setattr(os, "link", no_links)
    target = source.parent / "mirror"
    names = [share(str(source), path.format(source), str(target)) for _ in range(2)]
    assert {file.name for file in target.iterdir()} == set(names)
    assert len(set(names)) == 2
    assert all((target / name).read_bytes() == b"rows" for name in names)
    assert (source / "part é+1.parquet").stat().st_nlink == (3 if links else 1)
    (source / "part é+1.parquet").unlink()
    assert (target / names[0]).read_bytes() == b"rows"


def test_what_is_linked_is_young(source: Path) -> None:
    """A VACUUM of somebody else removes what is old, and in no commit yet."""
    vector_file, target = source / "deletion_vector_1.bin", source.parent / "mirror"
    vector_file.write_bytes(b"marks")
    for _ in range(2):
        os.utime(vector_file, (1.0, 1.0))
        share_as(str(vector_file), f"{target}/deletion_vector_1.bin", str(target))
        assert (target / vector_file.name).stat().st_mtime > time.time() - 60


def test_a_copy_that_was_cut_is_not_taken_for_the_file(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(_: str, destination: Path) -> NoReturn:
        destination.write_bytes(b"ro")
        raise OSError(errno.ENOSPC, "No space left on device")

    target = source.parent / "mirror"
    monkeypatch.setattr(os, "link", no_links)
    monkeypatch.setattr("shutil.copyfile", cut)
    with pytest.raises(SinkUnavailable, match=r"mirror can't be written: No space left on device"):
        share_as(str(source / "part é+1.parquet"), f"{target}/deletion_vector_1.bin", str(target))
    assert not (target / "deletion_vector_1.bin").exists()


def test_a_file_that_is_gone_is_told(source: Path) -> None:
    with pytest.raises(FileMissing, match=r"mirror@1/nothing\.parquet: it isn't there") as caught:
        share(str(source), "nothing.parquet", str(source.parent / "mirror"))
    assert "--table public.items" in caught.value.hint


def test_a_second_generation_needs_more_room_where_links_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capacity, "COPIES", 2**40)
    assert links.can_link(str(tmp_path))
    capacity.require_capacity(1, str(tmp_path), "warehouse")
    monkeypatch.setattr(os, "link", no_links)
    with pytest.raises(SinkRejected, match="needs"):
        capacity.require_capacity(1, str(tmp_path), "warehouse")
    assert not list(tmp_path.iterdir())
