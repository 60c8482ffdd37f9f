"""The figures as pictures: rates beside their limits, latencies as distributions."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.figure import Figure as Picture

from bench.figure import Figure

COLOURS = {"limit": "#b8c4ce", "rival": "#e0a458", "ours": "#2f6f9f"}


def draw(folder: Path, size: str, figures: Sequence[Figure]) -> None:
    """`<size>-rates.png` and `<size>-latency.png`, those that there are figures for."""
    rates = [figure for figure in figures if figure.unit.endswith("/s")]
    if rates:
        _rates(folder / f"{size}-rates.png", rates)
    if any(figure.samples for figure in figures):
        _latency(folder / f"{size}-latency.png", [figure for figure in figures if figure.samples])


def _rates(path: Path, figures: Sequence[Figure]) -> None:
    picture, axes = plt.subplots(figsize=(9, 0.7 * len(figures) + 1.2))
    for place, (name, colour) in enumerate(COLOURS.items()):
        held = [(at, median(values)) for at, one in enumerate(figures) if (values := getattr(one, name))]
        axes.barh([at + 0.27 * place for at, _ in held], [rate for _, rate in held], 0.26, label=name, color=colour)
    axes.set_yticks([at + 0.27 for at in range(len(figures))], [figure.name for figure in figures])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("records, rows or changes per second (medians)")
    axes.legend(frameon=False)
    _save(picture, path)


def _latency(path: Path, figures: Sequence[Figure]) -> None:
    picture, axes = plt.subplots(figsize=(9, 3.5))
    for figure in figures:
        ordered = sorted(figure.samples)
        shares = [100 * (at + 1) / len(ordered) for at in range(len(ordered))]
        axes.plot(ordered, shares, label=figure.name.partition(",")[0])
    axes.set_xscale("log")
    axes.set_xlabel("seconds from commit to visible")
    axes.set_ylabel("% of the rows watched")
    axes.legend(frameon=False)
    _save(picture, path)


def _save(picture: Picture, path: Path) -> None:
    picture.tight_layout()
    picture.savefig(path, dpi=110)
    plt.close(picture)
