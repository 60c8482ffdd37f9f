"""What Prometheus and a supervisor find at a run's port; rules and dashboard against it."""

import json
import re
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from cdc.apply.progress import OTHERS, Progress, RunState
from cdc.model.finding_codes import CODES
from cdc.model.generation import generation_time
from cdc.model.outcome import Applied
from cdc.observe import run_endpoint
from cdc.observe.run_endpoint import RunEndpoint
from cdc.observe.sampler import Sample, Sampler
from cdc.observe.status import BuildStatus, HeartbeatStatus, SinkStatus, Status, ViewStatus
from tests.support import http
from tests.support.page import SLOT, good_status
from tests.support.pages import ROOT

GENERATION = "20261126t120000000000"
VIEWS = tuple(
    ViewStatus(
        f"public.t{number}",
        number,
        float(number),
        generation=GENERATION if number > 497 else "",
        proved_through=1000.0 if number > 497 else None,
    )
    for number in range(500)
)
BUILD = BuildStatus("replay", 3, 9, True)
STATUS = good_status(
    SinkStatus("cache", "running", views=VIEWS, build=BUILD, catch_up_s=60.0),
    slot=replace(SLOT, lag_bytes=500, safe_wal_size=100),
    heartbeat=HeartbeatStatus(1.0, 0.02, 2.0),
    slot_loss_s=600.0,
)
RUNNING = Progress(
    "cache",
    RunState.APPLYING,
    Applied(read=9, written=5, quarantined=1),
    batches=3,
    tables={
        "public.orders": Applied(read=6, written=2, folded=4),
        OTHERS: Applied(read=3, stale=3),
    },
    phases_s={"observe": 0.5, "apply": 2.5},
    restarts={"truncate": 2},
    retries={"SinkUnavailable": 3},
)
LOOPBACK = "127.0.0.1"
METRIC = re.compile(r"\bcdc_[a-z_]+")


def looks(status: Status = STATUS) -> Sampler[Status]:
    """Looks of which one has ended."""
    sampler = Sampler("the servers", lambda: status)
    sampler.sample = Sample(status, time.time() - 3, 0.1)
    return sampler


@pytest.fixture(scope="module")
def endpoint() -> Iterator[RunEndpoint]:
    with closing(RunEndpoint(looks(), lambda: True, 0, LOOPBACK)) as served:
        served.publish([RUNNING])
        yield served


def fetched(endpoint: RunEndpoint, path: str) -> httpx.Response:
    return http.get(f"{endpoint.url}{path}")


def series(endpoint: RunEndpoint) -> dict[str, float]:
    text = fetched(endpoint, "/metrics").raise_for_status().text
    pairs = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def test_each_hop_has_its_numbers(endpoint: RunEndpoint) -> None:
    values = series(endpoint)
    assert values["cdc_slot_lag_bytes"] == 500
    assert values["cdc_slot_safe_bytes"] == 100
    assert values["cdc_slot_loss_seconds"] == 600
    assert values['cdc_sink_catch_up_seconds{sink="cache"}'] == 60
    assert values["cdc_connector_up"] == 1
    assert values["cdc_heartbeat_age_seconds"] == 1
    assert values['cdc_sink_up{sink="cache"}'] == 1
    assert values['cdc_sink_lag_seconds{sink="cache"}'] == 499
    assert values['cdc_records_total{outcome="quarantined",sink="cache"}'] == 1
    assert values['cdc_restarts_total{reason="truncate",sink="cache"}'] == 2
    assert values['cdc_retries_total{class="SinkUnavailable",sink="cache"}'] == 3
    assert (
        values['cdc_table_records_total{outcome="folded",sink="cache",table="public.orders"}'] == 4
    )
    assert values['cdc_table_records_total{outcome="stale",sink="cache",table="other"}'] == 3
    assert values['cdc_batch_phase_seconds_total{phase="apply",sink="cache"}'] == 2.5
    begun = 'cdc_view_generation_timestamp_seconds{sink="cache",table="public.t499"}'
    assert values[begun] == generation_time(GENERATION)
    assert values['cdc_view_proved_timestamp_seconds{sink="cache",table="public.t499"}'] == 1000
    assert values['cdc_rebuild_done_records{phase="replay",sink="cache"}'] == 3
    assert values['cdc_rebuild_total_records{phase="replay",sink="cache"}'] == 9
    risk = 'cdc_findings{code="slot-at-risk",hop="Postgres",severity="warning"}'
    assert values[risk] == 1


def test_of_500_tables_only_the_worst_have_series(endpoint: RunEndpoint) -> None:
    values = series(endpoint)
    assert values['cdc_view_lag_seconds{sink="cache",table="public.t499"}'] == 499
    assert len([name for name in values if name.startswith("cdc_view_lag")]) == 100
    assert len([name for name in values if name.startswith("cdc_view_generation")]) == 2
    assert len([name for name in values if name.startswith("cdc_view_proved")]) == 2
    assert len(values) < 150


def test_what_is_not_known_has_no_series() -> None:
    away = Status("shop", sinks=(SinkStatus("cache", views=(ViewStatus("public.orders"),)),))
    with closing(RunEndpoint(looks(away), lambda: True, 0, LOOPBACK)) as served:
        served.publish([RUNNING])
        values = series(served)
    unknown = ("cdc_slot", "cdc_heartbeat", "cdc_connector", "cdc_quarantined", "cdc_view")
    assert [name for name in values if name.startswith(unknown)] == []


def test_a_run_is_ready_when_every_sink_has_begun() -> None:
    with closing(RunEndpoint(looks(), lambda: True, 0, LOOPBACK)) as served:
        assert fetched(served, "/readyz").status_code == 503
        served.publish([RUNNING, Progress("search")])
        answer = fetched(served, "/readyz")
        assert (answer.status_code, answer.text) == (503, "starting: search\n")
        served.publish([RUNNING, replace(RUNNING, sink="search", state=RunState.RETRYING)])
        assert fetched(served, "/readyz").status_code == 200
        assert fetched(served, "/elsewhere").status_code == 404


def test_a_run_that_doesnt_tick_is_not_alive(
    endpoint: RunEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint.publish([RUNNING])
    assert fetched(endpoint, "/livez").status_code == 200
    monkeypatch.setattr(run_endpoint, "TICKING_S", 0.0)
    assert fetched(endpoint, "/livez").status_code == 503


def test_a_run_whose_spark_has_ended_is_not_alive() -> None:
    lives = [True]
    with closing(RunEndpoint(looks(), lambda: lives[0], 0, LOOPBACK)) as served:
        served.publish([RUNNING])
        assert fetched(served, "/livez").status_code == 200
        lives[0] = False
        answer = fetched(served, "/livez")
    assert (answer.status_code, answer.text) == (503, "Spark's process has ended\n")


def test_rules_and_dashboard_name_what_is_exported(endpoint: RunEndpoint) -> None:
    exposition = fetched(endpoint, "/metrics").text
    names = set(re.findall(r"^# TYPE (\S+)", exposition, re.MULTILINE))
    rules = yaml.safe_load((ROOT / "compose" / "alerts.yml").read_text())["groups"][0]["rules"]
    dashboard = json.loads((ROOT / "compose" / "dashboard.json").read_text())
    expressions = [rule["expr"] for rule in rules]
    expressions += [t["expr"] for panel in dashboard["panels"] for t in panel["targets"]]
    assert len(rules) >= 6
    assert {name for text in expressions for name in METRIC.findall(text)} - names == set()
    for rule in rules:
        page = rule["annotations"]["runbook"]
        assert (ROOT / page).exists() or "{{ $labels.code }}" in page
        assert rule["labels"].get("code", "sink-failed") in CODES


def test_the_page_names_every_metric_with_its_labels(endpoint: RunEndpoint) -> None:
    exposition = fetched(endpoint, "/metrics").text
    labels = {
        sample.name: set(sample.labels)
        for family in text_string_to_metric_families(exposition)
        for sample in family.samples
    }
    documented: dict[str, set[str]] = {}
    for line in (ROOT / "docs/operate/metrics.md").read_text().splitlines():
        if line.startswith("| `cdc_"):
            _, names, of_metric, *_ = line.split("|")
            documented |= {
                name: set(re.findall(r"\w+", of_metric)) for name in METRIC.findall(names)
            }
    assert {name: documented.get(name) for name in labels} == labels
