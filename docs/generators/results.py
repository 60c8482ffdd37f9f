"""performance/results.md: the last stored run of the bench, from bench/results/M.json."""

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

STORED = Path(__file__).parents[2] / "bench" / "results" / "M.json"
SERIES = ("limit", "rival", "ours")


def page() -> str:
    """Return the whole text."""
    run = json.loads(STORED.read_text())
    return "\n\n".join(_parts(run)) + "\n"


def _parts(run: Mapping[str, Any]) -> Iterator[str]:
    yield "# Results"
    yield (
        "Every figure of the run that is stored in `bench/results/M.json`: medians, with the least and the greatest\n"
        "value where there are several. Made by `python -m docs.generate`; a test compares them.\n"
        "[Method](method.md) says what each part measures, [figures](figures.md) what is aimed at."
    )
    yield (
        f"Measured on {run['date']} UTC of commit {run['commit']}, on {run['cores']} cores ({run['cpu']}) with"
        f" {run['memory_gb']} GB.\n" + _versions(run["versions"])
    )
    rates = [figure for figure in run["figures"] if not figure["hops"]]
    late = [figure for figure in run["figures"] if figure["hops"]]
    yield _table(
        ["figure", *SERIES, "ratio", "asked", "met", "part"], [_rate(figure) for figure in rates]
    )
    hops = list(dict.fromkeys(hop for figure in late for hop in figure["hops"] if hop != "visible"))
    heads = [
        "commit to visible, s",
        "p50",
        "p95",
        "p99",
        "asked",
        "met",
        *(f"p50 {hop}" for hop in hops),
        "part",
    ]
    yield _table(heads, [_latency(figure, hops) for figure in late])


def _versions(versions: Mapping[str, str]) -> str:
    entries = (
        f"{name.capitalize().replace('_', ' ')} {version}" for name, version in versions.items()
    )
    return textwrap.fill(f"{', '.join(entries)}.", 118)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows))


def _rate(figure: Mapping[str, Any]) -> list[str]:
    sign = "at most" if figure["at_most"] else "at least"
    base = f" of {figure['against']}" if figure["against"] else ""
    goals = [f"{sign} {figure['goal']:.2g}{base}"] if figure["goal"] else []
    goals += [f"{sign} {_number(figure['rate'])}"] if figure.get("rate") else []
    ratio = f"{figure['ratio']:.2f}" if figure.get("ratio") else ""
    series = (_spread(figure[name]) for name in SERIES)
    return [
        f"{figure['name']}, {figure['unit']}",
        *series,
        ratio,
        ", ".join(goals),
        figure["met"],
        figure["part"],
    ]


def _latency(figure: Mapping[str, Any], hops: Sequence[str]) -> list[str]:
    visible = figure["hops"]["visible"]
    limits = ", ".join(_number(most) for most in figure["asked"])
    medians = (_number(figure["hops"][hop]["p50"]) if hop in figure["hops"] else "" for hop in hops)
    percentiles = (_number(visible[name]) for name in ("p50", "p95", "p99"))
    return [figure["name"], *percentiles, limits, figure["met"], *medians, figure["part"]]


def _spread(series: Mapping[str, float]) -> str:
    if not series:
        return ""
    alone = series["min"] == series["max"]
    spread = "" if alone else f" ({_number(series['min'])} to {_number(series['max'])})"
    return _number(series["median"]) + spread


def _number(value: float) -> str:
    return f"{value:,.{0 if value >= 10 else 2}f}"
