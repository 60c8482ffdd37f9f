"""The lane against the twin: random logs, cut anywhere, lead to the view that one record after the
other makes.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.codec import forms
from cdc.codec.decode_options import DecodeOptions
from cdc.model.outcome import Advance
from cdc.model.position import Position
from cdc.model.table import Column, Table
from cdc.sink.lane import (
    REPORTED_ROWS,
    TAINTED,
    UNKNOWN,
    ChunkLimits,
    Lane,
    PartitionOutcome,
    PassedWriter,
)
from cdc.sink.lane_task import run_task
from cdc.sink.rejection import DECODE, REFUSED, Rejected, Skip, Source, Stop
from tests.support import twin
from tests.support.budget import budget
from tests.support.envelopes import PLACEHOLDER, Topic, encoded
from tests.support.envelopes import table as items
from tests.support.lanes import Remembered, Writer, run
from tests.support.scribe import Scribe
from tests.support.twin import Raw, Twin

ITEMS = items("t.public.items")
FORMS: dict[str, forms.Form] = {"documents": forms.Documents(), "events": forms.Values()}


def raws(topic: Topic) -> list[Raw]:
    records = [
        Raw(encoded(r.key), encoded(r.value), topic.table.topic, r.partition, r.offset)
        for r in topic.records
    ]
    return sorted(records, key=lambda record: (record.partition, record.offset))


def lane_of(topic: Topic, writer: Writer, **options: Any) -> Lane:
    advance = Advance(topic.table, None, Position("id", topic.ends))
    return Lane(
        (advance,), DecodeOptions(PLACEHOLDER), writer, options.pop("rejection", Skip()), **options
    )


def make_table(topic: str, names: Sequence[str]) -> Table:
    types = (
        "text",
        "bigint",
        "text",
        "integer",
        "boolean",
        "numeric(10,2)",
        "text[]",
        "integer[]",
        "jsonb",
    )
    columns = tuple(Column(name, type_) for name, type_ in zip(names, types, strict=True))
    return Table("public", topic.rsplit(".", 1)[1], columns, tuple(names[:2]), topic)


@given(seed=st.integers(0, 2**32), garbage=st.sampled_from([0.0, 0.3]), rows=st.integers(1, 60))
@budget(30)
def test_however_a_log_is_cut_the_view_is_what_its_records_make(
    seed: int, garbage: float, rows: int
) -> None:
    names = list("abcdefghi")
    tables = [make_table("t.public.first", names), make_table("t.public.second", names[::-1])]
    numbers = (0, 1, -1, 2**53 + 1, 2**63 - 1)
    pools = [
        [{t.key[0]: text, t.key[1]: n} for text in ("x", "", "ü") for n in numbers] for t in tables
    ]
    scribes = [Scribe(t, seed + n, ["x", "", "ü"], pools[n]) for n, t in enumerate(tables)]
    records = [record for scribe in scribes for record in scribe.log(300, garbage=garbage)]
    reading = DecodeOptions(PLACEHOLDER, {tables[0].topic: 150})
    expected = {}
    for table in tables:
        reader = Twin([table], "documents", PLACEHOLDER, reading.floors)
        changes = [reader.decode(record) for record in records if record.topic == table.topic]
        wrong = [change for change in changes if change.wrong]
        expected[table.topic] = (*twin.applied(changes, {}), wrong)
    rng, writer = random.Random(seed), Writer(limits=ChunkLimits(rows, 10**6))
    partitions = max(record.partition for record in records) + 1
    ends = [
        max((r.offset for r in records if r.partition == p), default=-1) + 1
        for p in range(partitions)
    ]
    cut = [rng.randint(0, end) for end in ends]
    reports: list[PartitionOutcome] = []
    for start, end in (((0,) * partitions, tuple(cut)), (tuple(cut), tuple(ends))):
        steps = tuple(Advance(t, Position("id", start), Position("id", end)) for t in tables)
        ordered = sorted(
            records, key=lambda record: (record.topic, record.partition, record.offset)
        )
        reports += run(Lane(steps, reading, writer, Skip(), entries(reports)), ordered)
    assert all(
        report.applied.read == report.applied.accounted and report.failure is None
        for report in reports
    )
    assert sum(report.applied.read for report in reports) == len(records)
    places = {
        (record.topic, record.partition, record.offset)
        for report in reports
        for record in report.rejected
    }
    for table in tables:
        view = {
            key: twin.loads(value.decode())
            for key, value in writer.views.get(table.topic, {}).items()
        }
        shown, lost, wrong = expected[table.topic]
        # Documents that pass through aren't parsed: what has values of other types is shown as it
        # is.
        passed = {
            change.id
            for change in wrong
            if (change.topic, change.partition, change.offset) not in places
        }
        # One that is in quarantine stays as it was, though pieces of it may have come since.
        rejected_rows = [
            rows for (topic, _), rows in entries(reports).items() if topic == table.topic
        ]
        rejected_ids = {key for rows in rejected_rows for key in rows.values() if key is not None}
        excluded = lost | passed | rejected_ids
        assert {key: row for key, row in view.items() if key not in excluded} == {
            key: row for key, row in shown.items() if key not in excluded
        }


def entries(reports: Sequence[PartitionOutcome]) -> dict[tuple[str, int], dict[int, str | None]]:
    """Return the entries of the quarantine after these reports."""
    rejected_ids: dict[tuple[str, int], dict[int, str | None]] = {}
    for report in reports:
        for record in report.rejected:
            rejected_ids.setdefault((report.topic, report.partition), {})[record.offset] = record.id
        rows = rejected_ids.get((report.topic, report.partition), {})
        for offset in [
            offset for offset, key in rows.items() if offset < report.cured.get(key or "", -1)
        ]:
            del rows[offset]
    return rejected_ids


def two_rows() -> Topic:
    topic = Topic(ITEMS, 1)
    topic.add("c", {"a": "k", "b": 1, "v": "first", "n": 1})
    topic.add("c", {"a": "other", "b": 1, "v": "x", "n": 1})
    return topic


def shown(writer: Writer) -> dict[str, Any]:
    return {key: json.loads(value) for key, value in writer.views.get(ITEMS.topic, {}).items()}


K = '["k",1]'


@pytest.mark.parametrize("rows", [1, 2, 1000])
def test_a_delete_takes_no_event_and_an_update_changes_none(rows: int) -> None:
    """Whether they come in a chunk with their inserts or later, and read a second time."""
    topic = Topic(replace(ITEMS, events=True), 1)
    first = {"a": "k", "b": 1, "v": "first", "n": 1}
    second = {"a": "o", "b": 1, "v": "x", "n": 1}
    topic.add("c", first)
    topic.add("d", first)
    topic.add("r", second)
    topic.add("u", {**second, "n": 2})
    topic.add("d", second)
    events = {K: first, '["o",1]': second}
    quarantine = Remembered()
    writer = Writer(limits=ChunkLimits(rows, 10**6))
    (report,) = run(lane_of(topic, writer, rejection=quarantine), raws(topic))
    assert shown(writer) == events
    assert [(record.offset, record.kind, record.reason) for record, _ in quarantine.records] == [
        (4, REFUSED, "it changes an event")
    ]
    assert report.applied.read == report.applied.accounted == 7
    assert (report.applied.written, report.applied.stale) == (2, 4)
    writer.stands = {0: 7}
    options = {"entries": entries([report]), "rejection": quarantine}
    (repeated,) = run(lane_of(topic, writer, **options), raws(topic))
    assert shown(writer) == events
    # A delete doesn't make up for the update that was refused.
    assert entries([report, repeated]) == {(ITEMS.topic, 0): {4: '["o",1]'}}
    # The planted bug: they are taken for rows that change.
    topic.table = ITEMS
    twin_writer = Writer(limits=ChunkLimits(rows, 10**6))
    run(lane_of(topic, twin_writer), raws(topic))
    assert shown(twin_writer) == {}


@pytest.mark.parametrize("rows", [1, 2, 1000])
def test_one_bad_record_costs_one_record(rows: int) -> None:
    """Its row waits for a change that carries all; a change that doesn't follows it."""
    topic, quarantine, writer = two_rows(), Remembered(), Writer(limits=ChunkLimits(rows, 10**6))
    topic.add("u", {"a": "k", "b": 1, "v": "lost", "n": 1})
    topic.add("u", {"a": "k", "b": 1, "n": 2}, lacking=["v"])
    records = raws(topic)
    records[2] = records[2]._replace(value=b"{")
    (report,) = run(lane_of(topic, writer, rejection=quarantine), records)
    assert [(record.offset, record.id, record.kind) for record, _ in quarantine.records] == [
        (2, K, DECODE),
        (3, K, REFUSED),
    ]
    assert (quarantine.records[0][1].value, quarantine.records[1][0].reason) == (b"{", TAINTED)
    assert (report.applied.read, report.applied.written, report.applied.quarantined) == (4, 2, 2)
    assert shown(writer)[K]["v"] == "first"
    topic.add("u", {"a": "k", "b": 1, "v": "whole", "n": 3})
    topic.add("u", {"a": "k", "b": 1, "n": 4}, lacking=["v"])
    advance = Advance(ITEMS, Position("id", (4,)), Position("id", topic.ends))
    lane = Lane(
        (advance,), DecodeOptions(PLACEHOLDER), writer, quarantine, {(ITEMS.topic, 0): {2: K, 3: K}}
    )
    (report,) = run(lane, raws(topic))
    assert report.applied.quarantined == 0
    assert report.cured[K] > 4
    assert shown(writer)[K] == {"a": "k", "b": 1, "v": "whole", "n": 4}


def test_what_is_rejected_is_safe_before_the_position_passes_it() -> None:
    topic, writer = two_rows(), Writer(limits=ChunkLimits(1, 10**6))

    class Watching(Skip):
        def put(self, records: Sequence[tuple[Rejected, Source]]) -> None:
            assert all(
                writer.reached.get((ITEMS.topic, 0), 0) <= record.offset for record, _ in records
            )

    topic.add("u", {"a": "k", "b": 1, "v": "lost", "n": 1})
    topic.add("c", {"a": "last", "b": 1, "v": "x", "n": 1})
    records = raws(topic)
    records[2] = records[2]._replace(value=b"{")
    run(lane_of(topic, writer, rejection=Watching()), records)
    assert writer.reached == {(ITEMS.topic, 0): 4}


def test_a_value_is_filled_from_the_view_or_refused() -> None:
    topic, quarantine, writer = Topic(ITEMS, 1), Remembered(), Writer()
    writer.views[ITEMS.topic] = {K: b'{"a":"k","b":1,"v":"held","n":1}'}
    writer.versions = {'["newer",1]': 99}
    for key in ("k", "nobody", "newer"):
        topic.add("u", {"a": key, "b": 1, "n": 2}, lacking=["v"])
    (report,) = run(lane_of(topic, writer, rejection=quarantine), raws(topic))
    assert shown(writer) == {K: {"a": "k", "b": 1, "v": "held", "n": 2}}
    assert [(record.id, record.reason) for record, _ in quarantine.records] == [
        ('["nobody",1]', UNKNOWN)
    ]
    assert (report.applied.written, report.applied.stale, report.applied.quarantined) == (1, 1, 1)


DATED = Table(
    "public",
    "dated",
    (Column("id", "bigint"), *map(Column, ("n", "at", "v"), ("integer", "date", "text"))),
    ("id",),
    "t.public.dated",
)
"""A document of it has every column, since a date always has another form."""


@pytest.mark.parametrize("rows", [1, 1000])
@pytest.mark.parametrize("name", FORMS)
def test_a_null_is_no_value_that_an_update_has_left_alone(name: str, rows: int) -> None:
    """A whole record from before the column had its name lacks it. The update is refused, wherever
    the chunk is cut, and the row stays as it was.
    """
    topic, quarantine = Topic(DATED, 1), Remembered()
    writer = Writer(form=FORMS[name], limits=ChunkLimits(rows, 10**6))
    topic.add("c", {"id": 1, "n": 1, "at": 15707, "former": "long"})
    topic.add("u", {"id": 1, "n": 2, "at": 15707}, lacking=["v"])
    (report,) = run(lane_of(topic, writer, rejection=quarantine), raws(topic))
    assert [(record.offset, record.reason) for record, _ in quarantine.records] == [(1, UNKNOWN)]
    assert (report.applied.written, report.applied.accounted) == (1, 2)
    (held,) = writer.views[DATED.topic].values()
    row = json.loads(held) if name == "documents" else dict(zip(("id", "n"), held, strict=False))
    assert (row["id"], row["n"]) == (1, 1)


@pytest.mark.parametrize(
    ("name", "held"),
    [("documents", b'{"id":1,"n":1,"at":null,"v":null}'), ("events", (1, 1, None, None))],
)
def test_a_null_in_the_view_is_none_either(name: str, held: Any) -> None:
    topic, quarantine, writer = Topic(DATED, 1), Remembered(), Writer(form=FORMS[name])
    writer.views[DATED.topic] = {"1": held}
    topic.add("u", {"id": 1, "n": 2, "at": None}, lacking=["v"])
    run(lane_of(topic, writer, rejection=quarantine), raws(topic))
    assert [record.reason for record, _ in quarantine.records] == [UNKNOWN]
    assert writer.views[DATED.topic] == {"1": held}


def test_what_the_destination_refuses_is_put_aside_with_all_that_it_was_made_from() -> None:
    topic, quarantine, writer = two_rows(), Remembered(), Writer(refuses=frozenset({K}))
    topic.add("u", {"a": "k", "b": 1, "n": 2}, lacking=["v"])
    (report,) = run(lane_of(topic, writer, rejection=quarantine), raws(topic))
    assert [(record.offset, record.reason) for record, _ in quarantine.records] == [
        (0, "too large"),
        (2, "too large"),
    ]
    assert (report.applied.read, report.applied.written, report.applied.quarantined) == (3, 1, 2)
    assert report.applied.accounted == report.applied.read


def test_a_batch_that_is_to_stop_writes_nothing_more() -> None:
    topic, writer = two_rows(), Writer(limits=ChunkLimits(1, 10**6))
    records = raws(topic)
    records[1] = records[1]._replace(value=b"{")
    (report,) = run(lane_of(topic, writer, rejection=Stop()), records)
    assert (writer.reached, list(shown(writer))) == ({(ITEMS.topic, 0): 1}, [K])
    assert [record.offset for record in report.rejected] == [1]


def test_a_failure_is_reported_and_ends_the_task() -> None:
    topic = two_rows()
    (report,) = run(lane_of(topic, Writer(fails=True)), raws(topic))
    assert (report.failure, report.message) == ("unavailable", "away")


@pytest.mark.parametrize("failing", [0, 1])
def test_a_lane_that_fails_leaves_the_others_of_its_task_alone(failing: int) -> None:
    topic = two_rows()
    writers = [Writer(limits=ChunkLimits(1, 10**6), fails=place == failing) for place in (0, 1)]
    records = [(record.key, record.value, record.offset) for record in raws(topic)]
    blocks = [(ITEMS.topic, 0, records[:1]), (ITEMS.topic, 0, records[1:])]
    reports = run_task([lane_of(topic, writer) for writer in writers], blocks)
    assert [(report.failure, report.message) for report in reports[failing]] == [
        ("unavailable", "away")
    ]
    assert [report.failure for report in reports[1 - failing]] == [None]
    alone = Writer()
    run(lane_of(topic, alone), raws(topic))
    assert shown(writers[1 - failing]) == shown(alone)


def test_what_an_earlier_try_has_rejected_and_passed_taints_its_row() -> None:
    """Nothing is completed across it, though it doesn't come again; what lies ahead comes, and is
    rejected then.
    """
    topic, quarantine, writer = two_rows(), Remembered(), Writer(stands={0: 2})
    writer.views[ITEMS.topic] = {K: b'{"a":"k","b":1,"v":"older than what was rejected","n":1}'}
    topic.add("u", {"a": "k", "b": 1, "n": 2}, lacking=["v"])
    run(
        lane_of(topic, writer, rejection=quarantine, entries={(ITEMS.topic, 0): {1: K}}),
        raws(topic),
    )
    assert [(record.offset, record.reason) for record, _ in quarantine.records] == [(2, TAINTED)]
    retry = Writer(stands={0: 2}, views=writer.views)
    run(lane_of(topic, retry, entries={(ITEMS.topic, 0): {2: K}}), raws(topic))
    assert shown(retry)[K]["n"] == 2


def test_what_an_earlier_try_has_applied_cures_what_lies_before_it() -> None:
    """A change that carried all was passed by that try, which could tell nobody; one that it
    rejected cures none.
    """
    topic, quarantine, writer = two_rows(), Remembered(), Writer(stands={0: 4})
    topic.add("u", {"a": "k", "b": 1, "v": "whole", "n": 2})
    topic.add("u", {"a": "k", "b": 1, "v": "refused", "n": 3})
    topic.add("u", {"a": "k", "b": 1, "n": 4}, lacking=["v"])
    writer.views[ITEMS.topic] = {K: b'{"a":"k","b":1,"v":"whole","n":2}'}
    rows = dict(writer.views[ITEMS.topic])
    (report,) = run(
        lane_of(topic, writer, rejection=quarantine, entries={(ITEMS.topic, 0): {0: K}}),
        raws(topic),
    )
    assert (quarantine.records, report.applied.stale, shown(writer)[K]["n"]) == ([], 4, 4)
    assert report.cured == {K: 5}
    retry = Writer(stands={0: 4}, views={ITEMS.topic: rows})
    (report,) = run(
        lane_of(topic, retry, rejection=quarantine, entries={(ITEMS.topic, 0): {0: K, 3: K}}),
        raws(topic),
    )
    assert [record.offset for record, _ in quarantine.records] == [4]
    assert report.cured == {K: 3}


def test_a_record_that_was_given_up_and_passed_cures_nothing() -> None:
    """It can't be read, and has no entry any more."""
    topic, quarantine, writer = two_rows(), Remembered(), Writer(stands={0: 3})
    topic.add("u", {"a": "k", "b": 1, "v": "given up", "n": 2})
    topic.add("u", {"a": "k", "b": 1, "n": 3}, lacking=["v"])
    records = raws(topic)
    records[2] = records[2]._replace(value=b"{")
    (report,) = run(
        lane_of(topic, writer, rejection=quarantine, entries={(ITEMS.topic, 0): {0: K}}), records
    )
    assert [(record.offset, record.reason) for record, _ in quarantine.records] == [(3, TAINTED)]
    assert (report.cured, report.applied.stale) == ({}, 3)


def test_records_that_a_view_has_are_asked_for_cures_alone() -> None:
    """None is rejected, though it ends a batch: one that can't be read was given up."""
    topic = two_rows()
    topic.add("u", {"a": "k", "b": 1, "v": "whole", "n": 2})
    topic.add("u", {"a": "other", "b": 1, "n": 3}, lacking=["v"])
    topic.add("u", {"a": "k", "b": 1, "v": "given up", "n": 4})
    records = raws(topic)
    records[4] = records[4]._replace(value=b"{")
    known = {(ITEMS.topic, 0): {0: K, 1: '["other",1]'}}
    advance = Advance(ITEMS, Position("id", (1,)), Position("id", topic.ends))
    lane = Lane((advance,), DecodeOptions(PLACEHOLDER), PassedWriter(), Stop(), known)
    (report,) = run(lane, records[1:])
    assert (report.cured, report.rejected) == ({K: 3}, [])
    assert (report.applied.read, report.applied.stale) == (4, 4)


def test_what_is_applied_in_the_end_leaves_no_entry() -> None:
    """A try that was ended has rejected a change which the next one, with another chunk, makes
    whole.
    """
    topic, writer = Topic(ITEMS, 1), Writer()
    topic.add("u", {"a": "k", "b": 1, "n": 1}, lacking=["v"])
    topic.add("u", {"a": "k", "b": 1, "v": "x", "n": 2})
    (report,) = run(lane_of(topic, writer, entries={(ITEMS.topic, 0): {0: K, 1: K}}), raws(topic))
    assert (report.applied.quarantined, report.cured) == (0, {K: 2})


def test_a_repair_names_all_that_it_rejects() -> None:
    """What isn't named would be taken for mended, and its entry closed."""
    topic, quarantine = Topic(ITEMS, 1), Remembered()
    for number in range(REPORTED_ROWS + 5):
        topic.add("c", {"a": f"k{number}", "b": 1, "v": "x", "n": 1})
    records = [record._replace(value=b"{") for record in raws(topic)]
    end = Position("id", topic.ends)
    (report,) = run(
        Lane((Advance(ITEMS, end, end),), DecodeOptions(PLACEHOLDER), Writer(), quarantine), records
    )
    assert len(report.rejected) == report.applied.quarantined == len(records)
    (report,) = run(lane_of(topic, Writer(), rejection=quarantine), records)
    assert (len(report.rejected), report.applied.quarantined) == (REPORTED_ROWS, len(records))


def test_memory_is_bounded_where_no_record_can_be_read() -> None:
    topic, sizes = Topic(ITEMS, 1), list[int]()

    class Counting(Skip):
        def put(self, records: Sequence[tuple[Rejected, Source]]) -> None:
            sizes.append(len(records))

    for number in range(500):
        topic.add("c", {"a": f"k{number}", "b": 1, "v": "x" * 1000, "n": 1})
    records = [record._replace(value=b"{" + (record.value or b"")) for record in raws(topic)]
    run(lane_of(topic, Writer(limits=ChunkLimits(100, 20_000)), rejection=Counting()), records)
    assert sum(sizes) == 500
    assert max(sizes) < 20


def test_what_an_earlier_try_has_written_is_not_written_again() -> None:
    topic, writer = two_rows(), Writer(stands={0: 1})
    (report,) = run(lane_of(topic, writer), raws(topic))
    assert (report.applied.read, report.applied.stale, report.applied.written, writer.writes) == (
        2,
        1,
        1,
        [1],
    )


def test_memory_is_bounded_by_a_chunk() -> None:
    """A million changes of one row, or of as many, are never in memory at once."""
    topic = Topic(ITEMS, 1)
    for number in range(500):
        topic.add("u", {"a": "k", "b": 1, "v": "x" * 1000, "n": number})
        topic.add("c", {"a": f"k{number}", "b": 1, "v": "x" * 1000, "n": number})
    writer = Writer(limits=ChunkLimits(10_000, 50_000))
    (report,) = run(lane_of(topic, writer), raws(topic))
    assert max(writer.writes) * 1000 < 50_000
    assert report.applied.read == report.applied.accounted == 1000
    few = Writer(limits=ChunkLimits(10, 10**9))
    run(lane_of(topic, few), raws(topic))
    assert max(few.writes) == 10


def test_rows_that_are_filled_are_counted_as_large_as_the_largest_so_far() -> None:
    topic, writer = Topic(ITEMS, 1), Writer(limits=ChunkLimits(10_000, 1_000_000))
    large = json.dumps({"a": "k", "b": 1, "v": "x" * 900_000, "n": 1}).encode()
    writer.views[ITEMS.topic] = {f'["k{number}",1]': large for number in range(30)}
    for number in range(30):
        topic.add("u", {"a": f"k{number}", "b": 1, "n": 2}, lacking=["v"])
    run(lane_of(topic, writer), raws(topic))
    assert writer.writes[0] == 10
    assert set(writer.writes[1:]) <= {0, 1, 2}


def test_a_task_whose_records_just_end_passes_none_that_has_not_come() -> None:
    """As where Spark calls it off, because another one has failed."""
    topic, writer = two_rows(), Writer()
    topic.add("c", {"a": "late", "b": 1, "v": "x", "n": 1})
    run(lane_of(topic, writer), raws(topic)[:2])
    assert writer.reached == {(ITEMS.topic, 0): 2}


def test_only_some_rows_are_looked_at() -> None:
    topic, writer = two_rows(), Writer()
    (report,) = run(lane_of(topic, writer, only={ITEMS.topic: frozenset({K})}), raws(topic))
    assert (report.applied.read, list(shown(writer))) == (1, [K])


@pytest.mark.parametrize("archives", [False, True])
def test_records_before_a_server_or_a_truncate_are_stale(archives: bool) -> None:
    """Who archives is shown those that are changes of the table."""
    topic, writer = two_rows(), Writer(archives=archives)
    topic.add("c", {"a": "new", "b": 1, "v": "x", "n": 1}, lsn=9)
    advance = Advance(ITEMS, None, Position("id", topic.ends))
    reading = DecodeOptions(PLACEHOLDER, {ITEMS.topic: 5}, {ITEMS.topic: (1,)})
    records = raws(topic)
    records[0] = records[0]._replace(key=b"of another table")
    (report,) = run(Lane((advance,), reading, writer, Stop()), records)
    assert (report.applied.read, report.applied.stale, report.applied.written, report.rejected) == (
        3,
        2,
        1,
        [],
    )
    assert writer.offsets == ([1, 2] if archives else [2])
