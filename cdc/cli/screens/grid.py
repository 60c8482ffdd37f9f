"""A table of a screen: no cell is wrapped or cut, so that its content can be copied and searched."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Sequence


class Grid:
    """A table without lines: columns as wide as their widest cell, no spaces at the end of a
    line.
    """

    def __init__(self, headings: Sequence[str]) -> None:
        self._right = [heading.startswith(">") for heading in headings]
        self._rows: list[list[Text]] = []
        if any(headings):
            self.add_row(*(Text(heading.removeprefix(">"), "bold") for heading in headings))

    def add_row(self, *cells: str | Text) -> None:
        """Add a row; missing cells are empty."""
        row = [cell if isinstance(cell, Text) else Text(cell) for cell in cells]
        self._rows.append(row + [Text()] * (len(self._right) - len(row)))

    def __rich__(self) -> Text:
        widths = [max(cell.cell_len for cell in column) for column in zip(*self._rows, strict=True)]
        return Text("\n").join(self._line(row, widths) for row in self._rows)

    def _line(self, row: Sequence[Text], widths: Sequence[int]) -> Text:
        line = Text()
        for cell, width, right in zip(row, widths, self._right, strict=True):
            room = " " * (width - cell.cell_len)
            line.append_text(
                Text.assemble(room, cell, " ") if right else Text.assemble(cell, room, " ")
            )
        line.rstrip()
        return line


def make_grid(*headings: str) -> Grid:
    """Make a table; a heading that begins with > aligns its column to the right."""
    return Grid(headings)
