"""Lay out a plot of lag: a path with gaps where nothing was measured, for an SVG."""

from collections.abc import Sequence
from dataclasses import dataclass

from cdc.model.wording import duration
from cdc.serve.drawing.hops import lag_text
from cdc.serve.looks.lag_history import Series

WIDTH, HEIGHT = 360, 80
TOPS = (5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21_600, 43_200, 86_400)
"""Tops of the scale, in seconds. Less lag than the least isn't slow and stays near the ground."""


@dataclass(frozen=True)
class Plot:
    """A plot with its words. `path` may be empty: nothing was measured."""

    hop: str
    span: str
    path: str
    area: str
    top: str
    summary: str


def lay_out_plot(series: Series) -> Plot:
    """Make the path of a series, and say it in words."""
    top = _top(series.worst or 0.0)
    pieces = _pieces(series.values)
    lines = [_line(piece, top) for piece in pieces]
    return Plot(
        series.hop,
        series.span.name,
        " ".join(lines),
        " ".join(
            f"{line} L {_x(piece[-1][0])} {HEIGHT} L {_x(piece[0][0])} {HEIGHT} Z"
            for piece, line in zip(pieces, lines, strict=True)
        ),
        duration(top),
        _summary(series),
    )


def _summary(series: Series) -> str:
    measured = [value for value in series.values if value is not None]
    if not measured:
        return "not measured"
    latest = series.values[-1] if series.values[-1] is not None else series.values[-2]
    current = "not measured now" if latest is None else f"now {lag_text(latest)}"
    return f"{current}, at most {lag_text(max(measured))}"


def _top(worst: float) -> float:
    """Choose the top of the scale: the next round figure."""
    return float(next((top for top in TOPS if top >= worst), worst))


def _pieces(values: Sequence[float | None]) -> list[list[tuple[float, float]]]:
    """Split a series where nothing was measured: (place from 0 to 1, value) of each piece. A piece of
    one value gets a width.
    """
    pieces: list[list[tuple[float, float]]] = []
    previous: float | None = None
    step = 1 / max(1, len(values))
    for number, value in enumerate(values):
        if value is not None:
            if previous is None:
                pieces.append([(number * step, value)])
            pieces[-1].append(((number + 1) * step, value))
        previous = value
    return pieces


def _line(piece: Sequence[tuple[float, float]], top: float) -> str:
    points = [f"{_x(place)} {HEIGHT - HEIGHT * value / top:.1f}" for place, value in piece]
    return "M " + " L ".join(points)


def _x(place: float) -> str:
    return f"{place * WIDTH:.1f}"
