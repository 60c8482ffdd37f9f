"""Delta tables with a position of ours, made of Spark's rows or of a test's instead of a batch; and the
rows of a mirror and events, read without Spark.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deltalake
import pyarrow as pa
import pyarrow.parquet as pq

from cdc.model.position import ViewCheckpoint
from cdc.model.table import Table
from cdc.sinks.delta import parquet, scan
from cdc.sinks.delta.columns import NO_COLUMNS, schema, to_arrow
from cdc.sinks.delta.log import (
    CLEARED,
    DELETION_VECTORS,
    NO_TABLE,
    File,
    FileNames,
    Identity,
    TableLog,
    TableState,
    additions,
    creation,
    new_file,
)
from cdc.sinks.delta.mirror import Search, mark, search_files
from cdc.sinks.delta.sink import Delta

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def struct(**types: Any) -> Any:
    """Columns or fields, as Delta's JSON has them."""
    fields = [
        {"name": name, "type": type_, "nullable": True, "metadata": {}}
        for name, type_ in types.items()
    ]
    return {"type": "struct", "fields": fields}


Version = tuple[str, int]
"""An id, and an offset at which its row was changed."""
VERSIONS = pa.schema(
    [("_cdc_id", pa.string()), ("_cdc_partition", pa.int32()), ("_cdc_offset", pa.int64())]
)


def versions_table(versions: Sequence[Version]) -> pa.Table:
    ids = [key for key, _ in versions]
    offsets = [offset for _, offset in versions]
    return pa.table([ids, [0] * len(ids), offsets], schema=VERSIONS)


def write_versions(folder: Path, name: str, versions: Sequence[Version]) -> str:
    """In several row groups; returns the name."""
    pq.write_table(versions_table(versions), folder / name, row_group_size=7)
    return name


def create_mirror(log: TableLog, **properties: str) -> None:
    protocol, metadata = creation(schema(NO_COLUMNS, "mirror"), [DELETION_VECTORS])
    metadata["metaData"]["configuration"] |= properties
    log.commit(NO_TABLE, [protocol, metadata], "CREATE TABLE", None)


class Mirror:
    """A mirror that is changed as batches change it, without Spark; `rows` is what it has to hold:
    offsets by id.
    """

    def __init__(self, folder: Path, **properties: str) -> None:
        self.folder = folder
        self.log = TableLog(str(folder))
        self.rows: dict[str, int] = {}
        create_mirror(self.log, **properties)

    @property
    def state(self) -> TableState:
        state = self.log.refresh()
        assert state is not None
        return state

    def change(self, versions: Sequence[Version], deleted: Sequence[Version] = ()) -> None:
        state = self.state
        names = FileNames()
        rows = [write_versions(self.folder, names.generate(), versions)] if versions else []
        gone = [write_versions(self.folder, names.generate(), deleted)] if deleted else []
        stats = json.dumps({"numRecords": len(versions)})
        files = [new_file(name, (self.folder / name).stat().st_size, stats) for name in rows]
        search = Search("t", str(self.folder), list(state.files), rows, gone, repeated=True)
        actions = mark(self.log.place, state, files, dict(search_files(search)), names)
        self.log.commit(state.identity, actions, "STREAMING UPDATE", CLEARED)
        self.rows |= dict(versions)
        for key, _ in deleted:
            self.rows.pop(key, None)

    def read(self) -> dict[str, int]:
        return values_by_id(self.folder, "_cdc_id", "_cdc_offset")


def begin(folder: str, rows: "DataFrame", stored: ViewCheckpoint) -> None:
    """Make a table of rows. Raises SinkUnavailable when there is one by now."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    created = [*creation(rows.schema.jsonValue()), *additions(_write(folder, rows))]
    TableLog(folder).commit(NO_TABLE, created, "WRITE", stored)


def write(folder: str, identity: Identity, rows: "DataFrame", stored: ViewCheckpoint) -> None:
    """Add rows to a version of a table. Raises SinkUnavailable when there is a newer one."""
    files = additions(_write(folder, rows))
    TableLog(folder).commit(identity, files, "WRITE", stored)


def _write(folder: str, rows: "DataFrame") -> list[File]:
    """Write rows as a file that is in no commit yet."""
    columns = to_arrow(rows.schema.jsonValue())
    table = parquet.fit_to_schema(rows.toArrow(), columns)
    file = parquet.write_file(folder, FileNames().generate(), [table] if table.num_rows else [])
    return [file] if file else []


def values_by_id(folder: Path, id_column: str, column: str) -> dict[str, int]:
    """A column of a table by its ids, as deltalake reads it. Asserts that no id comes twice."""
    query = deltalake.QueryBuilder().register("t", deltalake.DeltaTable(str(folder)))
    table = query.execute(f"SELECT {id_column}, {column} FROM t").read_all()
    ids = table[id_column].to_pylist()
    assert len(ids) == len(set(ids)), "an id twice"
    return dict(zip(ids, table[column].to_pylist(), strict=True))


def logged_events(folder: str, version: int | None = None) -> list[tuple[int, int]]:
    """The partitions and offsets of the events in a log of changes, as deltalake reads them."""
    log = deltalake.DeltaTable(folder, version=version)
    query = deltalake.QueryBuilder().register("t", log)
    events = query.execute("SELECT _cdc_partition AS p, _cdc_offset AS o FROM t").read_all()
    return list(zip(events["p"].to_pylist(), events["o"].to_pylist(), strict=True))


def mirror_documents(sink: Delta, table: Table) -> list[tuple[str, str]]:
    """The ids of a mirror's rows with their documents, as `Delta.scan` gives them. It takes
    milliseconds, and Spark a second. Rows that are marked as deleted are left out.
    """
    folder = sink.folder(table, "mirror")
    if not deltalake.DeltaTable.is_deltatable(folder):
        return []
    query = deltalake.QueryBuilder().register("mirror", deltalake.DeltaTable(folder))
    documents: list[tuple[str, str]] = []
    for batch in pa.table(query.execute("SELECT * FROM mirror").read_all()).to_batches():
        ids = scan.row_ids(batch).to_pylist()
        documents += zip(ids, scan.documents(table, batch).to_pylist(), strict=True)
    return documents
