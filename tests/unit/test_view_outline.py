"""What `cdc views show` and `cdc status` draw of documents."""

import time
from dataclasses import replace
from pathlib import Path

from cdc.cli.status import draw_status
from cdc.cli.views import draw_late, draw_view
from cdc.documents.plan import StatePlan, outline, state_outline
from cdc.documents.state import LateChange
from cdc.model.wording import clock
from cdc.observe.pipeline_metrics import LookMetrics
from cdc.observe.sampler import Sample, Sampler
from cdc.observe.status import ClockStatus, DocumentsStatus, SinkStatus, Status
from cdc.serve.drawing import describe_hops
from tests.unit.test_screens import shown
from tests.unit.test_view_settings import GOOD, load, resolve


def test_a_view_is_outlined_in_the_words_of_the_file(tmp_path: Path) -> None:
    text = GOOD.replace("limit: 50", "where: delay > 3\n        limit: 50")
    flights, airports = resolve(tmp_path, text)
    views = load(tmp_path, text).views
    assert outline(airports, views["airport_docs"])["include"]["departures"] == {
        "table": "public.flights",
        "on": {"faa": "origin"},
        "many": True,
        "where": "delay > 3",
        "order_by": ["-day", "flight desc", "tailnum"],
        "limit": 50,
        "columns": ["flight"],
        "flatten": "flight",
        "aggregates": {"departures_count": "count(*)", "late": " MAX( delay ) "},
    }
    described = {
        **outline(flights, views["flight_docs"]),
        "state": state_outline(StatePlan((flights, airports)), ["public.planes"]),
    }
    assert described["state"] == [
        {"table": "public.planes", "columns": ["tailnum", "on", "seats"], "indexes": [["on"]]}
    ]
    drawn = shown(draw_view(described))
    assert "flight_docs: public.flights" in drawn
    assert "owner: public.airlines, on on = carrier" in drawn
    assert "public.planes" in drawn.splitlines()[-1]


def test_changes_that_came_too_late_are_counted() -> None:
    documents = DocumentsStatus({}, {}, {"hours": 0}, 0, late={"hours": 1200}, late_since=1.0)
    text = " ".join(shown(draw_status(Status("shop", documents=documents), "Well.")).split())
    assert "1,200 changes of hours came after their windows had closed (since 1970-01-0" in text
    assert "views late hours" in text
    change = LateChange("7", '["jfk","2013-01-01T10:00:00.000000Z"]', 1.0)
    assert '7 ["jfk","2013-01-01T10:00:00.000000Z"]' in " ".join(shown(draw_late([change])).split())


def test_clocks_are_shown_beside_their_views() -> None:
    """On 80 columns, also one of former days."""
    now = time.time()
    clocks = {"overdue": ClockStatus(now), "arrivals": ClockStatus(1_359_750_000.0, "arr_time")}
    documents = DocumentsStatus(
        {"public.flights": 26_115, "public.airports": 1458},
        {"public.flights": 4_020_000, "public.airports": 90_000},
        {"overdue": 3, "arrivals": 12_000, "docs": 0},
        0,
        clocks=clocks,
    )
    status = Status("shop", documents=documents)
    lines = shown(draw_status(status, "Well.")).splitlines()
    rows = [line.split() for line in lines if line.split()[:1] in (["overdue"], ["docs"])]
    assert rows == [
        ["overdue", "3", clock(now), "public.flights", "26,115", "4.0", "MB"],
        ["docs", "0"],
    ]
    (arrivals,) = [line for line in lines if line.startswith("arrivals")]
    assert clock(1_359_750_000.0) in arrivals
    assert max(map(len, lines)) <= 80
    without = replace(status, documents=replace(documents, clocks={}))
    assert "clock" not in shown(draw_status(without, "Well."))
    (box,) = [
        branch.sink
        for branch in describe_hops(replace(status, sinks=(SinkStatus("documents"),))).branches
    ]
    assert f"clock {clock(now)}: overdue" in box.lines
    assert f"clock {clock(1_359_750_000.0)}: arrivals" in box.lines
    looks = Sampler("the servers", lambda: status)
    looks.sample = Sample(status, now, 0.1)
    figures = {
        (sample.name, sample.labels["view"]): sample.value
        for metric in LookMetrics(looks).collect()
        for sample in metric.samples
        if sample.name == "cdc_view_clock_seconds"
    }
    assert figures == {
        ("cdc_view_clock_seconds", "overdue"): now,
        ("cdc_view_clock_seconds", "arrivals"): 1_359_750_000.0,
    }


def test_what_is_to_be_sent_is_shown_by_view_and_the_state_by_table() -> None:
    documents = DocumentsStatus({"a.b": 7}, {"a.b": 2000}, {"b_docs": 60000, "c_docs": 0}, 1)
    text = shown(draw_status(Status("shop", documents=documents), "Well."))
    rows = [line.split() for line in text.splitlines() if "_docs" in line]
    assert rows == [["b_docs", "60,000", "a.b", "7", "2.0", "kB"], ["c_docs", "0"]]
    assert "documents/s" not in text
    assert "server" not in text
    sized = replace(documents, used_bytes=3_000_000)
    text = shown(draw_status(Status("shop", documents=sized), "Well."))
    assert "the state's server uses 3.0 MB of memory, without a limit" in text
    limited = replace(sized, limit_bytes=4_000_000)
    text = shown(draw_status(Status("shop", documents=limited), "Well."))
    assert "the state's server uses 3.0 MB of 4.0 MB (maxmemory)" in text
    sending = replace(documents, sent_per_s=1200.0)
    text = shown(draw_status(Status("shop", documents=sending), "Well."))
    assert "1,200 documents/s are sent: done in 50 s" in text
    sent = replace(sending, dirty={"b_docs": 0})
    assert "documents/s" not in shown(draw_status(Status("shop", documents=sent), "Well."))
