"""Each alert rule fires on samples on which it should, and is quiet on others.

The samples are in the form of Prometheus' own tool, so that it can be asked as well.
"""

import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

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
