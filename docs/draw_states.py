"""The picture of a stream's states in docs/understand/how-a-change-travels.md, from the table of
`cdc.apply.machine`.
"""

from collections.abc import Sequence
from html import escape

from cdc.apply import machine

RESTART, PER_LINE = "starting: ", 5
"""How the next state of a restart begins in the table, and how many reasons a line shows."""
BOXES = {
    "starting": (110, 130),
    "running": (430, 130),
    "waiting": (110, 250),
    "paused": (110, 30),
    "caught up": (730, 30),
    "stopped": (730, 130),
    "failed": (730, 250),
}
"""Centre and upper edge of each state."""
WIDTH, HEIGHT = 120, 34
ARROWS = (
    "M170,140 H364",
    "M370,156 H176",
    "M120,164 V244",
    "M100,250 V170",
    "M120,130 V70",
    "M100,64 V124",
    "M490,136 C570,136 590,47 664,47",
    "M556,147 H664",
    "M556,267 H664",
)
"""From a state to the next one; those to stopped and failed begin at the frame of all others."""
HEAD = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 820 310" role="img" aria-label="States of a stream">
<style>rect { fill: #eef2f7; stroke: #52606d; } text { font: 13px sans-serif; text-anchor: middle; fill: #102a43; }
.note { font-size: 11px; fill: #52606d; } .any { fill: none; stroke-dasharray: 5 4; }
path { fill: none; stroke: #829ab1; stroke-width: 1.2; marker-end: url(#tip); }</style>
<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">
<polygon points="0,0 8,4 0,8" fill="#829ab1"/></marker></defs>
<rect x="0" y="0" width="820" height="310" style="fill: #fff; stroke: none"/>
<rect class="any" x="24" y="12" width="532" height="288" rx="8"/>
"""


def rows() -> list[list[str]]:
    """Return the state, the event and the next state of each row of the module's table."""
    lines = [line for line in (machine.__doc__ or "").splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.split("|")[1:4]] for line in lines[1:]]


def reasons(table: Sequence[Sequence[str]]) -> list[str]:
    """Return the reasons of restarts, each once, in the order of the table."""
    restarts = (row[2].removeprefix(RESTART) for row in table if row[2].startswith(RESTART))
    return list(dict.fromkeys(restarts))


def picture() -> str:
    """Draw the states as SVG: it needs no script, so none of another host."""
    names = reasons(rows())
    lines = [names[i : i + PER_LINE] for i in range(0, len(names), PER_LINE)]
    notes = [(345, 182 + 15 * i, " · ".join(line)) for i, line in enumerate(lines)]
    notes += [
        (270, 134, "from the sink's positions"),
        (290, 240, "a failure that may pass: any state waits, then starts"),
        (325, 51, "somebody paused the sink, until it is resumed"),
        (612, 140, "asked to stop"),
        (612, 260, "no retry helps"),
        (612, 36, "all is applied"),
    ]
    parts = [f'<path d="{path}"/>' for path in ARROWS]
    parts += [f'<text class="note" x="{x}" y="{y}">{escape(text)}</text>' for x, y, text in notes]
    parts += [_box(name, *place) for name, place in BOXES.items()]
    return HEAD + "\n".join(parts) + "\n</svg>\n"


def _box(name: str, x: int, y: int) -> str:
    box = f'<rect x="{x - WIDTH // 2}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="4"/>'
    return f'{box}<text x="{x}" y="{y + 22}">{escape(name)}</text>'
