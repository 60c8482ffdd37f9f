"""What the index' sink says and does where no server is needed."""

import pyarrow as pa
import pytest

from cdc.change import Column, Table
from cdc.errors import SinkUnavailable
from cdc.report import Row
from sinks.elasticsearch import Elasticsearch
from sinks.elasticsearch_bulk import sender

TABLE = Table("public", "items", (Column("id", "bigint"),), ("id",), "t")
NOBODY = "http://elastic:secret@127.0.0.1:1"


def test_the_driver_names_no_login() -> None:
    with pytest.raises(SinkUnavailable) as caught:
        Elasticsearch("search", NOBODY, "shop").position(TABLE)
    assert "secret" not in f"{caught.value.message}{caught.value.hint}{caught.value.where}"
    assert "127.0.0.1:1" in caught.value.message


def test_executors_name_no_login() -> None:
    row = dict(Row("1", 5, 5, "{}", None, None, 1, 0, 0)._asdict())
    line = '{"index":{"_index":"i","_id":"1"}}\n{}\n'
    one = {"topic": "t", "partition": 0, "target": "i", "key": "1", "line": line, **row}
    (batch,) = sender(NOBODY, {"t"})(iter([pa.RecordBatch.from_pylist([one])]))
    (said,) = batch.to_pylist()
    assert said["failure"] == "unavailable"
    assert "secret" not in said["message"]
    assert "127.0.0.1:1" in said["message"]
