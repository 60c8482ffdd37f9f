"""What a run found: a table for people, JSON for machines, plots."""

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from bench.figure import Figure
from cdc.session import SETTINGS
from compose import versions

SERIES = ("limit", "rival", "ours")
PERCENTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}


def summary(figure: Figure) -> dict[str, Any]:
    """Median, least and greatest of each series, the ratio of the medians, percentiles, CPU seconds per million changes
    and peak memory by process.
    """
    series = {name: getattr(figure, name) for name in SERIES}
    found: dict[str, Any] = {
        name: {"median": statistics.median(values), "min": min(values), "max": max(values)}
        for name, values in series.items()
        if values
    }
    if figure.hops:
        found["hops"] = {hop: percentiles(values) for hop, values in figure.hops.items()}
    against = found.get(figure.against)
    if against and "ours" in found:
        found["ratio"] = found["ours"]["median"] / against["median"]
    if figure.costs:
        names = {name for cost in figure.costs for name in cost.cpu_s}
        found["cpu_s_per_million"] = {
            name: statistics.median(cost.cpu_s.get(name, 0.0) for cost in figure.costs) / figure.changes * 1e6
            for name in sorted(names)
        }
        found["peak_mb"] = {name: max(cost.peak_mb.get(name, 0.0) for cost in figure.costs) for name in sorted(names)}
    return found


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """The least value that so many of a hundred don't exceed."""
    ordered = sorted(values)
    return {
        name: ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")
        for name, share in PERCENTILES.items()
    }


def machine() -> dict[str, Any]:
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
        "cpu": model,
        "cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 2**30),
        "commit": head.stdout.strip(),
        "versions": {
            name: value for name, value in vars(versions).items() if name.isupper() and isinstance(value, str)
        },
        "spark": SETTINGS,
    }


def write(path: Path, scale: Mapping[str, Any], figures: Sequence[Figure]) -> None:
    """`scale` is how much of everything was measured."""
    found = [{**asdict(figure), **summary(figure)} for figure in figures]
    path.write_text(json.dumps({"scale": scale, **machine(), "figures": found}, indent=1))


def tables(figures: Sequence[Figure]) -> str:
    """Markdown, as the README has it: rates and costs, then latencies, as far as there are any."""
    lines = [_cells(figure) for figure in figures if not figure.hops]
    late = [_late(figure) for figure in figures if figure.hops]
    hops = next((list(figure.hops)[:-1] for figure in figures if figure.hops), [])
    found = [_aligned([["what", "limit", "rival", "ours", "ratio", "asked"], *lines])] if lines else []
    heads = ["commit to visible, s", *PERCENTILES, "asked", *(f"p50 {hop}" for hop in hops)]
    return "\n\n".join([*found, _aligned([heads, *late])] if late else found)


def told(figure: Figure) -> str:
    """What is printed as soon as it is known: all of a figure but its single values."""
    found, lines = summary(figure), [f"{figure.name}, {figure.unit}"]
    for name in (name for name in SERIES if name in found):
        lines.append(f"{name}: {', '.join(f'{what} {_shown(value)}' for what, value in found[name].items())}")
    for hop, values in found.get("hops", {}).items():
        lines.append(f"{hop}: {', '.join(f'{what} {_shown(value)}' for what, value in values.items())}")
    for what, by_process in (("CPU s per million", "cpu_s_per_million"), ("peak MB", "peak_mb")):
        if by_process in found:
            shown = (f"{name} {_shown(value)}" for name, value in found[by_process].items())
            lines.append(f"{what}: {', '.join(shown)}")
    return "\n    ".join(lines)


def _aligned(rows: list[list[str]]) -> str:
    """A table whose columns are as wide as they have to be; all but the first stand right."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    placed = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in (placed[0], rule, *placed[1:]))


def _cells(figure: Figure) -> list[str]:
    found = summary(figure)
    cells = [_shown(found[name]["median"]) if name in found else "" for name in SERIES]
    ratio = f"{found['ratio']:.2f} of {figure.against}" if "ratio" in found else ""
    goal = f"{'<=' if figure.at_most else '>='} {figure.goal:.2g}" if figure.goal else ""
    return [f"{figure.name}, {figure.unit}", *cells, ratio, goal]


def _late(figure: Figure) -> list[str]:
    hops = summary(figure)["hops"]
    visible = [_shown(hops["visible"][name]) for name in PERCENTILES]
    lost = f" ({figure.unseen} unseen)" if figure.unseen else ""
    asked = ", ".join(f"{most:g}" for most in figure.asked)
    return [figure.name + lost, *visible, asked, *(_shown(hops[hop]["p50"]) for hop in list(hops)[:-1])]


def _shown(value: float) -> str:
    return f"{value:,.{0 if value >= 10 else 2}f}"
