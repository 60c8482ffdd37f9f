"""Protocol and columns of a table as our commits change them, and columns that none can have."""

from pathlib import Path

import deltalake
import pytest

from cdc.errors import SinkRejected
from cdc.model.table import Column, Table
from cdc.sinks.delta.columns import refusals
from cdc.sinks.delta.log import DELETION_VECTORS, NO_TABLE, Action, TableLog, creation, extension
from tests.support.warehouse import struct


def commit(log: TableLog, actions: list[Action]) -> None:
    state = log.refresh()
    log.commit(state.identity if state else NO_TABLE, actions, "WRITE", None)


def test_features_come_and_go(tmp_path: Path) -> None:
    """Those of columns stay; what a table has had for others stays."""
    log = TableLog(str(tmp_path))
    commit(log, creation(struct(a="long")))
    plain = deltalake.DeltaTable(str(tmp_path)).protocol()
    assert (plain.min_reader_version, plain.min_writer_version) == (1, 2)
    assert log.state
    assert extension(log.state, struct(a="long")) == []
    wider = struct(a="long", at="timestamp_ntz")
    commit(log, extension(log.state, wider, [DELETION_VECTORS]))
    table = deltalake.DeltaTable(str(tmp_path))
    assert set(table.protocol().reader_features or ()) == {"deletionVectors", "timestampNtz"}
    assert {"appendOnly", "invariants"} <= set(table.protocol().writer_features or ())
    assert table.metadata().configuration == {"delta.enableDeletionVectors": "true"}
    commit(log, extension(log.state, struct(b="string"), dropped=[DELETION_VECTORS]))
    table = deltalake.DeltaTable(str(tmp_path))
    assert table.protocol().reader_features == ["timestampNtz"]
    assert table.metadata().configuration == {}
    assert [field.name for field in table.schema().fields] == ["a", "at", "b"]
    commit(log, extension(log.state, struct(c="string"), replaced=True))
    assert [f.name for f in deltalake.DeltaTable(str(tmp_path)).schema().fields] == ["c"]


def test_a_table_without_features_of_readers_keeps_those_of_writers(tmp_path: Path) -> None:
    log = TableLog(str(tmp_path))
    protocol, metadata = creation(struct(a="long"), [DELETION_VECTORS])
    protocol["protocol"]["writerFeatures"].append("inCommitTimestamp")
    metadata["metaData"]["configuration"]["delta.enableInCommitTimestamps"] = "true"
    commit(log, [protocol, metadata])
    assert log.state
    commit(log, extension(log.state, struct(a="long"), dropped=[DELETION_VECTORS]))
    now = deltalake.DeltaTable(str(tmp_path)).protocol()
    assert (now.min_reader_version, now.min_writer_version) == (1, 7)
    assert "inCommitTimestamp" in (now.writer_features or ())


@pytest.mark.parametrize("versions", [(2, 5), (1, 4), (4, 8)])
def test_versions_that_mean_features_are_refused(tmp_path: Path, versions: tuple[int, int]) -> None:
    readers, writers = versions
    protocol = {"protocol": {"minReaderVersion": readers, "minWriterVersion": writers}}
    log = TableLog(str(tmp_path))
    commit(log, [*creation(struct(a="long")), protocol])
    with pytest.raises(SinkRejected, match=f"versions {readers} and {writers}"):
        log.refresh()


def test_a_partitioned_table_waits_until_it_is_replaced(tmp_path: Path) -> None:
    log = TableLog(str(tmp_path))
    protocol, metadata = creation(struct(a="long"))
    metadata["metaData"]["partitionColumns"] = ["a"]
    commit(log, [protocol, metadata])
    assert log.state
    with pytest.raises(SinkRejected, match="partitioned"):
        extension(log.state, struct(a="long"))
    commit(log, extension(log.state, struct(a="long"), replaced=True))
    assert deltalake.DeltaTable(str(tmp_path)).metadata().partition_columns == []


def made_of(*names: str) -> Table:
    columns = tuple(Column(name, "text") for name in ("id", *names))
    return Table("public", "items", columns, ("id",), "t")


def test_names_that_are_carried() -> None:
    """`tests/contract/test_delta.py` carries others."""
    assert refusals(made_of("a/b", "ID2", "cdc")) == []


@pytest.mark.parametrize("character", [" ", ",", ";", "{", "}", "(", ")", "\n", "\t", "="])
def test_a_character_that_no_column_can_have(character: str) -> None:
    (reason,) = refusals(made_of(f"order{character}date", "plain"))
    assert repr(f"order{character}date") in reason
    assert repr(character) in reason


def test_the_name_that_spark_needs_itself() -> None:
    (reason,) = refusals(made_of("_Metadata", "metadata"))
    assert "_Metadata" in reason
