"""Delta tables with a position of ours, made of Spark's rows instead of a batch; and the rows of a
mirror, read without Spark.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import deltalake
import pyarrow as pa

from cdc.model.position import ViewCheckpoint
from cdc.model.table import Table
from cdc.sinks.delta import scan
from cdc.sinks.delta.files.parquet import ChangedRows
from cdc.sinks.delta.log import add_files
from cdc.sinks.delta.log.commits import CommitInfo
from cdc.sinks.delta.sink import Delta

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from cdc.sinks.delta.log.add_files import Mode


def begin(folder: str, rows: "DataFrame", stored: ViewCheckpoint, number: int) -> None:
    """Make a table of rows. Raises SinkUnavailable when there is one by now."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    files = add_files.write_files(folder, rows, columns(rows))
    add_files.create(
        folder, add_files.add_actions(files), columns(rows), CommitInfo(stored, number)
    )


def write(
    table: deltalake.DeltaTable,
    rows: "DataFrame",
    mode: "Mode",
    stored: ViewCheckpoint,
    number: int,
) -> None:
    """Add rows to a table, or put them in the place of all it has. Raises SinkUnavailable, see
    `add_files.commit`.
    """
    add_files.add_columns(table, columns(rows))
    files = add_files.write_files(table.table_uri, rows, table.schema())
    add_files.commit(
        table, add_files.add_actions(files), mode, table.schema(), CommitInfo(stored, number)
    )


def staged(folder: str, rows: "DataFrame") -> ChangedRows:
    """Rows with `_cdc_gone` as a batch brings them to a mirror."""
    lasting, tombstones = (
        rows.where(f"{word}_cdc_gone").drop("_cdc_gone") for word in ("NOT ", "")
    )
    files = add_files.write_files(folder, lasting, columns(lasting))
    ids = tombstones.select("_cdc_id")
    return ChangedRows(
        files, [file.name for file in (*files, *add_files.write_files(folder, ids, columns(ids)))]
    )


def columns(rows: "DataFrame") -> deltalake.Schema:
    schema = deltalake.Schema.from_json(rows.schema.json())
    return deltalake.Schema(
        [deltalake.Field(field.name, field.type, nullable=True) for field in schema.fields]
    )


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
