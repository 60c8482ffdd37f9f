"""Each alert rule fires on samples on which it should, and is quiet on others.

The samples are in the form of Prometheus' own tool, so that it can be asked as well.
"""

import shutil
import subprocess
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
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
from cdc.observe.status import (
    ConnectorStatus,
    HeartbeatStatus,
    SinkStatus,
    Status,
    ViewStatus,
)
from cdc.readiness.replication_slot import Slot
from tests.support.alert_rules import Alert, firing, seconds, series_of
from tests.support.pages import ROOT
from tests.support.promql import Query, Unsupported

FILE = ROOT / "tests" / "unit" / "alerts_test.yml"
RULES = {
    rule["alert"]: rule
    for group in yaml.safe_load((ROOT / "compose" / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
}
CASES = yaml.safe_load(FILE.read_text())
STEP_S = seconds(CASES["evaluation_interval"])


def moments() -> Iterator[Any]:
    for case in CASES["tests"]:
        for expected in case["alert_rule_test"]:
            name = f"{expected['alertname']}: {case['name']}, {expected['eval_time']}"
            yield pytest.param(case, expected, id=name)


@pytest.mark.parametrize(("case", "expected"), list(moments()))
def test_a_rule_fires_when_it_should_and_only_then(
    case: dict[str, Any], expected: dict[str, Any]
) -> None:
    rule = RULES[expected["alertname"]]
    alerts = {
        Alert(
            rule["alert"],
            frozenset(alert["exp_labels"].items()),
            frozenset(alert["exp_annotations"].items()),
        )
        for alert in expected["exp_alerts"]
    }
    assert firing(rule, series_of(case), STEP_S, seconds(expected["eval_time"])) == alerts


@pytest.mark.parametrize("name", RULES)
def test_each_rule_has_samples_on_which_it_fires_and_others(name: str) -> None:
    outcomes = [
        bool(expected["exp_alerts"])
        for case in CASES["tests"]
        for expected in case["alert_rule_test"]
        if expected["alertname"] == name
    ]
    assert set(outcomes) == {True, False}


RUNNING = SinkStatus("cache", "running", views=(ViewStatus("public.t", 0, 0.0),))
GOOD = Status(
    "shop",
    ConnectorStatus("RUNNING", ("RUNNING",), None),
    Slot(True, 1, "0/1", "0/2", "reserved", 500, 900, 900, "pgoutput", "shop", None, None),
    HeartbeatStatus(1.0, 0.02, 2.0),
    (RUNNING,),
)
LATE = HeartbeatStatus(100.0, 0.02, 2.0)
BEHIND = replace(RUNNING, views=(ViewStatus("public.t", 5, 100.0),))
LOSING = Slot(False, 1, "0/1", "0/2", "reserved", 500, 900, 10, "pgoutput", "shop", None, None)
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


@pytest.mark.parametrize("incident", INCIDENTS)
def test_an_incident_is_one_alert(incident: str) -> None:
    status, alerts = INCIDENTS[incident]
    looks = Sampler("the servers", lambda: status)
    looks.sample = Sample(diagnose(status), time.time(), 0.1)
    published = PublishedState(looks, lambda: True)
    state = next(sink.state for sink in status.sinks)
    published.progress = (Progress("cache", RunState(state), aside=dict(status.sinks[0].aside)),)
    assert _alerts(_series(published.collect())) == alerts


@pytest.mark.parametrize("key", STATUS)
def test_each_finding_but_a_remark_is_of_one_rule(key: str) -> None:
    kind = STATUS[key]
    labels = {"code": code_of(key), "severity": kind.severity, "hop": kind.hop}
    finding = frozenset({"__name__": "cdc_findings", **labels}.items())
    count = len(_alerts({finding: [(number * STEP_S, 1.0) for number in range(31)]}))
    assert count == (0 if kind.severity == Severity.INFO else 1)


def _series(metrics: Iterable[Metric]) -> dict[Any, Any]:
    """What Prometheus has if these metrics are so for half an hour."""
    return {
        frozenset({"__name__": sample.name, "instance": "run", **sample.labels}.items()): [
            (number * STEP_S, sample.value) for number in range(31)
        ]
        for metric in metrics
        for sample in metric.samples
    }


def _alerts(series: dict[Any, Any]) -> list[tuple[str, str]]:
    """The severity and the code of each alert that fires after half an hour."""
    labels = [
        dict(alert.labels)
        for rule in RULES.values()
        for alert in firing(rule, series, STEP_S, 1800)
    ]
    return sorted((label["severity"], label.get("code", "")) for label in labels)


if shutil.which("promtool"):

    def test_prometheus_says_the_same() -> None:
        subprocess.run(["promtool", "test", "rules", str(FILE)], check=True)


@pytest.mark.parametrize(
    "text",
    [
        "rate(cdc_restarts_total[5m]) > 1",
        "avg by (sink) (cdc_sink_up) == 0",
        "cdc_sink_up == 0 or cdc_sink_paused == 1",
        "cdc_sink_up == bool 0",
        "cdc_sink_up offset 5m == 0",
        "cdc_slot_lag_bytes % 2 > 0",
        "sum(cdc_sink_up) == 0",
        "cdc_sink_up * on (sink) group_left cdc_sink_paused > 0",
        "3 > 2",
    ],
)
def test_planted_what_is_not_understood_is_an_error(text: str) -> None:
    series = {frozenset({("__name__", "cdc_sink_up")}): [(0.0, 0.0)]}
    with pytest.raises(Unsupported):
        Query(text, series, 0.0).evaluate()
