"""The picture of rooms in docs/understand/rooms.md, drawn from the imports: `python -m
docs.draw_rooms` writes it.
"""

import ast
from collections.abc import Iterator, Mapping
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = Path(__file__).parent / "understand" / "rooms.md"
BEGIN, END = "<!-- drawn: python -m docs.draw_rooms -->\n", "<!-- end -->\n"
PACKAGES = ("cdc", "sinks", "connectors", "compose", "migrations", "sample")
Arrows = Mapping[str, set[str]]
"""By room, those that it imports."""


def room(module: str) -> str:
    """A room of `cdc`, any other package as a whole."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "cdc" else parts[0]


def arrows(root: Path = ROOT) -> Arrows:
    """Every import between two rooms, wherever in a module it stands."""
    paths = [path for package in PACKAGES for path in sorted((root / package).rglob("*.py"))]
    names = {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
        for path in paths
    }
    found: dict[str, set[str]] = {room(name): set() for name in names if name != "cdc"}
    for name, path in names.items():
        for imported in _imports(path.read_text(encoding="utf-8")):
            known = next(
                (one for one in (imported, imported.rpartition(".")[0]) if one in names), "cdc"
            )
            if known != "cdc" and room(known) != room(name):
                found[room(name)].add(room(known))
    return found


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
                    {one: sorted(arrows[one]) for one in sorted(arrows)}
                ).static_order()
            )
        )
    )


def reduced(arrows: Arrows) -> Arrows:
    """Without those arrows that a way through other rooms stands for."""
    below: dict[str, set[str]] = {}
    for one in reversed(order(arrows)):
        below[one] = arrows[one].union(*(below[other] for other in arrows[one]))
    return {
        one: others - set().union(*(below[other] for other in others))
        for one, others in arrows.items()
    }


def block(arrows: Arrows) -> str:
    """The picture, and the table of all imports."""
    shown = reduced(arrows)
    lines = ["```mermaid", "flowchart TD"]
    lines += [f'    {_id(one)}["{one}"]' for one in order(arrows)]
    lines += [
        f"    {_id(one)} --> {_id(other)}" for one in order(arrows) for other in sorted(shown[one])
    ]
    lines += ["```", "", "| room | imports |", "|---|---|"]
    lines += [
        f"| `{one}` | {', '.join(f'`{other}`' for other in sorted(arrows[one]))} |"
        for one in order(arrows)
    ]
    return "\n".join(lines) + "\n"


def _id(name: str) -> str:
    return name.replace(".", "_")


def page(text: str, arrows: Arrows) -> str:
    """A page with its picture as the imports are now."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{block(arrows)}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), arrows()), encoding="utf-8")
