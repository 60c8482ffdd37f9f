"""Parts that several screens share: a table, advice with its commands, and times."""

import time
from itertools import zip_longest
from typing import TYPE_CHECKING

from rich.text import Text

from cdc.cli.console import call
from cdc.model.wording import advice, duration, since_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console, ConsoleOptions, RenderResult


class Grid:
    """A table without lines: columns as wide as their widest cell, no spaces at the end of a
    line. A heading that begins with > aligns its column to the right.

    No cell is cut, and no word is broken, so that its content can be copied and searched. Where it
    is wider than a terminal, cells of several words are folded. A pipe has room for every cell.
    """

    def __init__(self, *headings: str) -> None:
        self._right = [heading.startswith(">") for heading in headings]
        self._rows: list[list[Text]] = []
        if any(headings):
            self.add_row(*(Text(heading.removeprefix(">"), "bold") for heading in headings))

    def add_row(self, *cells: str | Text) -> None:
        """Add a row; missing cells are empty."""
        row = [cell if isinstance(cell, Text) else Text(cell) for cell in cells]
        self._rows.append(row + [Text()] * (len(self._right) - len(row)))

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        widths = self._widths(options.max_width)
        yield Text("\n").join(
            self._line(line, widths) for row in self._rows for line in _fold(row, widths, console)
        )

    def _widths(self, room: int) -> list[int]:
        """The width of each column. In too narrow a room, columns of text become narrower: the
        widest first, and none narrower than its longest word.
        """
        columns = list(zip(*self._rows, strict=True))
        widths = [max(cell.cell_len for cell in column) for column in columns]
        narrowest = [
            width if right else max(map(_longest_word, column))
            for column, width, right in zip(columns, widths, self._right, strict=True)
        ]
        excess = sum(widths) + len(widths) - 1 - room
        while excess > 0:
            foldable = [n for n, width in enumerate(widths) if width > narrowest[n]]
            if not foldable:
                break
            widths[max(foldable, key=widths.__getitem__)] -= 1
            excess -= 1
        return widths

    def _line(self, row: "Sequence[Text]", widths: "Sequence[int]") -> Text:
        line = Text()
        for cell, width, right in zip(row, widths, self._right, strict=True):
            room = " " * (width - cell.cell_len)
            line.append_text(
                Text.assemble(room, cell, " ") if right else Text.assemble(cell, room, " ")
            )
        line.rstrip()
        return line


def _fold(
    row: "Sequence[Text]", widths: "Sequence[int]", console: "Console"
) -> "Iterator[list[Text]]":
    """Fold the cells of a row: yield its lines, where most rows have one."""
    folded = [
        cell.wrap(console, width) if cell.cell_len > width else [cell]
        for cell, width in zip(row, widths, strict=True)
    ]
    for cells in zip_longest(*folded, fillvalue=Text()):
        yield list(cells)


def _longest_word(cell: Text) -> int:
    return max((Text(word).cell_len for word in cell.plain.split(" ")), default=0)


def with_advice(message: str, hint: str) -> str:
    return advice(message, call.complete_commands(hint)) if hint else message


def with_since(text: str, moment: float | None) -> str:
    return f"{text} ({since_text(moment)})" if moment else text


def age(moment: float | None) -> str:
    return "never" if moment is None else f"{duration(max(0.0, time.time() - moment))} ago"
