"""Points, lines and shapes: structs of numbers, or well-known binaries."""

import struct
from typing import Any

from msgspec import Struct

from cdc.codec.types.kind import Convert, TypeCodec
from cdc.codec.types.numeric import Float, json_number
from cdc.codec.types.text import to_bytes

NUMBERS = "to_json(string_to_array(translate({0}::text, '()[]<>{{}}', ''), ',')::float8[])"


class Point(Struct):
    """A point as the connector writes it."""

    x: Float
    y: Float


class Line(Struct):
    """A line ax + by + c = 0 as the connector writes it."""

    a: Float
    b: Float
    c: Float


class Circle(Struct):
    """A circle as the connector writes it."""

    center: Point
    radius: Float


class Shape(Struct):
    """A segment, box or polygon: base64 of its well-known binary."""

    wkb: str


class Path(Struct):
    """A path: base64 of its well-known binary; extensions say whether it is closed."""

    wkb: str
    extensions: dict[str, str | None] | None = None


def coordinates(shape: Shape | Path, header: int) -> list[float]:
    """The doubles of a well-known binary after its header of that many bytes."""
    binary = to_bytes(shape.wkb)
    count, remainder = divmod(len(binary) - header, 8)
    if count < 1 or remainder:
        raise ValueError("no shape")
    return list(struct.unpack_from(f"<{count}d", binary, header))


def point(value: Point) -> list[float]:
    """Convert to [x, y]."""
    return [float(value.x), float(value.y)]


def line(value: Line) -> list[float]:
    """Convert to [a, b, c]."""
    return [float(value.a), float(value.b), float(value.c)]


def circle(value: Circle) -> list[float]:
    """Convert to [x, y, radius]."""
    return [*point(value.center), float(value.radius)]


def segment(shape: Shape) -> list[float]:
    """Convert to the coordinates of both ends."""
    return coordinates(shape, 9)


def box(shape: Shape) -> list[float]:
    """Upper right and lower left of the five corners that the connector sends."""
    corners = coordinates(shape, 13)
    return corners[:2] + corners[4:6]


def polygon(shape: Shape) -> list[float]:
    """Without the first point's repetition at the end."""
    return coordinates(shape, 13)[:-2]


def path(shape: Path) -> dict[str, Any]:
    """Convert to the struct of the column: closed, points."""
    closed = (shape.extensions or {}).get("closed")
    return {
        "closed": {"true": True, "false": False}.get(closed or ""),
        "points": coordinates(shape, 9),
    }


def numbers(values: list[float]) -> list[float | str]:
    """Write doubles as JSON: words where JSON has no number."""
    return [json_number(value) for value in values]


def path_document(value: dict[str, Any]) -> dict[str, Any]:
    """Write the struct of a path as a document holds it."""
    return {"closed": value["closed"], "points": numbers(value["points"])}


def _numbers(wire: type[Struct], convert: Convert) -> TypeCodec:
    return TypeCodec(
        "geometric",
        wire=wire,
        document=lambda value: numbers(convert(value)),
        column="array<double>",
        to_column=convert,
        from_column=numbers,
        source=NUMBERS,
        compare="doubles",
    )


POINT = _numbers(Point, point)
LINE = _numbers(Line, line)
CIRCLE = _numbers(Circle, circle)
SEGMENT = _numbers(Shape, segment)
BOX = _numbers(Shape, box)
POLYGON = _numbers(Shape, polygon)
PATH = TypeCodec(
    "path",
    wire=Path,
    document=lambda value: path_document(path(value)),
    column="struct<closed boolean, points array<double>>",
    to_column=path,
    from_column=path_document,
    source=f"CASE WHEN {{0}} IS NOT NULL THEN json_build_object('closed', isclosed({{0}}), 'points', {NUMBERS}) END",
    compare="path",
)
