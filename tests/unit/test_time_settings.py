"""Joins in time in the pipeline file: what is accepted, and how mistakes are named."""

from pathlib import Path
from typing import Any

import pytest

from cdc.cli.views import draw_view
from cdc.config import settings
from cdc.config.durations import microseconds
from cdc.config.mistakes import InvalidSetting
from cdc.documents.plan import TimeJoin, View, outline
from cdc.documents.resolve import resolve_views
from cdc.documents.tables import view_table
from cdc.errors import SettingsError
from cdc.model.table import Column, Table
from cdc.scalar.instants import FIRST, LAST, instant_of, order_of
from cdc.scalar.instants import microseconds as instant
from tests.unit.test_screens import shown

GOOD = """\
pipeline: air
kafka: localhost:9092
connect: http://localhost:8083
source: {dsn: postgresql://localhost/air, tables: [public.flights, public.weather]}
sinks:
  cache: {type: redis, url: "redis://localhost/0", prefix: air}
state: {type: redis, url: "redis://localhost/2", prefix: air}
views:
  departures:
    root: public.flights
    include:
      weather: {table: public.weather, on: {origin: origin}, as_of: {dep: at}, within: 2 hours}
      around:
        table: public.weather
        on: {origin: origin}
        during: {dep: at}
        before: 90 minutes
        many: true
      following: {table: public.flights, on: {tail: tail}, next: {dep: dep}}
    to: [cache]
"""
HOUR = 3_600_000_000
STAMP = "timestamp with time zone"


def table(name: str, /, **types: str) -> Table:
    columns = tuple(Column(column, type_) for column, type_ in types.items())
    return Table("public", name, columns, ("id",), f"air.public.{name}")


TABLES = (
    table("flights", id="integer", origin="text", tail="text", dep=STAMP, day="date"),
    table("weather", id="integer", origin="text", at=STAMP, local_at="timestamp without time zone"),
)


def resolved(folder: Path, text: str) -> View:
    path = folder / "air.yaml"
    path.write_text(text)
    [view] = resolve_views(settings.load(path, {}), TABLES)
    return view


def outlined(folder: Path, view: View) -> dict[str, Any]:
    return outline(view, settings.load(folder / "air.yaml", {}).views[view.name])


def test_joins_in_time_are_read(tmp_path: Path) -> None:
    view = resolved(tmp_path, GOOD)
    joins = [child.join.time for child in view.root.children if child.join]
    assert joins == [
        TimeJoin("as_of", "dep", "at", 2 * HOUR, 0),
        TimeJoin("during", "dep", "at", 90 * 60_000_000, 0),
        TimeJoin("next", "dep", "dep", 0, None),
    ]
    shown = outlined(tmp_path, view)["include"]
    assert shown["weather"]["as_of"] == {"dep": "at"}
    assert shown["weather"]["within"] == "2 hours"
    assert shown["around"]["before"] == "90 minutes"
    assert "within" not in shown["following"]


CLOCKED = GOOD.replace(
    "    to: [cache]\n",
    """\
    where: now() > dep + interval '12 hours'
    clock: dep
    having: following IS NULL AND now() > dep
    to: [cache]
""",
)
PATTERN = (
    GOOD[: GOOD.index("  departures:")]
    + """\
  late:
    from: public.flights
    pattern:
      by: [tail]
      order_by: dep
      steps:
        out: origin = 'x'
        back: {where: id > 3, times: 3}
      within: 24 hours
      unless: id = 1
    columns: [dep]
    to: [cache]
"""
)
MISTAKES: list[tuple[str, ...]] = [
    *((GOOD, old, new, f"{line}: views.departures", *words) for old, new, line, *words in [
        (
            "as_of: {dep: at}", "as_of: {dep: at}, previous: {dep: at}", 12,
            "as_of and previous can't both say which row", "keep one of as_of, previous, next, during",
        ),
        ("        many: true\n", "", 13, "during may find several rows", "add many: true"),
        ("within: 2 hours", "many: true", 12, "as_of finds one row", "use during"),
        ("as_of: {dep: at}, ", "", 12, "within is of as_of, previous or next", "as_of: {dep_time"),
        ("next: {dep: dep}", "next: {dep: dep}, after: 1 hour", 19, "after is of during", "during:"),
        ("as_of: {dep: at}", "as_of: {dep: at, day: at}", 12, "compares one time", "as_of: {dep_time"),
        ("as_of: {dep: at}", "as_of: {}", 12, "compares one time", ""),
        ("2 hours", "1 month", 12, "a month has no fixed length", "30 days"),
        ("2 hours", "2 ours", 12, "a duration is a whole number and a unit", "10 minutes"),
        ("2 hours", "9999999 days", 12, "a duration is at most 100,000 days", ""),
        (
            "as_of: {dep: at}", "as_of: {dep: local_at}", 12,
            "dep is timestamp with time zone and local_at is timestamp without time zone", "timestamptz",
        ),
        ("as_of: {dep: at}", "as_of: {day: at}", 12, "day is date, and a time is a time stamp", "timestamptz"),
        ("as_of: {dep: at}", "as_of: {dep: origin}", 12, "origin is text, and a time", ""),
        (
            "as_of: {dep: at}", "as_of: {\"dep + interval '1 hour'\": at}", 12, "as_of takes columns, not expressions",
            "GENERATED ALWAYS AS",
        ),
        ("as_of: {dep: at}", "as_of: {dep: att}", 12, "public.weather has no column att", "did you mean at?"),
        ("on: {origin: origin}, as_of", "on: {}, as_of", 12, "on: at least one", ""),
    ]),
    *((CLOCKED, old, new, "", *words) for old, new, *words in [
        ("clock: dep", "clock: depp", "public.flights has no column depp", "did you mean dep?"),
        ("clock: dep", "clock: day", "day is date, and a time is a time stamp", "or commit"),
        ("having: following", "having: before", "having names before, which the document doesn't show", "one of: id"),
        ("having: following IS NULL AND now() > dep", "having: id", "isn't a condition", "having: late > 3"),
    ]),
    *((PATTERN, old, new, f"{place}: ", *words) for old, new, place, *words in [
        ("from:", "root:", "10: views.late.root", "no such setting", "accepted here: alerts, clock, columns, from"),
        ("    from: public.flights\n", "", "9: views.late.from", "required, but missing", "from: public.flights"),
        ("from: public.flights", "from: flights", "10: views.late.from", "takes schema.table", ""),
        ("from: public.flights", "from: public.trains", "10: views.late.from", "isn't captured", "add public.trains"),
        ("columns: [dep]", "where: id > 1", "19: views.late.where", "each step of a pattern has a condition", "steps"),
        (
            "      within: 24 hours\n", "", "11: views.late.pattern.within",
            "required, but missing: the longest time between the first and the last row.",
            "for example: within: 24 hours",
        ),
        ("24 hours", "1 month", "17: views.late.pattern.within", "a month has no fixed length", "30 days"),
        ("by: [tail]", "by: []", "12: views.late.pattern.by", "at least one is needed", "[tailnum]"),
        ("by: [tail]", "by: [tale]", "12: views.late.pattern.by.0", "has no column tale", "did you mean tail?"),
        ("order_by: dep", "order_by: day", "13: views.late.pattern.order_by", "day is date, and a time", "timestamptz"),
        ("order_by: dep", "order_by: dip", "13: views.late.pattern.order_by", "no column dip", "did you mean dep?"),
        (
            "order_by: dep", "order_by: dep + interval '1 hour'", "13: views.late.pattern.order_by",
            "order_by takes columns, not expressions", "GENERATED ALWAYS AS",
        ),
        ("times: 3", "times: 0", "16: views.late.pattern.steps.back.times", "must be 1 or more", ""),
        ("times: 3", "times: 10", "14: views.late.pattern.steps", "10 rows at most, and these are 11", "fewer"),
        ("times: 3", "time: 3", "16: views.late.pattern.steps.back.time", "no such setting", "did you mean times?"),
        ("origin = 'x'", "origin", "15: views.late.pattern.steps.out", "isn't a condition", ""),
        ("origin = 'x'", "origins = 'x'", "15: views.late.pattern.steps.out", "no column origins", "origin"),
        ("origin = 'x'", "now() > dep", "15: views.late.pattern.steps.out", "now() here", ""),
        ("unless: id = 1", "unless: id", "18: views.late.pattern.unless", "isn't a condition", ""),
        ("        back:", "        dep:", "16: views.late.pattern.steps.dep", "late has another member dep", "another"),
        ("by: [tail]", "rows: some\n      by: [tail]", "12: views.late.pattern.rows", "must be 'next' or 'any'", ""),
        ("columns: [dep]", "having: out.dop > dep", "19: views.late.having", "names out.dop", "out.dep"),
    ]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "old_text", "new_text", "place", "message", "hint"),
    MISTAKES,
    ids=[message for *_, message, _ in MISTAKES],
)
def test_mistakes_are_named_with_their_place(
    tmp_path: Path, text: str, old_text: str, new_text: str, place: str, message: str, hint: str
) -> None:
    assert old_text in text
    with pytest.raises(SettingsError) as caught:
        resolved(tmp_path, text.replace(old_text, new_text, 1))
    assert f"air.yaml:{place}" in caught.value.message
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_durations() -> None:
    seconds = {
        "90 seconds": 90,
        "1 minute": 60,
        "10 minutes": 600,
        "2 days": 172_800,
        "1 week": 604_800,
    }
    assert {text: microseconds(text) / 1e6 for text in seconds} == seconds


@pytest.mark.parametrize("text", ["", "hour", "1.5 hours", "-1 hour", "1 hour 5 minutes", "1 year"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(InvalidSetting):
        microseconds(text)


@pytest.mark.parametrize(
    "text",
    [
        "0001-01-01T00:00:00.000000Z", "0099-12-31T23:59:59.999999Z", "1969-12-31T23:55:00.000000Z",
        "2013-01-01T10:17:00.000001", "9999-12-31T23:59:59.999999Z",
    ],
)  # fmt: skip
def test_an_instant_has_one_order(text: str) -> None:
    number = instant(text)
    assert number is not None
    order = order_of(number, has_zone=text.endswith("Z"))
    assert instant_of(order) == number


def test_instants_are_ordered_as_their_texts() -> None:
    instants = [FIRST, -1, 0, 1, LAST]
    orders = [order_of(number, has_zone=True) for number in instants]
    assert orders == sorted(orders)
    assert order_of(FIRST - 1, has_zone=True) == orders[0]
    assert order_of(LAST + 1, has_zone=True) == orders[-1]


@pytest.mark.parametrize(
    "text",
    [
        "infinity", "-infinity", "+10000-01-01T00:00:00.000000Z", "0000-01-01T00:00:00.000000Z",
        "-0044-03-15T00:00:00.000000Z",
    ],
)  # fmt: skip
def test_times_beyond_four_digits_are_no_instants(text: str) -> None:
    assert instant(text) is None


def test_a_clock_is_read(tmp_path: Path) -> None:
    view = resolved(tmp_path, CLOCKED)
    assert (view.clock, view.has_clock, view.sends_once) == ("dep", True, True)
    assert outlined(tmp_path, view)["clock"] == "dep"
    commits = resolved(tmp_path, CLOCKED.replace("clock: dep", "clock: commit"))
    assert (commits.clock, commits.has_clock) == (None, True)
    plain = resolved(tmp_path, GOOD.replace("to: [cache]", "to: [cache]\n    alerts: true"))
    assert (plain.has_clock, plain.sends_once) == (False, True)


def test_a_pattern_is_a_chain_of_rows_before_one_another(tmp_path: Path) -> None:
    view = resolved(tmp_path, PATTERN)
    assert (view.alerts, view.sends_once, view.has_clock) == (True, True, True)
    assert dict(view.root.steps) == {"out": [2], "back": [1, 0]}
    joins = [node.join.time for node in view.root.earlier if node.join]
    assert joins == [TimeJoin("previous", "dep", "dep", 24 * HOUR, 0)] * 3
    assert [node.meets and node.meets.columns for node in view.root.earlier] == [
        ("id",),
        ("id",),
        ("origin",),
    ]
    assert [node.where for node in view.root.earlier] == [None] * 3
    absent = view.root.absent
    assert absent is not None
    assert absent.join.time == TimeJoin("next", "dep", "dep", 0, 24 * HOUR)
    assert outlined(tmp_path, view)["pattern"] == {
        "by": ["tail"],
        "order_by": "dep",
        "steps": {"out": {"where": "origin = 'x'"}, "back": {"where": "id > 3", "times": 3}},
        "within": "24 hours",
        "unless": "id = 1",
    }
    assert "include" not in outlined(tmp_path, view)
    drawn = " ".join(shown(draw_view({**outlined(tmp_path, view), "state": []})).split())
    assert (
        "rows in succession of the same tail by dep, out: origin = 'x', back: id > 3, 3 times,"
        " within 24 hours, unless id = 1, (dep), each change sent once" in drawn
    )
    loose = resolved(tmp_path, PATTERN.replace("by: [tail]", "by: [tail]\n      rows: any"))
    assert [node.meets for node in loose.root.earlier] == [None] * 3
    assert [node.where and node.where.text for node in loose.root.earlier] == [
        '("id" > (3))',
        '("id" > (3))',
        """("origin" = 'x'::text COLLATE "C")""",
    ]


def test_the_steps_of_a_pattern_are_members_of_its_documents(tmp_path: Path) -> None:
    view = resolved(tmp_path, PATTERN)
    pipeline = settings.load(tmp_path / "air.yaml", {})
    members = view_table(pipeline, view).columns
    assert [member.name for member in members] == ["id", "dep", "out", "back"]
    shapes = [member.shape for member in members if member.shape]
    assert [shape.many for shape in shapes] == [False, True]
    assert all([part.name for part in shape.members] == ["id", "dep"] for shape in shapes)


def test_a_pattern_without_unless_has_no_clock(tmp_path: Path) -> None:
    view = resolved(tmp_path, PATTERN.replace("      unless: id = 1\n", ""))
    assert (view.has_clock, view.sends_once, view.root.absent) == (False, True, None)


@pytest.mark.parametrize(
    ("text", "changes", "message", "hint"),
    [
        (CLOCKED, {"now() > dep": "dep > dep"}, "neither where nor having compares with now()", "take out clock"),
        (
            PATTERN, {"        back: {where: id > 3, times: 3}\n": "", "      unless: id = 1\n": ""},
            "one row is no pattern", "times: 3}}; or add unless",
        ),
        (
            PATTERN, {"      unless: id = 1\n": "", "columns: [dep]": "clock: dep"},
            "there is no unless nor having compares with now()", "take out clock",
        ),
        (
            PATTERN,
            {"order_by: dep": "order_by: local_at", "public.flights\n": "public.weather\n", "tail]": "origin]"},
            "local_at is timestamp without time zone, and now() is a time with a zone", "timestamptz",
        ),
    ],
)  # fmt: skip
def test_mistakes_of_several_lines_are_named(
    tmp_path: Path, text: str, changes: dict[str, str], message: str, hint: str
) -> None:
    for old_text, new_text in changes.items():
        assert old_text in text
        text = text.replace(old_text, new_text)
    with pytest.raises(SettingsError) as caught:
        resolved(tmp_path, text.replace("columns: [dep]", "columns: [id]"))
    assert message in caught.value.message
    assert hint in caught.value.hint
