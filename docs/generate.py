"""Write the pages that are made from the code: `python -m docs.generate`. A test compares them with
what is there.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from docs import draw_rooms, draw_states
from docs.generators import (
    command_line,
    json_schemas,
    python_interface,
    results,
    runbooks,
    settings,
)

FOLDER = Path(__file__).parent
PAGES: Mapping[str, Callable[[], str]] = {
    "reference/cli.md": command_line.page,
    "reference/settings.md": settings.page,
    "reference/python-api.md": python_interface.page,
    "reference/status.schema.json": json_schemas.status,
    "reference/doctor.schema.json": json_schemas.doctor,
    "performance/results.md": results.page,
    "operate/runbooks/index.md": runbooks.page,
    "understand/rooms.md": draw_rooms.page,
    "understand/rooms.svg": draw_rooms.picture,
    "understand/states.svg": draw_states.picture,
}
"""The page makers by path below this folder."""

if __name__ == "__main__":
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page())
