"""The picture of rooms and the table in docs/understand/rooms.md, drawn from the imports: `python -m
docs.draw_rooms` writes them.
"""

import ast
from collections.abc import Iterator, Mapping
from graphlib import TopologicalSorter
from pathlib import Path

from docs import layered_picture

ROOT = Path(__file__).parents[1]
PAGE = Path(__file__).parent / "understand" / "rooms.md"
PICTURE = PAGE.with_suffix(".svg")
BEGIN, END = "<!-- drawn: python -m docs.draw_rooms -->\n", "<!-- end -->\n"
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


def arrows(root: Path = ROOT) -> Arrows:
    """Every import between two rooms, wherever in a module it stands."""
    paths = [path for package in PACKAGES for path in sorted((root / package).rglob("*.py"))]
    names = {module_name(path.relative_to(root)): path for path in paths}
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
    lines = [f"![Rooms and their imports]({PICTURE.name})", "", "| room | imports |", "|---|---|"]
    lines += [
        f"| `{name}` | {', '.join(f'`{target}`' for target in sorted(arrows[name]))} |"
        for name in order(arrows)
    ]
    return "\n".join(lines) + "\n"


def picture(arrows: Arrows) -> str:
    """The picture as SVG: it needs no script, so none of another host."""
    return layered_picture.draw(order(arrows), reduced(arrows), "Rooms and their imports")


def page(text: str, arrows: Arrows) -> str:
    """A page with its picture as the imports are now."""
    head, _, tail = text.partition(BEGIN)
    return f"{head}{BEGIN}\n{block(arrows)}\n{END}{tail.partition(END)[2]}"


if __name__ == "__main__":
    PICTURE.write_text(picture(arrows()), encoding="utf-8")
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), arrows()), encoding="utf-8")
