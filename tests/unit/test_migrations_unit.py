"""The rules of a migrations folder, and the statements that need no database."""

from cdc.migrations import CONTROL, SAMPLE, heartbeat_query
from cdc.migrations.runner import migrations

APPLIED = {
    "control/0001_control.sql": "0ef4f0abce4cfec078f7ee8d6901217cab061b605a50e34fcc79494614c7f7f6",
    "control/0002_definitions.sql": "f5afc0ee2da99e32943541db19d7154efa2344a17b21baa96820549765ac6a13",
    "control/0003_truncation.sql": "b0a18171cec1c63166248b966e83aa3cccce6f844cf73acca7de262e9a6757de",
    "control/0004_comparison.sql": "6e4ac746f71a92171ba62396644c558379bb19a38c3fe0c70c1506813d40a00f",
    "control/0005_current_rows.sql": "938d67bb98889aa887987a5a14a64921949f80bfbadddb7a4b4a72732188641c",
    "control/0006_publications.sql": "eaef1e1f9985a111ddc65f2bf929e1b3047329dfc89cac407f0859d405cba3bb",
    "control/0007_event_tables.sql": "d8daecc890f6ac22a078faf2a4702a7a4085740ae2e063fab9a8ebced25a7680",
    "control/0008_event_triggers.sql": "ee9c44bdcfac5f12655e3655a1b21c01ffb8142a0cd43079379c0e4954702c07",
    "control/0009_reader.sql": "6b2387c61916ee2ac72f3280ec74d97832535ab370c67bb702275391a5ae1f2d",
    "sample/0001_airport.sql": "37ba8c81e47b12fd8a1df2a3b6012d7cc58df16bdf26b6780437015f52f0fef8",
}
"""Files that databases have applied, by the SHA-256 of their bytes. A new file gets a line, none is changed."""


def test_files_that_were_applied_stay_as_they_are() -> None:
    """Also their comments: a database refuses a file whose bytes aren't those that it has applied."""
    files = [file for shipped in (CONTROL, SAMPLE) for file in migrations(shipped)]
    assert {file.name: file.checksum for file in files} == APPLIED


def test_the_heartbeat_is_one_statement_for_the_row_of_its_pipeline() -> None:
    assert heartbeat_query("o'hare") == (
        "UPDATE cdc.heartbeat SET beat = beat + 1, at = clock_timestamp() WHERE pipeline = 'o''hare'"
    )
