"""The screen of `cdc status --watch`: the last look, redrawn on a terminal."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from cdc.cli.screens.phrases import with_advice, with_since
from cdc.cli.screens.status import draw_status
from cdc.model.wording import clock
from cdc.observe.diagnosis import slow_hop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cdc.observe.sampler import Failure, Sample
    from cdc.observe.status import Status


def draw_look(sample: Sample[Status] | None, failure: Failure | None) -> RenderableType:
    """Draw the last look that has ended well, when that was, and why there is none since."""
    parts: list[RenderableType] = []
    if failure:
        trouble = with_since(with_advice(failure.message, failure.hint), failure.since)
        parts.append(Text(trouble, "bold red"))
    if sample:
        parts += [
            draw_status(sample.value, slow_hop(sample.value)),
            Text(),
            Text(f"as of {clock(sample.taken_at)}; Ctrl-C ends", "dim"),
        ]
    return Group(*parts)


@contextmanager
def show_looks(console: Console) -> Iterator[Callable[[RenderableType], None]]:
    """Show screens in one place of a terminal, elsewhere one below the other."""
    if console.is_terminal:
        # It redraws its own lines, so it has to know where each of them ends.
        folding = Console(file=console.file, force_terminal=True)
        with Live(console=folding, auto_refresh=False) as screen:
            yield lambda drawn: screen.update(drawn, refresh=True)
    else:
        yield lambda drawn: console.print(Group(drawn, Text()))
