"""The lane against the twin: logs, cut anywhere, lead to the view that single records make."""

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
from cdc.codec.record import RecordDecoder
from cdc.errors import KafkaUnavailable
from cdc.model.outcome import Advance
from cdc.model.position import Position
from cdc.model.table import Column, Projection, Table
from cdc.postgres import table_survey
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
from cdc.sink.rejection import DECODE, REFUSED, UNHOLDABLE, Rejected, Skip, Source, Stop
from tests.support import twin
from tests.support.budget import budget
from tests.support.envelopes import PLACEHOLDER, Topic, encoded
from tests.support.envelopes import table as items
from tests.support.lanes import Remembered, Writer, run
from tests.support.pipelines import NO_SOURCE, pipeline
from tests.support.scribe import TYPES, Scribe
from tests.support.twin import Raw, Twin

ITEMS = items("t.public.items")
FORMS: dict[str, forms.Form] = {"documents": forms.Documents(), "events": forms.Values()}


def raws(topic: Topic) -> list[Raw]:
    records = [
        Raw(encoded(r.key), encoded(r.value), topic.table.topic, r.partition, r.offset)
        for r in topic.records
    ]
    return sorted(records, key=lambda record: (record.partition, record.offset))


def lane_of(
    topic: Topic, writer: Writer, rejection: Any = None, *, start: int = 0, **options: Any
) -> Lane:
    begins = Position("id", (start,)) if start else None
    advance = Advance(topic.table, begins, Position("id", topic.ends))
    return Lane((advance,), DecodeOptions(PLACEHOLDER), writer, rejection or Skip(), **options)


def applied(
    topic: Topic, writer: Writer, rejection: Any = None, *, bad: int | None = None, **options: Any
) -> PartitionOutcome:
    """Run all records of a topic of one partition through a lane; `bad` is one that can't be read."""
    records = raws(topic)
    if bad is not None:
        records[bad] = records[bad]._replace(value=b"{")
    (report,) = run(lane_of(topic, writer, rejection, **options), records)
    return report


def counts(report: PartitionOutcome, *names: str) -> list[int]:
    return [getattr(report.applied, name) for name in names]


def make_table(topic: str, names: Sequence[str]) -> Table:
    columns = tuple(Column(name, type_) for name, type_ in zip(names, TYPES, strict=True))
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
        ordered = sorted(records, key=lambda r: (r.topic, r.partition, r.offset))
        reports += run(Lane(steps, reading, writer, Skip(), entries(reports)), ordered)
    assert all(report.applied.read == report.applied.accounted for report in reports)
    assert all(report.failure is None for report in reports)
    assert sum(report.applied.read for report in reports) == len(records)
    rejected = [record for report in reports for record in report.rejected]
    places = {(record.topic, record.partition, record.offset) for record in rejected}
    for table in tables:
        documents = writer.views.get(table.topic, {})
        view = {key: twin.loads(value.decode()) for key, value in documents.items()}
        shown, lost, wrong = expected[table.topic]
        # Documents that pass through aren't parsed: what has values of other types is shown as it
        # is.
        passed = {c.id for c in wrong if (c.topic, c.partition, c.offset) not in places}
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
        for offset, key in list(rows.items()):
            if offset < report.cured.get(key or "", -1):
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
    report = applied(topic, writer, quarantine)
    assert shown(writer) == events
    assert quarantine.reasons == [(4, "it changes an event")]
    assert [record.kind for record, _ in quarantine.records] == [REFUSED]
    assert counts(report, "read", "accounted", "written", "stale") == [7, 7, 2, 4]
    writer.stands = {0: 7}
    repeated = applied(topic, writer, quarantine, entries=entries([report]))
    assert shown(writer) == events
    # A delete doesn't make up for the update that was refused.
    assert entries([report, repeated]) == {(ITEMS.topic, 0): {4: '["o",1]'}}
    # The planted bug: they are taken for rows that change.
    topic.table = ITEMS
    twin_writer = Writer(limits=ChunkLimits(rows, 10**6))
    applied(topic, twin_writer)
    assert shown(twin_writer) == {}


@pytest.mark.parametrize("rows", [1, 2, 1000])
def test_one_bad_record_costs_one_record(rows: int) -> None:
    """Its row waits for a change that carries all; a change that doesn't follows it."""
    topic, quarantine, writer = two_rows(), Remembered(), Writer(limits=ChunkLimits(rows, 10**6))
    topic.add("u", {"a": "k", "b": 1, "v": "lost", "n": 1})
    topic.add("u", {"a": "k", "b": 1, "n": 2}, lacking=["v"])
    report = applied(topic, writer, quarantine, bad=2)
    rejected = [(record.offset, record.id, record.kind) for record, _ in quarantine.records]
    assert rejected == [(2, K, DECODE), (3, K, REFUSED)]
    assert (quarantine.records[0][1].value, quarantine.records[1][0].reason) == (b"{", TAINTED)
    assert counts(report, "read", "written", "quarantined") == [4, 2, 2]
    assert shown(writer)[K]["v"] == "first"
    topic.add("u", {"a": "k", "b": 1, "v": "whole", "n": 3})
    topic.add("u", {"a": "k", "b": 1, "n": 4}, lacking=["v"])
    known = {(ITEMS.topic, 0): {2: K, 3: K}}
    report = applied(topic, writer, quarantine, start=4, entries=known)
    assert report.applied.quarantined == 0
    assert report.cured[K] > 4
    assert shown(writer)[K] == {"a": "k", "b": 1, "v": "whole", "n": 4}


def test_what_is_rejected_is_safe_before_the_position_passes_it() -> None:
    topic, writer = two_rows(), Writer(limits=ChunkLimits(1, 10**6))

    class Watching(Skip):
        def put(self, records: Sequence[tuple[Rejected, Source]]) -> None:
            reached = writer.reached.get((ITEMS.topic, 0), 0)
            assert all(reached <= record.offset for record, _ in records)

    topic.add("u", {"a": "k", "b": 1, "v": "lost", "n": 1})
    topic.add("c", {"a": "last", "b": 1, "v": "x", "n": 1})
    applied(topic, writer, Watching(), bad=2)
    assert writer.reached == {(ITEMS.topic, 0): 4}


def test_a_value_is_filled_from_the_view_or_refused() -> None:
    topic, quarantine, writer = Topic(ITEMS, 1), Remembered(), Writer()
    writer.views[ITEMS.topic] = {K: b'{"a":"k","b":1,"v":"held","n":1}'}
    writer.versions = {'["newer",1]': 99}
    for key in ("newer", "newer", "k", "nobody"):
        topic.add("u", {"a": key, "b": 1, "n": 2}, lacking=["v"])
    report = applied(topic, writer, quarantine)
    assert shown(writer) == {K: {"a": "k", "b": 1, "v": "held", "n": 2}}
    assert quarantine.reasons == [(3, UNKNOWN)]
    assert counts(report, "written", "stale", "folded", "quarantined") == [1, 1, 1, 1]


def test_what_a_destination_holds_newer_is_stale() -> None:
    topic, writer = two_rows(), Writer(versions={K: 99})
    assert counts(applied(topic, writer), "read", "written", "stale") == [2, 1, 1]
    assert list(shown(writer)) == ['["other",1]']


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
    """A record from before the column had its name lacks it: the update is refused."""
    topic, quarantine = Topic(DATED, 1), Remembered()
    writer = Writer(form=FORMS[name], limits=ChunkLimits(rows, 10**6))
    topic.add("c", {"id": 1, "n": 1, "at": 15707, "former": "long"})
    topic.add("u", {"id": 1, "n": 2, "at": 15707}, lacking=["v"])
    report = applied(topic, writer, quarantine)
    assert quarantine.reasons == [(1, UNKNOWN)]
    assert counts(report, "written", "accounted") == [1, 2]
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
    applied(topic, writer, quarantine)
    assert quarantine.reasons == [(0, UNKNOWN)]
    assert writer.views[DATED.topic] == {"1": held}


def test_what_the_destination_refuses_is_put_aside_with_all_that_it_was_made_from() -> None:
    topic, quarantine, writer = two_rows(), Remembered(), Writer(refuses=frozenset({K}))
    topic.add("u", {"a": "k", "b": 1, "n": 2}, lacking=["v"])
    report = applied(topic, writer, quarantine)
    assert quarantine.reasons == [(0, "too large"), (2, "too large")]
    assert counts(report, "read", "accounted", "written", "quarantined") == [3, 3, 1, 2]


def test_a_value_that_a_warehouse_cannot_hold_is_no_damaged_record() -> None:
    columns = (Column("id", "bigint"), Column("n", "numeric(3,1)"))
    topic = Topic(Table("public", "amounts", columns, ("id",), "t.public.amounts"), 1)
    quarantine = Remembered()
    topic.add("c", {"id": 1, "n": "1000"})
    topic.add("c", {"id": 2, "n": "1"})
    applied(topic, Writer(form=forms.Values()), quarantine, bad=1)
    assert [record.kind for record, _ in quarantine.records] == [UNHOLDABLE, DECODE]


def test_a_batch_that_is_to_stop_writes_nothing_more() -> None:
    topic, writer = two_rows(), Writer(limits=ChunkLimits(1, 10**6))
    report = applied(topic, writer, Stop(), bad=1)
    assert (writer.reached, list(shown(writer))) == ({(ITEMS.topic, 0): 1}, [K])
    assert [record.offset for record in report.rejected] == [1]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_lane_that_fails_leaves_the_others_of_its_task_alone(failing: int) -> None:
    topic = two_rows()
    writers = [Writer(limits=ChunkLimits(1, 10**6), fails=place == failing) for place in (0, 1)]
    records = [(record.key, record.value, record.offset) for record in raws(topic)]
    blocks = [(ITEMS.topic, 0, records[:1]), (ITEMS.topic, 0, records[1:])]
    reports = run_task([lane_of(topic, writer) for writer in writers], blocks)
    (failed,) = reports[failing]
    assert (failed.failure, failed.message) == ("unavailable", "away")
    assert [report.failure for report in reports[1 - failing]] == [None]
    alone = Writer()
    applied(topic, alone)
    assert shown(writers[1 - failing]) == shown(alone)


def test_a_failure_of_the_last_chunk_is_reported() -> None:
    report = applied(two_rows(), Writer(fails=True))
    assert (report.failure, report.message) == ("unavailable", "away")


def test_a_quarantine_that_is_away_ends_the_task_before_its_chunk() -> None:
    class Away(Skip):
        def put(self, records: Sequence[tuple[Rejected, Source]]) -> None:
            raise KafkaUnavailable("the quarantine is away", hint="h")

    writer = Writer()
    report = applied(two_rows(), writer, Away(), bad=1)
    assert (report.failure, report.message) == (KafkaUnavailable.kind, "the quarantine is away")
    assert writer.reached == {}


SWAPPED = {"a": "key", "v": "n", "n": "v"}


def of_cache(entry: dict[str, Any]) -> Table:
    """The table of items as a cache has it, by this entry of its list."""
    listed = [{"table": ITEMS.qualified, **entry}]
    cache = {"type": "redis", "url": "redis://127.0.0.1:1", "prefix": "shop", "tables": listed}
    shop = pipeline("shop", NO_SOURCE, ITEMS.qualified, sinks={"cache": cache})
    table = table_survey.for_sinks(ITEMS, shop)
    assert table.misnamed == {}
    return table.for_sink("cache")


@pytest.mark.parametrize("rows", [1, 2, 1000])
@pytest.mark.parametrize("name", FORMS)
def test_a_view_has_the_names_and_the_rows_that_its_sink_lists(
    name: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the log is cut. A value that a change doesn't carry is found under its other name."""
    topic = Topic(ITEMS, 1)
    topic.add("c", {"a": "k", "b": 1, "v": "first", "n": 1})
    topic.add("u", {"a": "k", "b": 1, "n": 2}, lacking=["v"])
    topic.add("c", {"a": "gone", "b": 1, "v": "x", "n": 1})
    topic.add("u", {"a": "gone", "b": 1, "n": 0}, lacking=["v"])
    topic.add("c", {"a": "null", "b": 1, "v": "x", "n": None})
    topic.add("c", {"a": "back", "b": 1, "v": "x", "n": 0})
    topic.add("u", {"a": "back", "b": 1, "n": 1}, lacking=["v"])
    topic.add("u", {"a": "back", "b": 1, "v": "y", "n": 1})
    topic.add("u", {"a": "gone", "b": 1, "n": 1}, lacking=["v"])
    topic.table = of_cache({"rename": SWAPPED, "where": "n > 0"})
    values = {K: ("k", 1, "first", 2), '["back",1]': ("back", 1, "y", 1)}

    def view() -> tuple[dict[str, Any], Remembered, PartitionOutcome]:
        writer = Writer(form=FORMS[name], limits=ChunkLimits(rows, 10**6))
        quarantine = Remembered()
        report = applied(topic, writer, quarantine)
        held = writer.views.get(ITEMS.topic, {})
        if name == "documents":
            names = ("key", "b", "n", "v")
            held = {key: tuple(map(json.loads(text).get, names)) for key, text in held.items()}
        return held, quarantine, report

    held, quarantine, report = view()
    assert held == values
    # The view had nothing that could have filled them; only the first was made up for.
    assert quarantine.reasons == [(6, UNKNOWN), (8, UNKNOWN)]
    assert entries([report]) == {(ITEMS.topic, 0): {8: '["gone",1]'}}
    assert counts(report, "read", "accounted", "quarantined") == [9, 9, 2]
    # The planted bug: only rows that are new are looked at.
    with monkeypatch.context() as planted:
        planted.setattr(RecordDecoder, "select", lambda self, topic, change: change)
        assert view()[0] != values


@pytest.mark.parametrize(("exclude", "rows"), [((), 1), (("v",), 1), (("v",), 1000)])
def test_a_condition_may_read_what_the_view_does_not_have(
    exclude: tuple[str, ...], rows: int
) -> None:
    """If a change doesn't carry it, what becomes of the row is unknown, and is refused."""
    topic = Topic(ITEMS, 1)
    for name, text in (("k", "open"), ("other", "draft")):
        topic.add("c", {"a": name, "b": 1, "v": text, "n": 1})
    topic.add("u", {"a": "k", "b": 1, "n": 2}, lacking=["v"])
    topic.add("u", {"a": "other", "b": 1, "v": "open", "n": 2})
    topic.table = of_cache({"exclude": exclude, "where": "v = 'open'"})
    writer, quarantine = Writer(limits=ChunkLimits(rows, 10**6)), Remembered()
    applied(topic, writer, quarantine)
    assert quarantine.reasons == [
        (2, "the log doesn't carry a value that the sink's `where` needs")
    ]
    assert [record.kind for record, _ in quarantine.records] == [REFUSED]
    whole = {K: ("k", 1, "open", 1), '["other",1]': ("other", 1, "open", 2)}
    assert shown(writer) == {
        key: {n: v for n, v in zip("abvn", row, strict=True) if n not in exclude}
        for key, row in whole.items()
    }


def test_lanes_that_share_their_records_have_each_its_tables_and_columns() -> None:
    """One sink has all of a table, another one some columns, a third one not the table at all."""
    topic = two_rows()
    few = replace(
        topic.table, projections={"cache": Projection(exclude=("v",))}, unlisted_by=("paper",)
    )
    other = Topic(replace(topic.table, name="other", topic="shop.public.other"), partitions=1)
    other.add("c", {"a": "x", "b": 1, "v": "v", "n": 1})
    writers = {sink: Writer() for sink in ("search", "cache", "paper")}
    lanes = [
        Lane(
            tuple(
                Advance(table.for_sink(sink), None, Position("id", ends))
                for table, ends in ((few, topic.ends), (other.table, other.ends))
                if table.is_in(sink)
            ),
            DecodeOptions(PLACEHOLDER),
            writer,
            Skip(),
        )
        for sink, writer in writers.items()
    ]
    blocks = [
        (log.table.topic, 0, [(record.key, record.value, record.offset) for record in raws(log)])
        for log in (topic, other)
    ]
    reports = run_task(lanes, blocks)
    # What a writer says of a topic is with that topic.
    assert all(report.writer_results == ["done"] for lane in reports for report in lane)
    whole = topic.model()
    assert shown(writers["search"]) == whole
    assert shown(writers["cache"]) == {
        key: {name: value for name, value in row.items() if name != "v"}
        for key, row in whole.items()
    }
    assert writers["paper"].views.keys() == {other.table.topic}


def test_what_an_earlier_try_has_rejected_and_passed_taints_its_row() -> None:
    """Nothing is completed across it, though it doesn't come again. What lies ahead does."""
    topic, quarantine, writer = two_rows(), Remembered(), Writer(stands={0: 2})
    writer.views[ITEMS.topic] = {K: b'{"a":"k","b":1,"v":"older than what was rejected","n":1}'}
    topic.add("u", {"a": "k", "b": 1, "n": 2}, lacking=["v"])
    applied(topic, writer, quarantine, entries={(ITEMS.topic, 0): {1: K}})
    assert quarantine.reasons == [(2, TAINTED)]
    retry = Writer(stands={0: 2}, views=writer.views)
    applied(topic, retry, entries={(ITEMS.topic, 0): {2: K}})
    assert shown(retry)[K]["n"] == 2


def test_what_an_earlier_try_has_applied_cures_what_lies_before_it() -> None:
    """A change that carried all does; one that was rejected doesn't."""
    topic, quarantine, writer = two_rows(), Remembered(), Writer(stands={0: 4})
    topic.add("u", {"a": "k", "b": 1, "v": "whole", "n": 2})
    topic.add("u", {"a": "k", "b": 1, "v": "refused", "n": 3})
    topic.add("u", {"a": "k", "b": 1, "n": 4}, lacking=["v"])
    writer.views[ITEMS.topic] = {K: b'{"a":"k","b":1,"v":"whole","n":2}'}
    rows = dict(writer.views[ITEMS.topic])
    report = applied(topic, writer, quarantine, entries={(ITEMS.topic, 0): {0: K}})
    assert (quarantine.records, report.applied.stale, shown(writer)[K]["n"]) == ([], 4, 4)
    assert report.cured == {K: 5}
    retry = Writer(stands={0: 4}, views={ITEMS.topic: rows})
    report = applied(topic, retry, quarantine, entries={(ITEMS.topic, 0): {0: K, 3: K}})
    assert [record.offset for record, _ in quarantine.records] == [4]
    assert report.cured == {K: 3}


def test_an_event_that_has_come_again_cures_its_row() -> None:
    """A delete doesn't: a view of events keeps them."""
    topic, writer = Topic(replace(ITEMS, events=True), 1), Writer(stands={0: 3})
    row = {"a": "k", "b": 1, "v": "x", "n": 1}
    for op in ("c", "c", "d"):
        topic.add(op, row)
    report = applied(topic, writer, entries={(ITEMS.topic, 0): {0: K}})
    assert report.cured == {K: 2}


def test_a_record_that_was_given_up_and_passed_cures_nothing() -> None:
    """It can't be read, and has no entry any more."""
    topic, quarantine, writer = two_rows(), Remembered(), Writer(stands={0: 3})
    topic.add("u", {"a": "k", "b": 1, "v": "given up", "n": 2})
    topic.add("u", {"a": "k", "b": 1, "n": 3}, lacking=["v"])
    report = applied(topic, writer, quarantine, bad=2, entries={(ITEMS.topic, 0): {0: K}})
    assert quarantine.reasons == [(3, TAINTED)]
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
    passed: Any = PassedWriter()
    (report,) = run(lane_of(topic, passed, Stop(), start=1, entries=known), records[1:])
    assert (report.cured, report.rejected) == ({K: 3}, [])
    assert counts(report, "read", "stale") == [4, 4]


def test_what_is_applied_in_the_end_leaves_no_entry() -> None:
    """A try that was ended has rejected a change that the next one makes whole."""
    topic, writer = Topic(ITEMS, 1), Writer()
    topic.add("u", {"a": "k", "b": 1, "n": 1}, lacking=["v"])
    topic.add("u", {"a": "k", "b": 1, "v": "x", "n": 2})
    report = applied(topic, writer, entries={(ITEMS.topic, 0): {0: K, 1: K}})
    assert (report.applied.quarantined, report.cured) == (0, {K: 2})


def many_rows(count: int, text: str = "x") -> Topic:
    topic = Topic(ITEMS, 1)
    for number in range(count):
        topic.add("c", {"a": f"k{number}", "b": 1, "v": text, "n": 1})
    return topic


def test_a_repair_names_all_that_it_rejects() -> None:
    """What isn't named would be taken for mended, and its entry closed."""
    topic = many_rows(REPORTED_ROWS + 5)
    quarantine = Remembered()
    records = [record._replace(value=b"{") for record in raws(topic)]
    (report,) = run(lane_of(topic, Writer(), quarantine, start=len(records)), records)
    assert len(report.rejected) == report.applied.quarantined == len(records)
    (report,) = run(lane_of(topic, Writer(), quarantine), records)
    assert (len(report.rejected), report.applied.quarantined) == (REPORTED_ROWS, len(records))


def test_memory_is_bounded_where_no_record_can_be_read() -> None:
    sizes = list[int]()

    class Counting(Skip):
        def put(self, records: Sequence[tuple[Rejected, Source]]) -> None:
            sizes.append(len(records))

    topic = many_rows(500, "x" * 1000)
    records = [record._replace(value=b"{" + (record.value or b"")) for record in raws(topic)]
    run(lane_of(topic, Writer(limits=ChunkLimits(100, 20_000)), Counting()), records)
    assert sum(sizes) == 500
    assert max(sizes) < 20


def test_what_an_earlier_try_has_written_is_not_written_again() -> None:
    writer = Writer(stands={0: 1})
    report = applied(two_rows(), writer)
    assert counts(report, "read", "stale", "written") == [2, 1, 1]
    assert writer.writes == [1]


def test_memory_is_bounded_by_a_chunk() -> None:
    """A million changes of one row, or of as many, are never in memory at once."""
    topic = many_rows(500, "x" * 1000)
    for number in range(500):
        topic.add("u", {"a": "k", "b": 1, "v": "x" * 1000, "n": number})
    writer = Writer(limits=ChunkLimits(10_000, 50_000))
    report = applied(topic, writer)
    # A row and its record.
    assert max(writer.writes) * 2000 < 50_000
    assert report.applied.read == report.applied.accounted == 1000
    few = Writer(limits=ChunkLimits(10, 10**9))
    applied(topic, few)
    assert few.writes == [10] * 50 + [1]


def test_rows_that_are_filled_are_counted_as_large_as_the_largest_so_far() -> None:
    topic, writer = Topic(ITEMS, 1), Writer(limits=ChunkLimits(10_000, 1_000_000))
    large = json.dumps({"a": "k", "b": 1, "v": "x" * 900_000, "n": 1}).encode()
    writer.views[ITEMS.topic] = {f'["k{number}",1]': large for number in range(30)}
    for number in range(30):
        topic.add("u", {"a": f"k{number}", "b": 1, "n": 2}, lacking=["v"])
    applied(topic, writer)
    assert writer.writes[0] == 10
    assert set(writer.writes[1:]) <= {0, 1, 2}


def test_a_task_whose_records_just_end_passes_none_that_has_not_come() -> None:
    """As where Spark calls it off, because another one has failed."""
    topic, writer = two_rows(), Writer()
    topic.add("c", {"a": "late", "b": 1, "v": "x", "n": 1})
    run(lane_of(topic, writer), raws(topic)[:2])
    assert writer.reached == {(ITEMS.topic, 0): 2}


def test_only_some_rows_are_looked_at() -> None:
    writer = Writer()
    report = applied(two_rows(), writer, only={ITEMS.topic: frozenset({K})})
    assert (report.applied.read, list(shown(writer))) == (1, [K])


@pytest.mark.parametrize("archives", [False, True])
def test_records_before_a_server_or_a_truncate_are_stale(archives: bool) -> None:
    """Who archives is shown those that are changes of the table."""
    topic, writer = two_rows(), Writer(archives=archives)
    topic.add("c", {"a": "new", "b": 1, "v": "x", "n": 1}, lsn=9)
    reading = DecodeOptions(PLACEHOLDER, {ITEMS.topic: 5}, {ITEMS.topic: (1,)})
    records = raws(topic)
    records[0] = records[0]._replace(key=b"of another table")
    (report,) = run(replace(lane_of(topic, writer, Stop()), reading=reading), records)
    assert counts(report, "read", "stale", "written") == [3, 2, 1]
    assert report.rejected == []
    assert writer.offsets == ([1, 2] if archives else [2])
