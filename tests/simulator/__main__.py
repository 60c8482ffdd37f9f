"""`python -m tests.simulator`: play random histories of a pipeline in memory, and check each."""

import logging
import time
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Annotated

import structlog
import typer

from tests.simulator.history import History, history, parsed, sentences, shrunk
from tests.simulator.life import failure
from tests.simulator.planted import BUGS, planted


def main(
    seed: Annotated[int, typer.Option(help="The first seed; each history has the next one.")] = 0,
    histories: Annotated[int, typer.Option(help="How many histories to play.")] = 1000,
    seconds: Annotated[float, typer.Option(help="End after so many seconds.")] = float("inf"),
    text: Annotated[
        str | None, typer.Option("--history", help="Play this one, as a shrunk one is printed.")
    ] = None,
    bug: Annotated[
        str | None, typer.Option(help="Play with a planted bug; `all` takes one after the other.")
    ] = None,
) -> None:
    """Play random histories, and shrink the first that goes wrong."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    seeds = range(seed, seed + histories)
    if bug == "all":
        for name in BUGS:
            with planted(name):
                found = next((number for number in seeds if failure(history(number))), None)
            after = f"not in {histories}" if found is None else f"after {found - seed + 1}"
            typer.echo(f"{name:<45}{after}")
        return
    made = [parsed(text)] if text else map(history, seeds)
    with planted(bug) if bug else nullcontext():
        is_right = _play(made, seconds)
    if not is_right:
        raise typer.Exit(1)


def _play(histories: Iterable[History], seconds: float) -> bool:
    """Play until one goes wrong. Returns whether none has."""
    began = time.monotonic()
    cpu_began = time.process_time()
    steps = played = 0
    for made in histories:
        if failure(made):
            small = shrunk(made, lambda h: failure(h) is not None)
            typer.echo(f"{sentences(small)}\n{failure(small)}\n")
            typer.echo(f"again: python -m tests.simulator --history '{small}'")
            return False
        played += 1
        steps += len(made.steps)
        if time.monotonic() - began > seconds:
            break
    rate = played / (time.process_time() - cpu_began) * 3600
    typer.echo(
        f"all right: {played:,} histories of {steps:,} steps; {rate:,.0f} an hour on one core"
    )
    return True


if __name__ == "__main__":
    typer.run(main)
