"""Tests of alert rules, in the form of `promtool test rules`: the rules over samples, and what alerts
at a moment.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.support.promql import UNITS_S, Labels, Query, Samples

SERIES = re.compile(r"(?P<metric>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})?")
RUN = re.compile(r"(?P<first>-?[\d.]+|_)(?P<step>[+-][\d.]+)?(?:x(?P<times>\d+))?")


@dataclass(frozen=True)
class Alert:
    """An alert that fires: its rule, its labels without that, its annotations."""

    name: str
    labels: Labels
    annotations: Labels


def seconds(text: str | int) -> float:
    """Seconds of a duration such as 90s, 2m or 1h30m."""
    return sum(
        float(count) * UNITS_S[unit] for count, unit in re.findall(r"(\d+)([smh])", str(text))
    )


def series_of(case: Mapping[str, Any]) -> dict[Labels, Samples]:
    """The samples of a test case, by labels."""
    step_s = seconds(case["interval"])
    series: dict[Labels, Samples] = {}
    for entry in case["input_series"]:
        match = SERIES.fullmatch(entry["series"])
        assert match, entry["series"]
        pairs = re.findall(r'(\w+)="([^"]*)"', match["labels"] or "")
        values = list(_values(entry["values"]))
        series[frozenset([("__name__", match["metric"]), *pairs])] = [
            (number * step_s, value) for number, value in enumerate(values) if value is not None
        ]
    return series


def _values(text: str) -> Iterator[float | None]:
    """The values of a notation such as `1x10`, `0+5x10` or `1 _ 3`."""
    for word in text.split():
        match = RUN.fullmatch(word)
        assert match, word
        step = float(match["step"] or 0)
        # A value is followed by so many further ones; of what is absent there are so many.
        times = int(match["times"] or 0) + (1 if match["first"] != "_" or not match["times"] else 0)
        for number in range(times):
            yield None if match["first"] == "_" else float(match["first"]) + number * step


def firing(
    rule: Mapping[str, Any], series: Mapping[Labels, Samples], step_s: float, at_s: float
) -> set[Alert]:
    """The alerts of a rule that fire at a moment, if it is evaluated every `step_s` from 0 on."""
    wait_s, keep_s = seconds(rule.get("for", 0)), seconds(rule.get("keep_firing_for", 0))
    since: dict[Labels, float] = {}
    values: dict[Labels, float] = {}
    absent_since: dict[Labels, float] = {}
    alerts: set[Labels] = set()
    for number in range(int(at_s // step_s) + 1):
        moment_s = number * step_s
        current = Query(rule["expr"], series, moment_s).evaluate()
        values |= current
        absent_since = {
            labels: absent_since.get(labels, moment_s) for labels in alerts - current.keys()
        }
        alerts = {labels for labels, began_s in absent_since.items() if moment_s - began_s < keep_s}
        since = {labels: since.get(labels, moment_s) for labels in alerts | current.keys()}
        alerts |= {labels for labels in current if moment_s - since[labels] >= wait_s}
    return {_alert(rule, labels, values[labels]) for labels in alerts}


def _alert(rule: Mapping[str, Any], labels: Labels, value: float) -> Alert:
    own = {name: text for name, text in labels if name != "__name__"}
    annotations = {name: expand(text, own, value) for name, text in rule["annotations"].items()}
    return Alert(
        rule["alert"],
        frozenset({**own, **rule["labels"]}.items()),
        frozenset(annotations.items()),
    )


def expand(template: str, labels: Mapping[str, str], value: float) -> str:
    """Expand the templates that our annotations use; any other is an error."""

    def expanded(match: "re.Match[str]") -> str:
        words = match[1].strip()
        if words.startswith("$labels."):
            return labels.get(words.removeprefix("$labels."), "")
        formats = {
            "$value": f"{value:g}",
            "$value | humanizeDuration": _duration(value),
            "$value | humanize1024": _binary(value),
        }
        return formats[words]

    return re.sub(r"\{\{(.*?)\}\}", expanded, template)


def _duration(value: float) -> str:
    minutes, remaining_s = divmod(int(value), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h {minutes}m {remaining_s}s"
    return f"{minutes}m {remaining_s}s" if minutes else f"{remaining_s}s"


def _binary(value: float) -> str:
    prefixes = ["", "ki", "Mi", "Gi", "Ti"]
    while abs(value) >= 1024 and len(prefixes) > 1:
        value /= 1024
        prefixes.pop(0)
    return f"{value:.4g}{prefixes[0]}"
