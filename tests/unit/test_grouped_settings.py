"""Grouped views in the pipeline file: what is accepted, and how mistakes are named."""

from pathlib import Path
from typing import Any

import pytest

from cdc.capture.renewal import select_renewed
from cdc.config import settings
from cdc.config.settings import Pipeline
from cdc.documents.plan import Closing, Session, View, Window, outline
from cdc.documents.resolve import resolve_views
from cdc.documents.sql import document_query
from cdc.documents.tables import view_table
from cdc.errors import SettingsError
from cdc.model.table import Column, Table
from tests.support.simulated import MemoryLog, SimulatedClock

GOOD = """\
pipeline: air
kafka: localhost:9092
connect: http://localhost:8083
source: {dsn: postgresql://localhost/air, tables: [public.flights]}
sinks:
  cache: {type: redis, url: "redis://localhost/0", prefix: air}
state: {type: redis, url: "redis://localhost/2", prefix: air}
views:
  delays:
    from: public.flights
    where: dep IS NOT NULL
    window: {hopping: 1 hour, every: 10 minutes, time: dep}
    group_by: [origin]
    select:
      flights: count(*)
      late: count(*) FILTER (WHERE delay > 15)
      mean: avg(delay)
    having: flights > 1
    to: [cache]
"""
WINDOW = "    window: {hopping: 1 hour, every: 10 minutes, time: dep}\n"
MINUTE = 60_000_000
FLIGHTS = Table(
    "public",
    "flights",
    (
        Column("id", "integer"),
        Column("origin", "text"),
        Column("dep", "timestamp with time zone"),
        Column("planned", "timestamp without time zone"),
        Column("day", "date"),
        Column("delay", "integer"),
        Column("speed", "double precision"),
        Column("is_late", "boolean"),
    ),
    ("id",),
    "air.public.flights",
)


def resolved(folder: Path, text: str) -> tuple[View, ...]:
    path = folder / "air.yaml"
    path.write_text(text)
    return resolve_views(settings.load(path, {}), [FLIGHTS])


def view_of(folder: Path, old_text: str = "", new_text: str = "", good: str = GOOD) -> View:
    assert old_text in good
    (view,) = resolved(folder, good.replace(old_text, new_text, 1))
    return view


def columns_of(folder: Path, view: View) -> dict[str, str]:
    table = view_table(settings.load(folder / "air.yaml", {}), view)
    return {column.name: column.type for column in table.columns}


def outlined(folder: Path, view: View) -> dict[str, Any]:
    return outline(view, settings.load(folder / "air.yaml", {}).views[view.name])


def test_a_grouped_view_is_resolved(tmp_path: Path) -> None:
    view = view_of(tmp_path)
    assert view.grouping is not None
    assert view.grouping.window == Window("dep", 60 * MINUTE, 10 * MINUTE, 0)
    assert [column.name for column in view.keyed.columns] == ["origin", "window_start"]
    assert list(columns_of(tmp_path, view).items()) == [
        ("origin", "text"),
        ("window_start", "timestamp with time zone"),
        ("window_end", "timestamp with time zone"),
        ("flights", "bigint"),
        ("late", "bigint"),
        ("mean", "numeric"),
    ]


def test_weeks_begin_on_a_monday(tmp_path: Path) -> None:
    view = view_of(
        tmp_path, "{hopping: 1 hour, every: 10 minutes, time: dep}", "{tumbling: 1 week, time: dep, start: 2013-01-07}"
    )  # fmt: skip
    assert view.grouping is not None
    week = 7 * 24 * 60 * MINUTE
    # 7 January 2013 is 15,712 days after 1 January 1970.
    assert view.grouping.window == Window("dep", week, week, 15_712 * 24 * 60 * MINUTE)
    shown = outlined(tmp_path, view)["window"]
    assert shown == {"tumbling": "1 week", "start": "2013-01-07", "time": "dep"}


def test_groups_of_expressions_have_their_names(tmp_path: Path) -> None:
    groups = "{month: \"date_trunc('month', dep)\", is_late: is_late, o: origin}"
    view = view_of(tmp_path, "[origin]", groups)
    names = [column.name for column in view.keyed.columns]
    assert names == ["month", "is_late", "o", "window_start"]


def test_its_query_is_one_that_a_person_would_write(tmp_path: Path) -> None:
    changed = GOOD.replace(WINDOW, "")
    (view,) = resolved(tmp_path, changed.replace("    having: flights > 1\n", ""))
    assert document_query(view) == (
        'SELECT t0."origin" AS "origin", count(*) AS "flights",'
        ' count(*) FILTER (WHERE (t0."delay" > (15)))'
        ' AS "late", avg(t0."delay") AS "mean" FROM "public"."flights" AS t0'
        ' WHERE (NOT (t0."dep" IS NOT DISTINCT FROM NULL)) AND t0."origin" IS NOT NULL GROUP BY 1'
    )


def test_it_is_shown_in_the_words_of_the_file(tmp_path: Path) -> None:
    described = outlined(tmp_path, view_of(tmp_path))
    assert described == {
        "view": "delays",
        "table": "public.flights",
        "key": ["origin", "window_start"],
        "where": "dep IS NOT NULL",
        "group_by": {"origin": "origin"},
        "window": {"hopping": "1 hour", "every": "10 minutes", "time": "dep"},
        "select": {
            "flights": "count(*)",
            "late": "count(*) FILTER (WHERE delay > 15)",
            "mean": "avg(delay)",
        },
        "having": "flights > 1",
        "alerts": True,
    }


@pytest.mark.parametrize(
    ("old_text", "new_text", "line", "message", "hint"),
    [
        ("from: public.flights", "from: public.planes", 10, "from: the table isn't captured", "public.planes"),
        ("from: public.flights", "from: flights", 10, "from: takes schema.table", "from: public.flights"),
        ("    to: [cache]\n", "", 9, "to: required, but missing", "to: "),
        ("    to: [cache]\n", "    to: [cach]\n", 19, "there is no such sink", "one of: cache"),
        ("hopping: 1 hour, every: 10 minutes, ", "", 12, "a window is one of tumbling, hopping", "tumbling"),
        ("hopping: 1 hour", "hopping: 1 hour, tumbling: 1 hour", 12, "a window is one of tumbling", ""),
        ("hopping: 1 hour, every: 10 minutes", "sliding: 1 hour, lateness: 1 hour", 12, "the window of a row is", ""),
        ("hopping: 1 hour, every: 10 minutes", "session: 1 hour, start: 2013-01-07", 12, "these begin with rows", ""),
        ("hopping: 1 hour, every: 10 minutes", "sliding: 1 hour, start: 2013-01-07", 12, "these begin with rows", ""),
        ("hopping: 1 hour, every: 10 minutes", "sliding: 0 days", 12, "a window has a length", "sliding: 1 hour"),
        ("hopping: 1 hour, every: 10 minutes", "tumbling: 0 days", 12, "a window has a length", "tumbling: 1 hour"),
        ("hopping: 1 hour", "sliding: 1 hour", 12, "every is of hopping", ""),
        ("hopping: 1 hour", "session: 1 hour", 12, "every is of hopping", ""),
        ("hopping: 1 hour, every: 10 minutes", "hopping: 1 hour", 12, "every is of hopping", "every: 10 minutes"),
        ("hopping: 1 hour", "tumbling: 1 hour", 12, "every is of hopping", ""),
        ("hopping: 1 hour", "hopping: 55 minutes", 12, "55 minutes is no multiple of every: 10 minutes", "every:"),
        ("hopping: 1 hour", "hopping: 0 seconds", 12, "a window has a length", "hopping: 1 hour, every: 10 minutes"),
        ("hopping: 1 hour", "hopping: 1 month", 12, "a month has no fixed length", "30 days"),
        ("hopping: 1 hour", "hopping: 1 day", 12, "a row would be in 144 windows, at most 100", "longer every"),
        ("time: dep", "time: dop", 12, "public.flights has no column dop", "did you mean dep?"),
        ("time: dep", "time: day", 12, "day is date, and a time is a time stamp", "timestamptz"),
        ("time: dep", "time: dep, lateness: soon", 12, "a duration is a whole number and a unit", "10 minutes"),
        ("time: dep", "time: dep, lateness: -1 hour", 12, "a duration is a whole number and a unit", "10 minutes"),
        ("time: dep", "time: dep, lateness: 1 month", 12, "a month has no fixed length", "30 days"),
        ("time: dep", "time: dep, start: soon", 12, "start: isn't accepted", "2013-01-07"),
        ("time: dep", "tima: dep", 12, "no such setting", "did you mean time?"),
        ("[origin]", "[orgin]", 13, "public.flights has no column orgin", "did you mean origin?"),
        ("[origin]", "[speed]", 13, "speed is double precision, and rows can't be grouped by it", "uuid"),
        ("[origin]", "[day]", 13, "day is date, and rows can't be grouped by it", ""),
        ("[origin]", "{n: delay + 1}", 13, "delay + 1 is integers, and rows can't be grouped", "in a column"),
        ("[origin]", "{window_end: origin}", 13, "delays has another member window_end", "another name"),
        ("[origin]", "{_cdc: origin}", 13, "a member's name isn't empty and doesn't begin with _cdc", ""),
        ("flights: count(*)", "origin: count(*)", 15, "delays has another member origin", "another name"),
        ("count(*)", "median(delay)", 14, "an aggregate is one of count, sum", "count(*)"),
        ("avg(delay)", "avg(speed)", 17, "avg of a double precision can't be computed exactly", "integers"),
        ("avg(delay)", "avg(delay + 1)", 17, "avg takes columns, not expressions", "GENERATED"),
        ("delay > 15", "delai > 15", 16, "public.flights has no column delai", "did you mean delay?"),
        ("delay > 15", "delay", 16, "isn't a condition", ""),
        ("delay > 15", "dep < now()", 16, "now() here", "having"),
        ("dep IS NOT NULL", "dep < now()", 11, "now() here", "having"),
        ("flights > 1", "delay > 1", 18, "having names delay, which the document doesn't show", "origin, window_start"),
        ("hopping: 1 hour, every: 10 minutes", "lateness: 1 hour, session: 1 hour", 12,
         "lateness needs windows that end by themselves: a session is corrected for ever",
         "take out lateness, or use tumbling"),
        ("having: flights > 1", "order_by: id", 18, "the rows of a window are in the order of its time", ""),
        ("having: flights > 1", "clock: dep", 18, "neither where nor having compares with now()", "take out clock"),
        ("having: flights > 1", "columns: [origin]", 18, "columns: no such setting", "accepted here: alerts"),
    ],
)  # fmt: skip
def test_mistakes_are_named_with_their_line(
    tmp_path: Path, old_text: str, new_text: str, line: int, message: str, hint: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        view_of(tmp_path, old_text, new_text)
    assert f"air.yaml:{line}: views.delays" in caught.value.message
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_aggregates_are_shown_as_the_file_has_them(tmp_path: Path) -> None:
    calls = {
        "origins": "count(DISTINCT origin)",
        "median": "percentile_disc(0.5) WITHIN GROUP (ORDER BY delay)",
        "first": "first(is_late)",
    }
    lines = ["flights: count(*)", *(f"{name}: {call}" for name, call in calls.items())]
    view = view_of(tmp_path, "flights: count(*)", "\n      ".join(lines))
    shown = outlined(tmp_path, view)["select"]
    assert {name: shown[name] for name in calls} == calls
    types = columns_of(tmp_path, view)
    assert [types[name] for name in calls] == ["bigint", "integer", "boolean"]


@pytest.mark.parametrize(
    ("lines", "message", "hint"),
    [
        ("{n: last(delay)}", "views.delays.select.n: nothing says which row is the first", "order_by: id"),
        ("{n: count(*)}, order_by: id", "order_by: order_by is of first and last", "take out order_by"),
        ("{n: last(delay)}, order_by: day desc", "the first row is the one with the least", "the column alone"),
        ("{n: last(delay)}, order_by: speed", "values of type double precision can't be ordered", "order by"),
        ("{n: last(delay)}, order_by: dep_", "public.flights has no column dep_", "did you mean dep?"),
        ("{n: last(speed)}, order_by: id", "last of a double precision can't be", "uuid, boolean and enums"),
        ("{n: last(day)}, order_by: id", "last of a date can't be", "uuid, boolean and enums"),
        ("{n: count(DISTINCT speed)}", "count(DISTINCT) of a double precision can't be", "also char(n), dates"),
        ("{n: percentile_disc(0.5) WITHIN GROUP (ORDER BY day)}", "percentile_disc of a date can't be", ""),
        ("{n: percentile_disc(2) WITHIN GROUP (ORDER BY delay)}", "takes a number from 0 to 1, and this is 2", ""),
        ("{n: percentile_disc(0_1) WITHIN GROUP (ORDER BY delay)}", "an aggregate is one of count", ""),
        ("{n: percentile_disc(0.5)}", "an aggregate is one of count", "count(*)"),
        ("{n: count(DISTINCT *)}", "count(DISTINCT) takes columns, not expressions", ""),
    ],
)  # fmt: skip
def test_mistakes_in_what_is_selected_are_named(
    tmp_path: Path, lines: str, message: str, hint: str
) -> None:
    head, _, _ = GOOD.partition("  delays:")
    text = f"{head}  delays: {{from: public.flights, group_by: [origin], to: [cache], select: {lines}}}\n"
    with pytest.raises(SettingsError) as caught:
        resolved(tmp_path, text)
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_a_filter_needs_no_space(tmp_path: Path) -> None:
    view = view_of(tmp_path, "FILTER (WHERE delay > 15)", "FILTER(WHERE(delay > 15))")
    assert outlined(tmp_path, view)["select"]["late"] == "count(*) FILTER(WHERE(delay > 15))"


def test_a_session_is_resolved(tmp_path: Path) -> None:
    view = view_of(tmp_path, "hopping: 1 hour, every: 10 minutes", "session: 30 minutes")
    assert view.grouping is not None
    assert view.grouping.window == Session("dep", 30 * MINUTE)
    assert outlined(tmp_path, view)["window"] == {"session": "30 minutes", "time": "dep"}


def test_a_sliding_window_is_resolved(tmp_path: Path) -> None:
    view = view_of(tmp_path, "hopping: 1 hour, every: 10 minutes", "sliding: 1 hour")
    assert view_table(settings.load(tmp_path / "air.yaml", {}), view).key == ("id",)
    names = ["id", "origin", "dep", "flights", "late", "mean"]
    assert list(columns_of(tmp_path, view)) == names
    shown = outlined(tmp_path, view)
    assert shown["window"] == {"sliding": "1 hour", "time": "dep"}
    assert shown["group_by"] == {"origin": "origin"}
    assert shown["where"] == "dep IS NOT NULL"
    assert list(shown["select"]) == ["flights", "late", "mean"]
    assert "include" not in shown


@pytest.mark.parametrize(
    ("old_text", "new_text", "line", "message", "hint"),
    [
        ("[origin]", "{o: origin}", 13, "the document of a row has the names of its columns", "[origin]"),
        ("[origin]", "{o: upper(origin)}", 13, "takes columns, not expressions", "GENERATED"),
        ("[origin]", "[speed]", 13, "rows can't be grouped by it", ""),
        ("flights: count(*)", "dep: count(*)", 15, "delays has another member dep", "another name"),
        ("flights: count(*)", "id: count(*)", 15, "delays has another member id", "another name"),
        ("flights > 1", "delay > 1", 18, "having names delay, which the document doesn't show", "origin"),
        ("time: dep", "time: day", 12, "day is date, and a time is a time stamp", "timestamptz"),
    ],
)  # fmt: skip
def test_mistakes_of_sliding_windows_are_named(
    tmp_path: Path, old_text: str, new_text: str, line: int, message: str, hint: str
) -> None:
    good = GOOD.replace("hopping: 1 hour, every: 10 minutes", "sliding: 1 hour")
    with pytest.raises(SettingsError) as caught:
        view_of(tmp_path, old_text, new_text, good)
    assert f"air.yaml:{line}: views.delays" in caught.value.message
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_windows_that_close_are_resolved(tmp_path: Path) -> None:
    view = view_of(tmp_path, "time: dep}", "time: dep, lateness: 2 hours}")
    assert view.grouping is not None
    assert view.grouping.closing == Closing("delays", 180 * MINUTE)
    assert (view.has_clock, view.sends_once) == (True, True)
    assert outlined(tmp_path, view)["window"]["lateness"] == "2 hours"
    table = view_table(settings.load(tmp_path / "air.yaml", {}), view)
    assert table.column("final").type == "boolean"
    assert table.derivation is not None
    assert (table.derivation.clock, table.derivation.closes) == ("cdc.now_delays", True)
    closed = "interval '10800000000 microseconds' > current_setting('cdc.now_delays')"
    assert closed in document_query(view)
    good = GOOD.replace("time: dep}", "time: dep, lateness: 0 seconds}")
    assert view_of(tmp_path, "having: flights > 1", "clock: dep", good).clock == "dep"


def test_a_topic_that_knows_closed_windows_is_renewed_on_request(tmp_path: Path) -> None:
    path = tmp_path / "air.yaml"
    log = MemoryLog(SimulatedClock())
    for text, is_asked in ((GOOD, False), (GOOD.replace("dep}", "dep, lateness: 1 hour}"), True)):
        path.write_text(text)
        pipeline = settings.load(path, {})

        def renewed(*, forget: bool, pipeline: Pipeline = pipeline) -> list[str]:
            names = ["view.delays"]
            tables = select_renewed(log, pipeline, [FLIGHTS], names, forget=forget)
            return [table.qualified for table in tables]

        assert renewed(forget=True) == ["view.delays"]
        if not is_asked:
            assert renewed(forget=False) == ["view.delays"]
            continue
        with pytest.raises(SettingsError, match=r"Only the topic of view\.delays has") as caught:
            renewed(forget=False)
        assert caught.value.hint == "if that is meant, add --forget"


def test_only_windows_that_close_have_a_member_final(tmp_path: Path) -> None:
    named = GOOD.replace("flights: count(*)", "final: count(*)").replace("flights > 1", "final > 1")
    [view] = resolved(tmp_path, named)
    assert view.grouping is not None
    assert view.grouping.aggregates[0].name == "final"
    with pytest.raises(SettingsError, match="delays has another member final"):
        resolved(tmp_path, named.replace("time: dep}", "time: dep, lateness: 1 hour}"))


def test_a_view_without_groups_and_windows_is_refused(tmp_path: Path) -> None:
    text = GOOD.replace("    group_by: [origin]\n", "").replace(WINDOW, "")
    with pytest.raises(SettingsError, match="neither group_by nor window"):
        resolved(tmp_path, text)
