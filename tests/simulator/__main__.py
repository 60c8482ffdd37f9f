"""`python -m tests.simulator`: play random histories of a pipeline in memory, and check each."""

import logging
import time
from typing import Annotated

import structlog
import typer

from tests.simulator.history import History, history, shrunk, told
from tests.simulator.life import failure
from tests.simulator.planted import BUGS, planted


def main(
    seed: Annotated[int, typer.Option(help="The first seed; each history has the next one.")] = 0,
    histories: Annotated[int, typer.Option(help="How many histories to play.")] = 1000,
    seconds: Annotated[float, typer.Option(help="End after so many seconds.")] = float("inf"),
    bug: Annotated[
        str | None, typer.Option(help="Play with a planted bug; `all` takes one after the other.")
    ] = None,
) -> None:
    """Play random histories, and shrink the first that goes wrong."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    if bug == "all":
        for name in BUGS:
            with planted(name):
                found = _first(range(seed, seed + histories))
            after = f"after {found.seed - seed + 1}" if found else f"NOT in {histories}"
            typer.echo(f"{name:<45}{after}")
        return
    if bug:
        with planted(bug):
            found = _play(range(seed, seed + histories), seconds)
    else:
        found = _play(range(seed, seed + histories), seconds)
    if found:
        raise typer.Exit(1)


def _first(seeds: range) -> History | None:
    return next((h for h in map(history, seeds) if failure(h)), None)


def _play(seeds: range, seconds: float) -> bool:
    """Play until one goes wrong. Whether one has."""
    began = time.monotonic()
    cpu_began = time.process_time()
    steps = played = 0
    for seed in seeds:
        made = history(seed)
        if failure(made):
            small = shrunk(made, lambda h: failure(h) is not None)
            typer.echo(f"{told(small)}\n{failure(small)}\n")
            typer.echo(f"again: python -m tests.simulator --seed {seed} --histories 1")
            return True
        played += 1
        steps += len(made.steps)
        if time.monotonic() - began > seconds:
            break
    rate = played / (time.process_time() - cpu_began) * 3600
    typer.echo(
        f"all right: {played:,} histories of {steps:,} steps; {rate:,.0f} an hour on one core"
    )
    return False


if __name__ == "__main__":
    typer.run(main)
