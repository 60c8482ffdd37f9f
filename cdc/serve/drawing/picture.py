"""Lay out the picture of a pipeline: boxes, arrows and labels with coordinates, for an SVG.

Two layouts, from left to right for wide windows and from top to bottom for narrow ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from cdc.serve.drawing.hops import Branch, Hops, Part

LONGEST = 26
"""Most characters of a line in a box; longer ones are cut, and the list beside has them whole."""
LINE = 18
"""Distance of two lines of text."""
LINES = 3
"""Lines of a sink's box of the usual height."""
BOX = 96
"""That height."""
APART = 20
"""Distance of two boxes."""
AROUND = (-28, -10, 20)
"""Where the lines of a level arrow stand: two above it, one below."""


@dataclass(frozen=True)
class Box:
    """A server: a rectangle with its name and its lines."""

    x: int
    y: int
    width: int
    height: int
    part: Part

    @property
    def lines(self) -> list[tuple[int, str]]:
        """Its lines, with the y of each."""
        return [
            (self.y + 46 + number * LINE, _cut(line)) for number, line in enumerate(self.part.lines)
        ]

    @property
    def title(self) -> str:
        """Its name."""
        return _cut(self.part.name)


@dataclass(frozen=True)
class Arrow:
    """A hop: a path with the lines of its numbers, and where they stand."""

    path: str
    part: Part
    x: int
    y: int
    anchor: str
    head: str
    shifts: tuple[int, ...] = (0, LINE, 2 * LINE)
    """How far below `y` each line stands."""
    returning: bool = False

    @property
    def lines(self) -> list[tuple[int, str]]:
        """Its lines, with the y of each."""
        lines = () if self.returning else self.part.lines
        return [
            (self.y + shift, _cut(line)) for shift, line in zip(self.shifts, lines, strict=False)
        ]


@dataclass(frozen=True)
class Picture:
    """All shapes of a layout, and its size."""

    name: str
    width: int
    height: int
    boxes: Sequence[Box]
    arrows: Sequence[Arrow]


def lay_out_wide(hops: Hops) -> Picture:
    """From left to right: three columns, a row for each sink."""
    box_width = 200
    gap = 230
    log_x = box_width + gap
    sinks_x = log_x + box_width + gap
    heights = [_box_height(branch.sink) for branch in hops.branches]
    height = max(BOX + APART, sum(heights) + APART * len(heights))
    middle = height // 2
    boxes = [
        Box(2, middle - 46, box_width, 92, hops.source),
        Box(log_x, middle - 46, box_width, 92, hops.kafka),
    ]
    arrows = [
        Arrow(
            f"M {box_width + 2} {middle} H {log_x - 8}",
            hops.capture,
            box_width + gap // 2,
            middle,
            "middle",
            _head(log_x, middle),
            AROUND,
        )
    ]
    top = APART // 2
    for branch, box_height in zip(hops.branches, heights, strict=True):
        y = top + BOX // 2
        boxes.append(Box(sinks_x, top, box_width, box_height, branch.sink))
        top += box_height + APART
        start, bend = log_x + box_width, log_x + box_width + 22
        path = f"M {start} {middle} H {bend} V {y} H {sinks_x - 8}"
        label_x = (bend + sinks_x) // 2
        head = _head(sinks_x, y)
        arrows.append(Arrow(path, branch.hop, label_x, y, "middle", head, AROUND))
        if branch.returns:
            path_back = f"M {sinks_x} {y + 36} H {bend - 10} V {middle + 30} H {start + 8}"
            arrows.append(_returning(branch, path_back, _left(start, middle + 30)))
    return Picture("wide", sinks_x + box_width + 2, height, boxes, arrows)


def lay_out_tall(hops: Hops) -> Picture:
    """From top to bottom: a line goes down from Kafka, each sink branches off it."""
    width, indent = 340, 44
    boxes = [Box(2, 2, width - 4, 88, hops.source)]
    arrows = [
        Arrow("M 22 90 V 160", hops.capture, indent, 108, "start", _down(22, 168)),
    ]
    boxes.append(Box(2, 168, width - 4, 88, hops.kafka))
    y = 256
    for branch in hops.branches:
        label_y, box_y = y + 22, y + 70
        middle = box_y + 46
        path = f"M 22 256 V {middle} H {indent - 8}"
        head = _head(indent, middle)
        arrows.append(Arrow(path, branch.hop, indent, label_y, "start", head))
        box_height = _box_height(branch.sink)
        boxes.append(Box(indent, box_y, width - indent - 2, box_height, branch.sink))
        if branch.returns:
            arrows.append(_returning(branch, f"M {indent} {middle + 24} H 10 V 266", _up(10, 258)))
        y = box_y + box_height
    return Picture("tall", width, y + 4, boxes, arrows)


def _box_height(part: Part) -> int:
    return BOX + LINE * max(0, len(part.lines) - LINES)


def _returning(branch: Branch, path: str, head: str) -> Arrow:
    """The way of documents back into Kafka, dashed, without numbers."""
    return Arrow(path, branch.hop, 0, 0, "start", head, returning=True)


def _head(x: int, y: int) -> str:
    """The head of an arrow that ends at (x, y) from the left."""
    return f"M {x - 10} {y - 6} L {x} {y} L {x - 10} {y + 6} Z"


def _down(x: int, y: int) -> str:
    """The head of an arrow that ends at (x, y) from above."""
    return f"M {x - 6} {y - 10} L {x} {y} L {x + 6} {y - 10} Z"


def _left(x: int, y: int) -> str:
    """The head of an arrow that ends at (x, y) from the right."""
    return f"M {x + 10} {y - 6} L {x} {y} L {x + 10} {y + 6} Z"


def _up(x: int, y: int) -> str:
    """The head of an arrow that ends at (x, y) from below."""
    return f"M {x - 6} {y + 10} L {x} {y} L {x + 6} {y + 10} Z"


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
