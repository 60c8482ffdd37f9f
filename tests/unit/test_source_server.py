"""Which servers can be captured from."""

import pytest

from cdc.model.source_server import server_fault


@pytest.mark.parametrize(
    ("version", "level", "encoding", "code"),
    [
        (180006, "replica", "UTF8", "setting-differs/wal_level"),
        (150000, "minimal", "UTF8", "setting-differs/wal_level"),
        (190000, "minimal", "UTF8", "setting-differs/wal_level"),
        (130010, "logical", "UTF8", "source-unfit/version"),
        (180006, "logical", "SQL_ASCII", "source-unfit/encoding"),
    ],
)
def test_a_server_that_cannot_be_captured_from(
    version: int, level: str, encoding: str, code: str
) -> None:
    fault = server_fault(version, level, encoding)
    assert fault is not None
    assert fault.code == code


@pytest.mark.parametrize(
    ("version", "level", "encoding"),
    [
        (140000, "logical", "UTF8"),
        (180006, "logical", "LATIN1"),
        (190000, "replica", "UTF8"),
        (190001, "logical", "UTF8"),
    ],
)
def test_a_server_that_can(version: int, level: str, encoding: str) -> None:
    assert server_fault(version, level, encoding) is None
