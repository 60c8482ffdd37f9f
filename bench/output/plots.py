"""The figures as pictures: rates beside their limits, throughput over time, latencies by hop,
growth.
"""

from collections.abc import Callable, Sequence
from math import floor, log10
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.figure import Figure as Picture
from matplotlib.ticker import NullFormatter

from bench.batches import Span
from bench.output.figure import Figure

COLOURS = {"limit": "#b8c4ce", "rival": "#e0a458", "ours": "#2f6f9f"}
MEET_S = 0.05
SINKS = {"Kafka": "#b8c4ce", "cache": "#c8553d", "search": "#e0a458", "warehouse": "#2f6f9f"}


def draw(folder: Path, run: str, figures: Sequence[Figure]) -> None:
    """`<run>-rates.png`, -throughput, -latency and -growth: those that there are figures for."""
    pictures: dict[
        str, tuple[Callable[[Sequence[Figure]], Picture], Callable[[Figure], object]]
    ] = {
        "rates": (_rates, lambda figure: figure.unit.endswith("/s")),
        "throughput": (_throughput, lambda figure: figure.over_time),
        "latency": (_latency, lambda figure: figure.hops),
        "growth": (_growth, lambda figure: figure.unit.endswith("/change")),
    }
    for name, (make, matches) in pictures.items():
        if chosen := [figure for figure in figures if matches(figure)]:
            picture = make(chosen)
            picture.savefig(folder / f"{run}-{name}.png", dpi=110)
            plt.close(picture)


def _rates(figures: Sequence[Figure]) -> Picture:
    picture, axes = plt.subplots(figsize=(9, 0.42 * len(figures) + 1), layout="constrained")
    _bars(axes, figures)
    axes.set_xscale("log")
    least = min(value for figure in figures for name in COLOURS for value in getattr(figure, name))
    axes.set_xlim(left=10 ** floor(log10(least)))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("records, rows or changes per second (medians)")
    return picture


def _growth(figures: Sequence[Figure]) -> Picture:
    picture, axes = plt.subplots(figsize=(9, 0.42 * len(figures) + 1), layout="constrained")
    _bars(axes, figures, {"limit": "small table", "ours": "large table"})
    axes.set_xlabel("µs per change (medians)")
    return picture


def _bars(axes: Any, figures: Sequence[Figure], labels: dict[str, str] | None = None) -> None:
    """Draw the bars of a figure side by side, without gaps for the series that it lacks."""
    labels, drawn = labels or {name: name for name in COLOURS}, set()
    for row_number, figure in enumerate(figures):
        series = [(name, median(values)) for name in labels if (values := getattr(figure, name))]
        for place, (name, value) in enumerate(series):
            label = labels[name] if name not in drawn else None
            axes.barh(
                row_number + 0.27 * (place - (len(series) - 1) / 2),
                value,
                0.26,
                label=label,
                color=COLOURS[name],
            )
            drawn.add(name)
    axes.set_yticks(range(len(figures)), [figure.name for figure in figures])
    axes.margins(y=0.01)
    axes.invert_yaxis()
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))


def _throughput(figures: Sequence[Figure]) -> Picture:
    """A row for each drain: how fast records came into Kafka, and into each view."""
    picture, rows = plt.subplots(
        len(figures), 1, figsize=(9, 2.1 * len(figures) + 0.6), squeeze=False, layout="constrained"
    )
    for axes, figure in zip(rows[:, 0], figures, strict=True):
        for name, spans in figure.over_time.items():
            axes.plot(*zip(*_steps(spans), strict=True), label=name, color=SINKS[name])
        axes.set_title(figure.name, loc="left", fontsize="medium")
        axes.set_ylabel("records/s")
    rows[0, 0].legend(
        frameon=False, ncols=4, loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0
    )
    rows[-1, 0].set_xlabel("seconds since the first record in Kafka")
    return picture


def _steps(spans: Sequence[Span]) -> list[tuple[float, float]]:
    """The corners of a line that is at zero between spans that don't meet."""
    corners = [(min(0.0, *(began for began, _, _ in spans)), 0.0)] if spans else [(0.0, 0.0)]
    for began, end, rate in spans:
        if began - corners[-1][0] > MEET_S:
            corners += [(corners[-1][0], 0.0), (began, 0.0)]
        corners += [(began, rate), (end, rate)]
    return [*corners, (corners[-1][0], 0.0)]


def _latency(figures: Sequence[Figure]) -> Picture:
    """A panel for each sink and rate: the share of rows that had come so far."""
    sinks = list(dict.fromkeys(figure.name.partition(" ")[0] for figure in figures))
    across = -(-len(figures) // len(sinks))
    size = (max(6, 3 * across + 1), 2.2 * len(sinks) + 0.8)
    picture, rows = plt.subplots(
        len(sinks), across, figsize=size, squeeze=False, sharex=True, sharey=True
    )
    picture.set_layout_engine("constrained")
    for down, sink in enumerate(sinks):
        for axes, figure in zip(
            rows[down], (figure for figure in figures if figure.name.startswith(sink)), strict=False
        ):
            for hop, values in figure.hops.items():
                shares = [100 * (rank + 1) / len(values) for rank in range(len(values))]
                axes.plot(sorted(values), shares, label=hop)
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter("{x:g}")
            axes.set_title(figure.name, fontsize="medium")
        rows[down, 0].set_ylabel("% of the rows watched")
    rows[-1, across // 2].set_xlabel("seconds since the commit")
    picture.legend(
        *rows[0, 0].get_legend_handles_labels(), frameon=False, ncols=4, loc="outside upper right"
    )
    return picture
