"""Each alert rule fires when it should, and only then, as Prometheus' own tool says."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.core import Metric

from cdc.apply.progress import Progress, RunState
from cdc.model.finding import Severity
from cdc.model.finding_codes import STATUS, code_of
from cdc.observe.diagnosis import diagnose
from cdc.observe.run_endpoint import PublishedState
from cdc.observe.sampler import Sample, Sampler
from cdc.observe.status import ConnectorStatus, HeartbeatStatus, SinkStatus, ViewStatus
from tests.support.page import SLOT, good_status
from tests.support.pages import ROOT

RULES = ROOT / "compose" / "alerts.yml"
CASES = Path(__file__).with_name("alerts_test.yml")
URGENT = ("heartbeat-late", "slot-at-risk")
FIRING = 'count by (severity, code) (ALERTS{alertstate="firing"})'


def check_rules(file: Path) -> None:
    """Have Prometheus' own tool run the cases of a file."""
    if shutil.which("promtool") is None:
        reason = "there is no promtool: apt-get update && apt-get install prometheus"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
    command = ["promtool", "test", "rules", str(file)]
    run = subprocess.run(command, check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def test_rules_fire_when_they_should_and_only_then() -> None:
    check_rules(CASES)


RUNNING = SinkStatus("cache", "running", views=(ViewStatus("public.t", 0, 0.0),))
GOOD = good_status(RUNNING)
LATE = HeartbeatStatus(100.0, 0.02, 2.0)
BEHIND = replace(RUNNING, views=(ViewStatus("public.t", 5, 100.0),))
LOSING = replace(SLOT, active=False, safe_wal_size=10)
INCIDENTS = {
    "nothing": (GOOD, []),
    "a record in quarantine": (
        replace(GOOD, sinks=(replace(RUNNING, views=(ViewStatus("public.t", quarantined=1),)),)),
        [("ticket", "records-quarantined")],
    ),
    "a table that waits": (
        replace(GOOD, sinks=(replace(RUNNING, aside={"public.t": ["unfit", "mend"]}),)),
        [("ticket", "table-waiting")],
    ),
    "a sink that is behind": (replace(GOOD, sinks=(BEHIND,)), [("ticket", "sink-behind")]),
    "a sink that is paused": (replace(GOOD, sinks=(replace(BEHIND, paused_by="ann"),)), []),
    "a sink that waits": (
        replace(GOOD, sinks=(replace(BEHIND, state="waiting", error="It is away."),)),
        [("page", "sink-waiting")],
    ),
    "a connector that has failed": (
        replace(GOOD, connector=ConnectorStatus("FAILED", (), "no"), heartbeat=LATE),
        [("page", "connector-failed")],
    ),
    "nothing comes from Postgres": (replace(GOOD, heartbeat=LATE), [("page", "heartbeat-late")]),
    "a slot that is given up soon": (
        replace(GOOD, slot=LOSING, slot_loss_s=60.0),
        [("page", "slot-at-risk")],
    ),
}


def test_an_incident_is_one_alert(tmp_path: Path) -> None:
    cases = []
    for name, (status, alerts) in INCIDENTS.items():
        looks = Sampler("the servers", lambda status=status: status)  # type: ignore[misc]
        looks.sample = Sample(diagnose(status), time.time(), 0.1)
        published = PublishedState(looks, lambda: True)
        sink = status.sinks[0]
        published.progress = (Progress("cache", RunState(sink.state), aside=dict(sink.aside)),)
        cases.append(after_half_an_hour(name, published.collect(), alerts))
    check_cases(tmp_path, cases)


def test_each_finding_but_a_remark_is_of_one_rule(tmp_path: Path) -> None:
    cases = []
    for key, kind in STATUS.items():
        labels = {"code": code_of(key), "severity": kind.severity, "hop": kind.hop}
        metric = Metric("cdc_findings", "", "gauge")
        metric.add_sample("cdc_findings", labels, 1)
        severity = "page" if kind.severity == Severity.DOWN or code_of(key) in URGENT else "ticket"
        alerts = [] if kind.severity == Severity.INFO else [(severity, code_of(key))]
        cases.append(after_half_an_hour(key, [metric], alerts))
    check_cases(tmp_path, cases)


def after_half_an_hour(
    name: str, metrics: Iterable[Metric], alerts: Iterable[tuple[str, str]]
) -> dict[str, Any]:
    """A case: these metrics are so for half an hour, and then these alerts fire, by severity and code."""
    series = [
        {
            "series": sample.name + in_braces({"instance": "run", **sample.labels}),
            "values": f"{sample.value}x30",
        }
        for metric in metrics
        for sample in metric.samples
    ]
    expected = [
        {"labels": in_braces({"severity": severity, "code": code}), "value": 1}
        for severity, code in alerts
    ]
    query = {"expr": FIRING, "eval_time": "30m", "exp_samples": expected}
    return {"name": name, "interval": "1m", "input_series": series, "promql_expr_test": [query]}


def in_braces(labels: dict[str, str]) -> str:
    return "{" + ", ".join(f"{name}={json.dumps(value)}" for name, value in labels.items()) + "}"


def check_cases(folder: Path, cases: list[dict[str, Any]]) -> None:
    file = folder / "cases.json"
    document = {"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": cases}
    file.write_text(json.dumps(document))
    check_rules(file)


def test_each_rule_has_samples_on_which_it_fires_and_others() -> None:
    outcomes: dict[str, set[bool]] = {}
    for case in yaml.safe_load(CASES.read_text())["tests"]:
        for expected in case["alert_rule_test"]:
            outcomes.setdefault(expected["alertname"], set()).add(bool(expected["exp_alerts"]))
    rules = yaml.safe_load(RULES.read_text())["groups"][0]["rules"]
    assert outcomes == {rule["alert"]: {True, False} for rule in rules}
