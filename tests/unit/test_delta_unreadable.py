"""A warehouse that can't be read has no position, which is another thing than no table there."""

from collections.abc import Callable
from pathlib import Path

import deltalake
import pyarrow as pa
import pytest

from cdc.errors import SinkUnavailable
from cdc.sinks.delta.log import TableLog


def break_mount(warehouse: Path) -> None:
    """A file where a folder was."""
    warehouse.rename(warehouse.with_name("moved"))
    warehouse.write_text("")


def break_log(warehouse: Path) -> None:
    """The table's folder is there, and its log no folder."""
    log = warehouse / "items" / "_delta_log"
    log.rename(log.with_name("moved"))
    log.write_text("")


@pytest.fixture
def table(tmp_path: Path) -> str:
    folder = tmp_path / "warehouse" / "items"
    folder.mkdir(parents=True)
    deltalake.write_deltalake(str(folder), pa.table({"id": [1]}))
    return str(folder)


@pytest.mark.parametrize("damage", [break_mount, break_log])
@pytest.mark.parametrize("opened", [True, False])
def test_a_folder_that_cannot_be_read_is_unavailable(
    table: str, tmp_path: Path, damage: Callable[[Path], None], opened: bool
) -> None:
    log = TableLog(table)
    if opened:
        assert log.refresh()
    damage(tmp_path / "warehouse")
    with pytest.raises(SinkUnavailable, match="can't be read: Not a directory"):
        log.last_commit()


def test_a_folder_that_is_not_there_has_no_table(tmp_path: Path) -> None:
    assert TableLog(str(tmp_path / "warehouse" / "items")).last_commit().checkpoint is None
    (tmp_path / "empty").mkdir()
    assert TableLog(str(tmp_path / "empty")).last_commit().checkpoint is None
