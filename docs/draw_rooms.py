"""The picture of rooms and the table in docs/understand/rooms.md, drawn from the imports."""

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from docs import layered_picture

ROOT = Path(__file__).parents[1]
PAGE = Path(__file__).parent / "understand" / "rooms.md"
BEGIN, END = "<!-- drawn: python -m docs.generate -->\n", "<!-- end -->\n"
PACKAGES = ("cdc", "sinks", "connectors", "compose", "migrations", "sample")
Arrows = Mapping[str, set[str]]
"""The imported rooms by room."""


def room(module: str) -> str:
    """A room of `cdc` by the name of any of its modules."""
    return ".".join(module.split(".")[:2])


def module_name(path: Path) -> str:
    """The dotted name of a file; the folders beside `cdc` are packages of it, by links."""
    name = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
    return name if path.parts[0] == "cdc" else f"cdc.{name}"


@cache
def arrows() -> Arrows:
    """Every import between two rooms, wherever in a module it stands."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    names = {module_name(path.relative_to(ROOT)): path for path in paths}
    rooms: dict[str, set[str]] = {room(name): set() for name in names if name != "cdc"}
    for name, path in names.items():
        for imported in _imports(path.read_text(encoding="utf-8")):
            module = next(
                (name for name in (imported, imported.rpartition(".")[0]) if name in names), "cdc"
            )
            if module != "cdc" and room(module) != room(name):
                rooms[room(name)].add(room(module))
    return rooms


def _imports(source: str) -> Iterator[str]:
    """Dotted names: `from cdc import errors` is cdc.errors."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def order(arrows: Arrows) -> list[str]:
    """The rooms, each above all that it imports.

    Raises:
        CycleError: two rooms import each other, whatever lies between them.
    """
    return list(
        reversed(
            list(
                TopologicalSorter(
                    {name: sorted(arrows[name]) for name in sorted(arrows)}
                ).static_order()
            )
        )
    )


def reduced(arrows: Arrows) -> Arrows:
    """Remove the arrows that a way through other rooms stands for."""
    below: dict[str, set[str]] = {}
    for name in reversed(order(arrows)):
        below[name] = arrows[name].union(*(below[target] for target in arrows[name]))
    return {
        name: targets - set().union(*(below[target] for target in targets))
        for name, targets in arrows.items()
    }


def block(arrows: Arrows) -> str:
    """The place of the picture, and the table of all imports."""
    lines = ["![Rooms and their imports](rooms.svg)", "", "| room | imports |", "|---|---|"]
    lines += [
        f"| `{name}` | {', '.join(f'`{target}`' for target in sorted(arrows[name]))} |"
        for name in order(arrows)
    ]
    return "\n".join(lines) + "\n"


def picture() -> str:
    """The picture as SVG: it needs no script, so none of another host."""
    drawn = arrows()
    return layered_picture.draw(order(drawn), reduced(drawn), "Rooms and their imports")


def page() -> str:
    """The page with its table as the imports are now."""
    head, _, tail = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return f"{head}{BEGIN}\n{block(arrows())}\n{END}{tail.partition(END)[2]}"
