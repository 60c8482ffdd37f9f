"""The rules of a migrations folder, and the statements that need no database."""

import hashlib
from pathlib import Path

import pytest

from cdc.errors import SourceError
from cdc.migrations import CONTROL, SAMPLE, heartbeat_query
from cdc.migrations.runner import folder_kind, migrations

APPLIED = {
    "control/0001_control.sql": "fc83471d5f68c37846e583191d8eb33c7fd99537d9a4cfaeaaa58f533bb0504e",
    "control/0002_truncation.sql": "1c144fd65e31765db480502dc7ed36f5c78d48ada6df816ca63a06362a7db9d4",
    "control/0003_ddl.sql": "d9949f5d2b5ffa2063eb05a28100dec78fc5e35497117866775390b0bbffb15d",
    "control/0004_definitions.sql": "3453c5b415af83e08efe7d88da4905cadccf5092a1fba2e7a7f51fa32b461b69",
    "control/0005_signal_data.sql": "b3c0058d80b952fdfe59dda8f8124913f7fc3fbc4285ccfef26cf7a05cd5e7e7",
    "control/0006_ours.sql": "57bb282d6c87a943b6b0ade5e2a5660bd7b557160c3c97000e80ca8b09226b4d",
    "control/0007_comparison.sql": "6d73d4cb9ca18110988bf90e8d51cdcbd50fd07ae56adb6407f78c97d3db0be9",
    "control/0008_current_rows.sql": "4bf57401defdaa33085938ee6d59a0ed4434ae3165bf9072efd75b95c2efd2c1",
    "control/0009_fingerprint.sql": "1acdf71c5edfcfce7f92d49da9cfcf3a2f40cc085b80ed3ee76f5a7a66a23961",
    "control/0010_settings.sql": "4a6b434f12043c9af7ff30d25b5a85d37cedf9e4373da84e8b24080c09780d71",
    "control/0011_every_ancestor.sql": "566114f7092ad3fa32e1f6c295c37f6990669ba324116691d5736e7eead46ee7",
    "control/0012_identity.sql": "cb37aad28e049b3e09e99505897f76926b506a4fd85764f282ba1c6d21f4c0ef",
    "control/0013_publications.sql": "eaef1e1f9985a111ddc65f2bf929e1b3047329dfc89cac407f0859d405cba3bb",
    "control/0014_events.sql": "d8daecc890f6ac22a078faf2a4702a7a4085740ae2e063fab9a8ebced25a7680",
    "sample/0001_airport.sql": "c8960f50e4b466540408b5820e0eac3b94f459b0d75497f28f33f1a48981032f",
    "sample/0002_indexes.sql": "8b7ca3277972b5f16c907aa721517b675e869e21943b00c03ea3029dbb49ac48",
    "sample/0003_departures.sql": "865c2b6ab6011ee5d31a4691def60c0acdbfa0729ce1df99dd036c32d77d6daf",
    "sample/0004_statistics.sql": "4749c34644fb7c356724b611fbd9a98fea9376138994d4f8e9346ed1e7ec506c",
    "sample/0005_arrivals.sql": "242fbf3b37cb5e50fef5ca029a6bc1455967bb272eb9f5637dbc20eed690e362",
    "sample/0006_aircraft.sql": "26feebb99e9b47bc32efa4de6a9952e879ad3d4b8858bbddd1606778df2e7a1b",
}
"""Files that databases have applied, by the SHA-256 of their bytes. A new file gets a line, none is changed."""


def folder(tmp_path: Path, *names: str) -> Path:
    directory = tmp_path / "mine"
    directory.mkdir()
    for name in names:
        (directory / name).write_text("SELECT 1")
    return directory


@pytest.mark.parametrize("shipped", [CONTROL, SAMPLE])
def test_shipped_folders_are_well_formed(shipped: Path) -> None:
    files = migrations(shipped)
    assert [file.name for file in files] == sorted(file.name for file in files)
    assert all(file.name.startswith(f"{folder_kind(shipped)}/00") for file in files)


def test_files_that_were_applied_stay_as_they_are() -> None:
    """Also their comments: a database refuses a file whose bytes aren't those that it has applied."""
    files = [file for shipped in (CONTROL, SAMPLE) for file in migrations(shipped)]
    assert {file.name: file.checksum for file in files} == APPLIED


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
