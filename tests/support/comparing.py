"""Codec and lane against the twin, which knows neither."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from cdc.codec import forms
from cdc.codec.decode_options import DecodeOptions
from cdc.codec.record import RecordDecoder, Unreadable
from cdc.codec.table import codec
from cdc.model.outcome import Advance
from cdc.model.position import Position
from cdc.model.table import Table
from cdc.sink.lane import ChunkLimits, Lane
from cdc.sink.rejection import Stop
from tests.support import twin
from tests.support.envelopes import PLACEHOLDER
from tests.support.lanes import Writer, run
from tests.support.twin import Raw, RowFormat, Twin


def assert_as_the_twin(
    table: Table, records: Iterable[Raw], form: RowFormat, placeholder: str = PLACEHOLDER
) -> None:
    """Each record is the same change, and the same row in the form of a view; or both refuse it."""
    reader, table_codec = RecordDecoder([table], placeholder), codec(table)
    reference = Twin([table], form, placeholder)
    for record in records:
        expected = reference.decode(record)
        assert reader.row_id(table.topic, record.key) == expected.id, record
        try:
            change = reader.decode(table.topic, record.key, record.value)
            fault = change.row and table_codec.problem(change.row, warehouse=form == "events")
        except Unreadable as error:
            fault = error.problem
        assert bool(fault) == expected.wrong, (fault, record)
        if fault:
            continue
        assert (change.id, change.op, change.lsn) == (expected.id, expected.op, expected.lsn), (
            record
        )
        assert frozenset(change.missing) == (expected.missing or frozenset())
        text = change.row and (
            table_codec.document(change.row) if form == "documents" else change.row
        )
        assert (text and twin.loads(text.decode())) == expected.after
        if change.row and form == "events":
            assert len(table_codec.values(change.row)) == len(table.columns)


def assert_view_as_the_twin(
    table: Table, records: Sequence[Raw], chunk_rows: int, placeholder: str = PLACEHOLDER
) -> dict[str, Any]:
    """A lane makes of these records, all of which are changes, the view that they make one after
    the other, as documents and as values of columns; returns it.
    """
    partitions = max(record.partition for record in records) + 1
    ends = [0] * partitions
    for record in records:
        ends[record.partition] = max(ends[record.partition], record.offset + 1)
    advance = Advance(table, None, Position("id", tuple(ends)))
    changes = map(Twin([table], "documents", placeholder).decode, records)
    shown, lost = twin.applied(changes, {})
    assert not lost
    limits = ChunkLimits(chunk_rows, 10**6)
    documents, columns = Writer(limits=limits), Writer(forms.Values(), limits)
    for writer in (documents, columns):
        reports = run(Lane((advance,), DecodeOptions(placeholder), writer, Stop()), records)
        assert [report.failure for report in reports] == [None] * len(reports)
        assert sum(report.applied.read for report in reports) == len(records)
        assert sum(report.applied.accounted for report in reports) == len(records)
    view = documents.views.get(table.topic, {})
    assert {key: twin.loads(document.decode()) for key, document in view.items()} == shown
    assert _read_columns(table, columns.views.get(table.topic, {})) == shown
    return shown


def _read_columns(table: Table, view: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Rows of the warehouse's columns as documents again."""
    schema = codec(table).schema
    columns = zip(*view.values(), strict=True) if view else [()] * len(schema)
    batch = pa.record_batch(
        [pa.array(values, type_) for values, type_ in zip(columns, schema.types, strict=True)],
        schema,
    )
    texts = codec(table).documents(batch).to_pylist()
    return {key: twin.loads(text) for key, text in zip(view, texts, strict=True)}
