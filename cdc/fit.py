"""Whether a row fits its table and a sink: asked of records one by one, once a batch of them has failed."""

from pyspark.sql import Column
from pyspark.sql import functions as F

from cdc import rows, types
from cdc.change import Form, Table

CORRUPT = "_cdc_corrupt"


def unfit(table: Table, row: Column, form: Form) -> Column:
    """What keeps the connector's JSON of a row out of a view, naming a column and never a value; null when it fits."""
    fields = rows.wire_fields(table.columns)
    parsed = F.from_json(row, f"{fields}, {CORRUPT} string", {"columnNameOfCorruptRecord": CORRUPT})
    found = F.when(parsed.getField(CORRUPT).isNotNull(), "it does not fit the columns of its table")
    for column in table.columns:
        kind, value = types.kind(column.type), parsed.getField(column.name)
        if kind.lost:
            found = found.when(rows.lost(table, column.name, value), f"the connector has damaged its {column.name}")
        if kind.to_column and form == "events":
            unheld = value.isNotNull() & rows.holdable(kind, value).isNull()
            found = found.when(unheld, f"the warehouse can not hold its {column.name}")
    return found
