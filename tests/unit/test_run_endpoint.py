"""What Prometheus and a supervisor find at a run's port; rules and dashboard against it."""

import json
import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import httpx
import pytest
import yaml

from cdc.apply.progress import Progress, RunState
from cdc.errors import SettingsError
from cdc.model.finding_codes import CODES
from cdc.model.outcome import Applied
from cdc.observe import run_endpoint
from cdc.observe.diagnosis import diagnose
from cdc.observe.run_endpoint import RunEndpoint
from cdc.observe.status import (
    ConnectorStatus,
    HeartbeatStatus,
    SinkStatus,
    Status,
    ViewStatus,
)
from cdc.postgres.replication_slot import Slot
from tests.support import http
from tests.support.pages import ROOT
from tests.support.wait import wait_until

SLOT = Slot(True, 1, "0/1", "0/2", "reserved", 500, 900, 100, "pgoutput", "shop", None, None)
VIEWS = tuple(ViewStatus(f"public.t{number}", number, float(number)) for number in range(500))
STATUS = diagnose(
    Status(
        "shop",
        ConnectorStatus("RUNNING", ("RUNNING",), None),
        SLOT,
        HeartbeatStatus(1.0, 0.02, 2.0),
        (SinkStatus("cache", "running", views=VIEWS),),
    )
)
RUNNING = Progress(
    "cache",
    RunState.APPLYING,
    Applied(read=9, written=5, quarantined=1),
    batches=3,
    restarts={"truncate": 2},
)
METRIC = re.compile(r"\bcdc_[a-z_]+")


@pytest.fixture
def endpoint() -> Iterator[RunEndpoint]:
    with closing(RunEndpoint(0, lambda: STATUS)) as served:
        yield served


def fetched(endpoint: RunEndpoint, path: str) -> httpx.Response:
    return http.get(f"http://127.0.0.1:{endpoint.port}{path}")


def series(endpoint: RunEndpoint) -> dict[str, float]:
    text = fetched(endpoint, "/metrics").raise_for_status().text
    pairs = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def looked(endpoint: RunEndpoint) -> dict[str, float]:
    wait_until(lambda: "cdc_slot_lag_bytes" in series(endpoint), 10, "a look at the pipeline")
    return series(endpoint)


def test_each_hop_has_its_numbers(endpoint: RunEndpoint) -> None:
    endpoint.publish([RUNNING])
    values = looked(endpoint)
    assert values["cdc_slot_lag_bytes"] == 500
    assert values["cdc_slot_safe_bytes"] == 100
    assert values["cdc_connector_up"] == 1
    assert values["cdc_heartbeat_age_seconds"] == 1
    assert values['cdc_sink_up{sink="cache"}'] == 1
    assert values['cdc_sink_lag_seconds{sink="cache"}'] == 499
    assert values['cdc_records_total{outcome="quarantined",sink="cache"}'] == 1
    assert values['cdc_restarts_total{reason="truncate",sink="cache"}'] == 2
    risk = 'cdc_findings{code="slot-at-risk",hop="Postgres",severity="warning"}'
    assert values[risk] == 1


def test_of_500_tables_only_the_worst_have_series(endpoint: RunEndpoint) -> None:
    endpoint.publish([RUNNING])
    values = looked(endpoint)
    assert values['cdc_view_lag_seconds{sink="cache",table="public.t499"}'] == 499
    assert len([name for name in values if name.startswith("cdc_view_")]) == 100
    assert len(values) < 150


def test_what_is_not_known_has_no_series() -> None:
    away = Status("shop", sinks=(SinkStatus("cache", views=(ViewStatus("public.orders"),)),))
    with closing(RunEndpoint(0, lambda: away)) as served:
        served.publish([RUNNING])
        wait_until(lambda: "# TYPE cdc_findings" in fetched(served, "/metrics").text, 10, "a look")
        values = series(served)
    unknown = ("cdc_slot", "cdc_heartbeat", "cdc_connector", "cdc_quarantined", "cdc_view")
    assert [name for name in values if name.startswith(unknown)] == []


def test_names_have_units() -> None:
    """As Prometheus' own rules want them: counters end in total, others in a base unit or say what
    is counted.
    """
    with closing(RunEndpoint(0, lambda: STATUS)) as served:
        served.publish([RUNNING])
        names = {name.partition("{")[0] for name in looked(served)}
    ends = ("_total", "_seconds", "_bytes", "_records", "_info", "_up", "_active")
    counted = {"cdc_findings", "cdc_tables_waiting", "cdc_records_created", "cdc_batches_created"}
    assert [name for name in names - counted if not name.endswith(ends)] == []


def test_a_run_is_ready_when_every_sink_has_begun(endpoint: RunEndpoint) -> None:
    assert fetched(endpoint, "/readyz").status_code == 503
    endpoint.publish([RUNNING, Progress("search")])
    answer = fetched(endpoint, "/readyz")
    assert (answer.status_code, answer.text) == (503, "starting: search\n")
    endpoint.publish([RUNNING, replace(RUNNING, sink="search", state=RunState.RETRYING)])
    assert fetched(endpoint, "/readyz").status_code == 200
    assert fetched(endpoint, "/elsewhere").status_code == 404


def test_a_run_that_doesnt_tick_is_not_alive(
    endpoint: RunEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint.publish([RUNNING])
    assert fetched(endpoint, "/livez").status_code == 200
    monkeypatch.setattr(run_endpoint, "TICKING_S", 0.0)
    assert fetched(endpoint, "/livez").status_code == 503


def test_a_run_whose_spark_has_ended_is_not_alive() -> None:
    lives = [True]
    with closing(RunEndpoint(0, lambda: STATUS, lambda: lives[0])) as served:
        served.publish([RUNNING])
        assert fetched(served, "/livez").status_code == 200
        lives[0] = False
        answer = fetched(served, "/livez")
    assert (answer.status_code, answer.text) == (503, "Spark's process has ended\n")


def test_a_port_that_is_taken_is_named(endpoint: RunEndpoint) -> None:
    with pytest.raises(SettingsError, match=str(endpoint.port)):
        RunEndpoint(endpoint.port, lambda: STATUS)


def exported(endpoint: RunEndpoint) -> set[str]:
    endpoint.publish([RUNNING])
    looked(endpoint)
    text = fetched(endpoint, "/metrics").text
    return set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))


def test_rules_and_dashboard_name_what_is_exported(endpoint: RunEndpoint) -> None:
    names = exported(endpoint)
    rules = yaml.safe_load((ROOT / "compose" / "alerts.yml").read_text())["groups"][0]["rules"]
    dashboard = json.loads((ROOT / "compose" / "dashboard.json").read_text())
    expressions = [rule["expr"] for rule in rules]
    expressions += [t["expr"] for panel in dashboard["panels"] for t in panel["targets"]]
    assert len(rules) >= 10
    assert {name for text in expressions for name in METRIC.findall(text)} - names == set()
    for rule in rules:
        page = rule["annotations"]["runbook"]
        assert (ROOT / page).exists() or "{{ $labels.code }}" in page
        assert rule["labels"].get("code", "sink-failed") in CODES


def test_planted_a_rule_about_a_metric_that_there_is_not(endpoint: RunEndpoint) -> None:
    assert set(METRIC.findall("cdc_lag_of_nothing > 1")) - exported(endpoint)
