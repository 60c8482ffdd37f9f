"""The report of a run: a table for people, JSON for machines, plots."""

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from math import nan
from pathlib import Path
from typing import Any

import psutil

from bench.output.figure import Figure
from cdc.compose import versions
from cdc.spark.session import SETTINGS

SERIES = ("limit", "rival", "ours")
GOAL_PERCENTILES = ("p50", "p99")
"""The percentiles whose greatest values `Figure.asked` are."""
PERCENTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}


def summary(figure: Figure) -> dict[str, Any]:
    """Median, least and greatest of each series, the ratio of the medians, percentiles, CPU seconds
    per million changes and peak memory by process.
    """
    series = {name: getattr(figure, name) for name in SERIES}
    numbers: dict[str, Any] = {
        name: {"median": statistics.median(values), "min": min(values), "max": max(values)}
        for name, values in series.items()
        if values
    }
    if figure.hops:
        numbers["hops"] = {hop: percentiles(values) for hop, values in figure.hops.items()}
    against = numbers.get(figure.against)
    if against and "ours" in numbers:
        numbers["ratio"] = numbers["ours"]["median"] / against["median"]
    if figure.costs:
        names = {name for cost in figure.costs for name in cost.cpu_s}
        numbers["cpu_s_per_million"] = {
            name: statistics.median(cost.cpu_s.get(name, 0.0) for cost in figure.costs)
            / figure.changes
            * 1e6
            for name in sorted(names)
        }
        numbers["peak_mb"] = {
            name: max(cost.peak_mb.get(name, 0.0) for cost in figure.costs)
            for name in sorted(names)
        }
    return numbers


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """The least value that so many of a hundred don't exceed."""
    ordered = sorted(values)
    return {
        name: ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")
        for name, share in PERCENTILES.items()
    }


def machine() -> dict[str, Any]:
    model = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    head = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
        "cpu": model,
        "cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 2**30),
        "commit": head.stdout.strip(),
        "versions": {
            name: value
            for name, value in vars(versions).items()
            if name.isupper() and isinstance(value, str)
        },
        "spark": SETTINGS,
    }


def write(path: Path, scale: Mapping[str, Any], figures: Sequence[Figure]) -> None:
    """`scale` is how much of everything was measured."""
    entries = [{**asdict(figure), **summary(figure), "met": verdict(figure)} for figure in figures]
    path.write_text(json.dumps({"scale": scale, **machine(), "figures": entries}, indent=1))


def tables(figures: Sequence[Figure]) -> str:
    """Markdown, as the documentation has it: rates and costs, then latencies, as far as there are
    any.

    `alone` is what to give to `python -m bench --only` to measure a line again.
    """
    lines = [_cells(figure) for figure in figures if not figure.hops]
    late = [figure for figure in figures if figure.hops]
    hops = list(dict.fromkeys(hop for figure in late for hop in figure.hops if hop != "visible"))
    rates = [["what", *SERIES, "ratio", "asked", "met", "alone"], *lines]
    heads = [
        "commit to visible, s",
        *PERCENTILES,
        "asked",
        "met",
        *(f"p50 {hop}" for hop in hops),
        "alone",
    ]
    parts = [rates] if lines else []
    return "\n\n".join(
        map(
            _aligned,
            [*parts, [heads, *(_late(figure, hops) for figure in late)]] if late else parts,
        )
    )


def verdict(figure: Figure) -> str:
    """Whether all that is asked of a figure is reached: yes or no, or nothing where nothing is
    asked.
    """
    numbers = summary(figure)
    if figure.hops:
        pairs = [
            (numbers["hops"]["visible"][name], most)
            for name, most in zip(GOAL_PERCENTILES, figure.asked, strict=False)
        ]
        reached = [value <= most for value, most in pairs]
    else:
        reached = [
            value <= aim if figure.at_most else value >= aim
            for value, aim in (
                (numbers.get("ratio", nan), figure.goal),
                (numbers["ours"]["median"], figure.rate),
            )
            if aim
        ]
    return ("yes" if all(reached) else "no") if reached else ""


def describe(figure: Figure) -> str:
    """Return the text that is printed as soon as a figure is known: all of it but its single
    values.
    """
    numbers, lines = summary(figure), [f"{figure.name}, {figure.unit}"]
    for name in (name for name in SERIES if name in numbers):
        lines.append(
            f"{name}: {', '.join(f'{statistic} {_shown(value)}' for statistic, value in numbers[name].items())}"
        )
    for hop, values in numbers.get("hops", {}).items():
        lines.append(
            f"{hop}: {', '.join(f'{statistic} {_shown(value)}' for statistic, value in values.items())}"
        )
    for label, by_process in (("CPU s per million", "cpu_s_per_million"), ("peak MB", "peak_mb")):
        if by_process in numbers:
            shown = (f"{name} {_shown(value)}" for name, value in numbers[by_process].items())
            lines.append(f"{label}: {', '.join(shown)}")
    return "\n    ".join(lines)


def _aligned(rows: list[list[str]]) -> str:
    """A table whose columns are as wide as they have to be; all but the first stand right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    placed = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in (placed[0], rule, *placed[1:]))


def _cells(figure: Figure) -> list[str]:
    numbers = summary(figure)
    cells = [_shown(numbers[name]["median"]) if name in numbers else "" for name in SERIES]
    ratios = (
        f"{numbers['ours']['median'] / numbers[name]['median']:.2f} of {name}"
        for name in SERIES[:-1]
        if name in numbers
    )
    sign = "<=" if figure.at_most else ">="
    goals = [f"{sign} {figure.goal:.2g} of {figure.against}"] if figure.goal else []
    rates = [f"{sign} {_shown(figure.rate)}"] if figure.rate else []
    goals_cell = ", ".join([*goals, *rates])
    return [
        f"{figure.name}, {figure.unit}",
        *cells,
        ", ".join(ratios),
        goals_cell,
        verdict(figure),
        figure.part,
    ]


def _late(figure: Figure, hops: Sequence[str]) -> list[str]:
    hop_numbers = summary(figure)["hops"]
    visible = [_shown(hop_numbers["visible"][name]) for name in PERCENTILES]
    lost = f" ({figure.unseen} unseen)" if figure.unseen else ""
    limits = ", ".join(_shown(most) for most in figure.asked)
    medians = (_shown(hop_numbers[hop]["p50"]) if hop in hop_numbers else "" for hop in hops)
    return [figure.name + lost, *visible, limits, verdict(figure), *medians, figure.part]


def _shown(value: float) -> str:
    return f"{value:,.{0 if value >= 10 else 2}f}"
