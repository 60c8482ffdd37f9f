"""The rules of a migrations folder, and the statements that need no database."""

import hashlib
from pathlib import Path

import pytest

from cdc.errors import SourceError
from migrations import CONTROL, SAMPLE, heartbeat_query
from migrations.runner import folder_kind, migrations


def folder(tmp_path: Path, *names: str) -> Path:
    made = tmp_path / "mine"
    made.mkdir()
    for name in names:
        (made / name).write_text("SELECT 1")
    return made


@pytest.mark.parametrize("shipped", [CONTROL, SAMPLE])
def test_shipped_folders_are_well_formed(shipped: Path) -> None:
    files = migrations(shipped)
    assert [file.name for file in files] == sorted(file.name for file in files)
    assert all(file.name.startswith(f"{folder_kind(shipped)}/000") for file in files)


def test_kinds_of_folders_do_not_clash() -> None:
    assert folder_kind(CONTROL) == "control"
    assert folder_kind(SAMPLE) == "sample"


def test_a_file_is_known_by_the_sha256_of_its_bytes(tmp_path: Path) -> None:
    (file,) = migrations(folder(tmp_path, "0001_first.sql"))
    assert file.name == "mine/0001_first.sql"
    assert file.checksum == hashlib.sha256(b"SELECT 1").hexdigest()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("0001_a.sql", "0003_c.sql"), "0003_c.sql leaves 0002 out"),
        (("0002_b.sql",), "0002_b.sql leaves 0001 out"),
        (("0001_a.sql", "0001_b.sql"), "0001_b.sql has another file's number"),
        (("0001_a.sql", "0002_B.sql"), "0002_B.sql isn't a migration's name"),
        (("1_a.sql",), "1_a.sql isn't a migration's name"),
        ((), "no migrations in mine"),
    ],
)
def test_a_wrong_folder_is_refused(tmp_path: Path, names: tuple[str, ...], message: str) -> None:
    with pytest.raises(SourceError) as caught:
        migrations(folder(tmp_path, *names))
    assert caught.value.message == message
    assert caught.value.hint


def test_other_files_beside_the_sql_are_left_alone(tmp_path: Path) -> None:
    assert len(migrations(folder(tmp_path, "0001_a.sql", "runner.py", "README"))) == 1


def test_the_heartbeat_is_one_statement_for_one_row() -> None:
    assert heartbeat_query("airport") == (
        "UPDATE cdc.heartbeat SET beat = beat + 1, at = clock_timestamp() WHERE pipeline = 'airport'"
    )


def test_the_heartbeat_quotes_its_pipeline() -> None:
    assert heartbeat_query("o'hare").endswith("WHERE pipeline = 'o''hare'")
