"""What a run found: a table for people, JSON for machines, plots."""

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from bench.figure import Figure
from compose import versions


def summary(figure: Figure) -> dict[str, Any]:
    """Median, least and greatest of each series, the ratio of the medians, CPU seconds per million and peak memory."""
    series = {name: getattr(figure, name) for name in ("limit", "rival", "ours")}
    found: dict[str, Any] = {
        name: {"median": statistics.median(values), "min": min(values), "max": max(values)}
        for name, values in series.items()
        if values
    }
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
    }


def write(path: Path, size: str, figures: Sequence[Figure]) -> None:
    found = [{**asdict(figure), **summary(figure)} for figure in figures]
    path.write_text(json.dumps({"size": size, **machine(), "figures": found}, indent=1))


def table(figures: Sequence[Figure]) -> str:
    """Markdown, as the README has it."""
    lines = [
        "| what | limit | rival | ours | ratio | asked |",
        "|---|---|---|---|---|---|",
    ]
    for figure in figures:
        found = summary(figure)
        cells = [_shown(found.get(name)) for name in ("limit", "rival", "ours")]
        ratio = f"{found['ratio']:.2f} of {figure.against}" if "ratio" in found else ""
        least = "at most" if figure.against == "most" else "at least"
        goal = f"{least} {figure.goal:.2g}" if figure.goal else ""
        lines.append(f"| {figure.name}, {figure.unit} | {' | '.join(cells)} | {ratio} | {goal} |")
    return "\n".join(lines)


def _shown(one: dict[str, float] | None) -> str:
    if one is None:
        return ""
    digits = 0 if one["median"] >= 10 else 2
    return f"{one['median']:,.{digits}f}"
