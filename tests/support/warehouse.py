"""Delta tables with a position of ours, made of Spark's rows instead of a batch; and the rows of a
mirror and events, read without Spark.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import deltalake
import pyarrow as pa

from cdc.model.position import ViewCheckpoint
from cdc.model.table import Table
from cdc.sinks.delta import parquet, scan
from cdc.sinks.delta.columns import to_arrow
from cdc.sinks.delta.log import NO_TABLE, File, FileNames, Identity, TableLog, additions, creation
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
