"""The page and the API over HTTP, from constructed states: what is shown, and what is shown when
something can't be read.
"""

import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import jsonschema  # type: ignore[import-untyped]
import pytest

from cdc.errors import KafkaUnavailable, SettingsError
from cdc.model.finding import find
from cdc.model.finding_codes import CODES
from cdc.observe import sampler as sampling
from cdc.observe.run_log import LagSample
from cdc.observe.sampler import Sampler
from cdc.observe.status import Status
from cdc.serve.access import LOOPBACK, Access
from cdc.serve.server import PageServer, runbook
from docs.generate import FOLDER
from tests.support import http
from tests.support.page import (
    Scene,
    ServedPage,
    away_status,
    control_state,
    fill_history,
    good_status,
    serve_page,
    sink,
    stuck_status,
)
from tests.support.pages import refusal
from tests.support.wait import wait_until

PAGES = ("/", "/tables", "/generations", "/quarantine", "/runbooks/sink-behind")


@pytest.fixture
def page() -> Iterator[ServedPage]:
    """A page that the test may change."""
    with serve_page(Scene()) as served:
        yield served


@pytest.fixture(scope="module")
def same_page() -> Iterator[ServedPage]:
    """A page that tests only read."""
    with serve_page(Scene()) as served:
        yield served


def text_of(page: ServedPage, path: str) -> str:
    return http.get(f"{page.url}{path}").raise_for_status().text


@pytest.mark.parametrize("status", [good_status, stuck_status, away_status])
def test_each_page_answers_whatever_was_seen(status: Callable[[], Status]) -> None:
    with serve_page(Scene(status())) as served:
        for path in PAGES:
            assert "<h1" in text_of(served, path)


def test_every_page_before_the_first_look_says_so() -> None:
    scene = Scene(error=SettingsError("The file has a mistake.", hint="mend it"))
    with serve_page(scene) as served:
        for path in PAGES:
            assert "The file has a mistake." in text_of(served, path)
        assert http.get(f"{served.url}/api/status").status_code == 503
        assert http.get(f"{served.url}/readyz").status_code == 503


def test_the_status_is_the_document_of_the_verb(same_page: ServedPage) -> None:
    status = http.get(f"{same_page.url}/api/status").json()
    schema = json.loads((FOLDER / "reference" / "status.schema.json").read_text())
    jsonschema.validate(status, schema)
    assert status["verdict"] == "ok"
    assert status["sinks"][0]["views"][0]["generation"] == "20261125t120000000000"


def test_commands_of_the_api_name_the_pipeline_file_as_those_of_the_verb_do() -> None:
    scene = Scene(stuck_status())
    with serve_page(scene) as served:
        status = http.get(f"{served.url}/api/status").json()
        fixes = [finding["fix"] for finding in status["findings"]]
        assert any(fix.startswith("cdc -p shop.yaml ") for fix in fixes)
        scene.error = KafkaUnavailable("Kafka is away.", hint="cdc -p FILE up")
        served.settle()
        failure = http.get(f"{served.url}/api/sample").json()["status"]["failure"]
        assert failure["hint"] == "cdc -p shop.yaml up"
        assert "cdc -p FILE" not in json.dumps([status, failure])


def test_a_look_that_fails_is_loud_and_what_was_seen_stays(page: ServedPage) -> None:
    page.scene.error = RuntimeError("quotes a row")
    page.settle()
    for path in PAGES:
        text = text_of(page, path)
        assert "The look at the servers has failed: RuntimeError." in text
        assert "quotes a row" not in text
    assert "shop is well" in text_of(page, "/")
    failure = http.get(f"{page.url}/api/sample").json()["status"]["failure"]
    assert "RuntimeError" in failure["message"]
    assert "cdc_look_up 0.0" in text_of(page, "/metrics")
    page.scene.error = None
    page.settle()
    assert "RuntimeError" not in text_of(page, "/")


def test_what_could_not_be_read_is_not_shown_as_nothing() -> None:
    away = find("kafka-unreachable", "Kafka", "Kafka gives no answer within 4 s.", "look at it")
    scene = Scene(away_status(away), error=KafkaUnavailable("Kafka is away.", hint="wait"))
    with serve_page(scene) as served:
        assert "The quarantine could not be read." in text_of(served, "/quarantine")
        assert "What is being built could not be read." in text_of(served, "/generations")
        scene.error = None
        served.settle()
        overview = text_of(served, "/")
        assert "Kafka, unknown: could not be read" in overview
        assert "lag could not be read" in overview
        tables = text_of(served, "/tables")
        assert "could not be read" in tables
        assert ">0<" not in tables


def test_findings_have_their_fix_and_a_runbook() -> None:
    with serve_page(Scene(stuck_status())) as served:
        text = text_of(served, "/")
        assert "shop is degraded" in text
        assert "Kafka -&gt; cache is slow, at least 754 s behind, running." in text
        assert 'href="/runbooks/sink-behind"' in text
        assert "cdc -p shop.yaml quarantine list" in text


@pytest.mark.parametrize("code", CODES)
def test_each_finding_has_a_runbook(code: str) -> None:
    html = runbook(code)
    assert html
    assert f"<h1>{code}</h1>" in html
    assert ".md" not in html


@pytest.mark.parametrize("code", ["nothing", "index", "%2e%2e/metrics", "%2e%2e%2fmetrics"])
def test_there_is_no_runbook_beside_the_codes(same_page: ServedPage, code: str) -> None:
    assert http.get(f"{same_page.url}/runbooks/{code}").status_code == 404


def test_500_tables_are_searched_and_sorted_and_come_in_pages() -> None:
    tables = [f"public.t{number:03}" for number in range(500)]
    views = tuple(
        replace(view, lag_seconds=float(number), lag_records=number)
        for number, view in enumerate(sink("cache", *tables).views)
    )
    with serve_page(Scene(good_status(sink("cache", views=views)))) as served:
        text = text_of(served, "/tables")
        assert "500 of 500 views, the worst first; page 1 of 5." in text
        assert text.count('<th scope="row">') == 100
        assert text.index("public.t499") < text.index("public.t498")
        assert len(text) < 150_000
        text = text_of(served, "/tables?search=T12&sort=table")
        assert text.count('<th scope="row">') == 10
        assert text.index("public.t120") < text.index("public.t129")
        assert "0 of 500 views match" in text_of(served, "/tables?search=nothing")
        for query in ("page=999", "page=x", "sort=x", "page=-1", "page=٣"):
            assert "500 of 500" in text_of(served, f"/tables?{query}")


def test_what_others_wrote_is_shown_as_text(same_page: ServedPage) -> None:
    search = text_of(same_page, '/tables?search="><script>alert(1)</script>')
    assert "<script>alert" not in search
    text = text_of(same_page, "/quarantine")
    assert "cache/shop.public.orders/0/11" in text
    assert "The value is no &lt;b&gt;number&lt;/b&gt;." in text
    records = http.get(f"{same_page.url}/api/quarantine").json()["quarantine"]
    assert [set(record) for record in records] == [{"place", "sink", "topic", "reason", "at"}] * 2


def test_generations_and_builds_are_shown(same_page: ServedPage) -> None:
    text = text_of(same_page, "/generations")
    assert "20261124t120000000000" in text
    assert "61,000 of 250,000 records, 14,000/s, 14 s left" in text
    assert "interrupted" in text
    document = http.get(f"{same_page.url}/api/generations").json()
    assert [len(document[name]) for name in ("live", "kept", "builds")] == [16, 1, 2]


def test_lag_is_plotted_and_a_gap_is_no_zero(page: ServedPage) -> None:
    fill_history(page.dashboard, ["Kafka -> cache"])
    hops = http.get(f"{page.url}/api/lag/day").json()["hops"]
    values = hops["Kafka -> cache"]
    assert len(values) == 360
    assert max(value for value in values if value is not None) >= 40
    assert 10 < values.count(None) < 30
    assert re.search("at most 8[0-9] s", text_of(page, "/"))
    assert http.get(f"{page.url}/api/lag/week").status_code == 404


def test_what_runs_measured_before_the_page_began_is_plotted() -> None:
    now = time.time()
    stored = [LagSample(now - age_s, 33.0, 7) for age_s in range(7200, 3600, -60)]
    with serve_page(Scene(control=replace(control_state(), lags={"cache": stored}))) as served:
        hops = http.get(f"{served.url}/api/lag/day").json()["hops"]
    # An hour of slots of four minutes, the first and the last of which may be shared.
    assert hops["Kafka -> cache"].count(33.0) in (15, 16)


@pytest.mark.parametrize(
    ("path", "verbs"),
    [
        ("/", {"pause", "resume"}),
        ("/tables", {"verify", "rebuild"}),
        ("/generations", {"rebuild", "rollback"}),
        ("/quarantine", {"quarantine show", "quarantine redrive"}),
    ],
)
def test_each_page_has_the_commands_for_what_it_shows(
    page: ServedPage, path: str, verbs: set[str]
) -> None:
    shown = re.findall(r"<code>cdc -p shop.yaml (.*?)</code>", text_of(page, path))
    assert {verb for verb in verbs if any(line.startswith(verb) for line in shown)} == verbs
    assert [why for line in shown if (why := refusal(line.split()))] == []


def test_events_come_when_there_is_something_new(same_page: ServedPage) -> None:
    with http.stream("GET", f"{same_page.url}/events") as stream:
        lines = stream.iter_lines()
        numbers = [line for line in (next(lines) for _ in range(9)) if line.startswith("data: ")]
    assert len(set(numbers)) == 3


def test_metrics_and_probes(same_page: ServedPage) -> None:
    text = text_of(same_page, "/metrics")
    assert 'cdc_sink_lag_seconds{sink="cache"} 0.0' in text
    assert "cdc_look_up 1.0" in text
    assert text_of(same_page, "/readyz") == "there is a first look\n"
    assert http.get(f"{same_page.url}/livez").status_code == 200


def test_a_look_that_hangs_is_loud_and_not_alive(
    page: ServedPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cdc.observe.sampler.LATE_S", 0.0)
    monkeypatch.setattr("cdc.serve.dashboard.SILENT_S", 0.0)
    assert http.get(f"{page.url}/livez").status_code == 503
    assert "hasn&#39;t ended for" in text_of(page, "/")


def test_a_port_that_is_taken_is_named(same_page: ServedPage) -> None:
    port = int(same_page.url.rpartition(":")[2])
    with pytest.raises(SettingsError, match=str(port)):
        PageServer(same_page.dashboard, Access("127.0.0.1", LOOPBACK, None), port)


def test_nobody_watches_and_the_servers_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """While somebody watches they are looked at often, from the moment on that a watcher comes."""
    # So long that a look within it is one for the watcher.
    monkeypatch.setattr(sampling, "IDLE_PAUSE_S", 60.0)
    monkeypatch.setattr(sampling, "PAUSE_S", 0.1)
    looks: list[float] = []
    sampler = Sampler("the servers", lambda: looks.append(time.monotonic()))
    sampler.start()
    try:
        wait_until(lambda: looks, 5, "a first look")
        time.sleep(0.5)
        assert len(looks) == 1
        with sampler.watched():
            wait_until(lambda: len(looks) > 1, 5, "a look for the watcher")
            wait_until(lambda: len(looks) > 2, 5, "the next one")
    finally:
        sampler.close()
