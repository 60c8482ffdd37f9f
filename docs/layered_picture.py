"""Draw arrows between names as an SVG of rows, each name above all that it points to."""

from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise

BOX_WIDTH, BOX_HEIGHT, LANE_WIDTH, GAP, ROW_HEIGHT, MARGIN = 118, 26, 16, 14, 66, 12
SWEEPS = 8
"""Passes that order the rows, down and up in turns, so that fewer arrows cross."""
HEAD = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{label}">
<style>rect {{ fill: #eef2f7; stroke: #52606d; }} text {{ font: 13px sans-serif; text-anchor: middle; fill: #102a43; }}
path {{ fill: none; stroke: #829ab1; stroke-width: 1.2; marker-end: url(#tip); }}</style>
<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">
<polygon points="0,0 8,4 0,8" fill="#829ab1"/></marker></defs>
<rect x="0" y="0" width="{width}" height="{height}" style="fill: #fff; stroke: none"/>
"""
Stop = tuple[str, ...]
"""A name, or an arrow's (name, target, row) where it passes a row between both."""


def draw(names: Sequence[str], arrows: Mapping[str, set[str]], label: str) -> str:
    """Draw the picture.

    names: each before all that it points to.
    """
    rows, routes = _place_in_rows(names, arrows)
    for sweep in range(SWEEPS):
        _sort_rows(rows, routes, downwards=sweep % 2 == 0)
    width = max(sum(_width(stop) + GAP for stop in row) for row in rows) + 2 * MARGIN
    points = {
        stop: (x, MARGIN + number * ROW_HEIGHT)
        for number, row in enumerate(rows)
        for stop, x in _spread(row, width)
    }
    parts = [_path([points[stop] for stop in route]) for route in routes]
    parts += [_box(name, *points[(name,)]) for name in names]
    height = MARGIN * 2 + (len(rows) - 1) * ROW_HEIGHT + BOX_HEIGHT
    head = HEAD.format(width=width, height=height, label=escape(label))
    return head + "\n".join(parts) + "\n</svg>\n"


def _place_in_rows(
    names: Sequence[str], arrows: Mapping[str, set[str]]
) -> tuple[list[list[Stop]], list[list[Stop]]]:
    """Place each name in the row above the highest of its targets; return rows and ways."""
    level: dict[str, int] = {}
    for name in reversed(names):
        level[name] = 1 + max((level[target] for target in arrows[name]), default=-1)
    top = max(level.values())
    rows: list[list[Stop]] = [[] for _ in range(top + 1)]
    routes = []
    for name in names:
        rows[top - level[name]].append((name,))
    for name in names:
        for target in sorted(arrows[name]):
            passed = range(top - level[name] + 1, top - level[target])
            lane: list[Stop] = [(name, target, str(number)) for number in passed]
            for number, stop in zip(passed, lane, strict=True):
                rows[number].append(stop)
            routes.append([(name,), *lane, (target,)])
    return rows, routes


def _sort_rows(
    rows: list[list[Stop]], routes: Sequence[Sequence[Stop]], *, downwards: bool
) -> None:
    """Sort each row by the mean place of what its stops are joined to in the row before."""
    joined: dict[Stop, list[Stop]] = {}
    for route in routes:
        for upper, lower in pairwise(route):
            stop, neighbour = (lower, upper) if downwards else (upper, lower)
            joined.setdefault(stop, []).append(neighbour)
    places: dict[Stop, float] = {}
    for row in rows if downwards else reversed(rows):
        places_now = {stop: (index + 0.5) / len(row) for index, stop in enumerate(row)}
        means = {
            stop: sum(places[neighbour] for neighbour in joined[stop]) / len(joined[stop])
            if stop in joined
            else places_now[stop]
            for stop in row
        }
        row.sort(key=means.__getitem__)
        places |= {stop: (index + 0.5) / len(row) for index, stop in enumerate(row)}


def _width(stop: Stop) -> int:
    return BOX_WIDTH if len(stop) == 1 else LANE_WIDTH


def _spread(row: Sequence[Stop], width: int) -> list[tuple[Stop, float]]:
    """Spread a row over the width of the picture: each stop with its centre."""
    room = (width - 2 * MARGIN - sum(map(_width, row))) / len(row)
    centres, x = [], MARGIN + room / 2
    for stop in row:
        centres.append((stop, round(x + _width(stop) / 2, 1)))
        x += _width(stop) + room
    return centres


def _path(points: Sequence[tuple[float, float]]) -> str:
    """Draw an arrow from below its first point to above its last one."""
    x, y = points[0]
    y += BOX_HEIGHT
    text = f"M{x},{y}"
    for number, (to_x, to_y) in enumerate(points[1:], 2):
        middle = (y + to_y) / 2
        text += f" C{x},{middle} {to_x},{middle} {to_x},{to_y}"
        x, y = to_x, to_y
        if number < len(points):
            y += BOX_HEIGHT
            text += f" V{y}"
    return f'<path d="{text}"/>'


def _box(name: str, x: float, y: float) -> str:
    corner = f'x="{round(x - BOX_WIDTH / 2, 1)}" y="{y}"'
    box = f'<rect {corner} width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="4"/>'
    return f'{box}<text x="{x}" y="{y + 18}">{escape(name)}</text>'
