"""The one table of types: how a Postgres type travels in Debezium's JSON, and how the views hold
it.

Four forms of a value, and the only place that knows them:
    wire      what Debezium writes into `after` (decimal, binary and time modes of `connectors/debezium.py`)
    document  the JSON of a search document or a cached row
    column    the value of a warehouse column
    source    an SQL expression whose JSON is the document form: the oracle that `verify` compares
        with
"""

from cdc.codec.types.kind import TypeCodec
from cdc.codec.types.registry import kind

__all__ = ["TypeCodec", "kind"]
