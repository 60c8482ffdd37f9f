"""`python -m bench`: run it, print the table, store the figures."""

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from bench import cases, growth, latency, live, paths, plots, replayed, report
from bench.figure import Figure
from bench.stage import Servers, Stage


class Size(StrEnum):
    S = "S"
    M = "M"
    L = "L"


SHARES, RATES = (0.1, 0.5, 0.8), (300, 1000, 2000)


@dataclass(frozen=True)
class Scale:
    """How much of everything.

    rows     of the table that most parts share; `sizes` are those of the tables that are compared
    changes  of a workload; `backlog` is that of W1, which has to be long: a sink's pauses between batches count;
             `bulk` what the connector drains and a rebuild reads: several batches of a stream
    records  that a sink is behind, where it alone is measured
    times    repeats what has a ratio to reach; the rest is measured once
    seconds  of a load at a rate: at `shares` of what can be sustained, or at `rates` in transactions per second
    """

    rows: int
    changes: int
    backlog: int
    bulk: int
    records: int
    times: int
    seconds: float
    shares: tuple[float, ...]
    sizes: tuple[int, ...]
    rates: tuple[float, ...]


SCALES = {
    Size.S: Scale(5_000, 3_000, 3_000, 3_000, 10_000, 1, 5.0, (0.5,), (5_000, 20_000), (100,)),
    Size.M: Scale(40_000, 30_000, 60_000, 150_000, 500_000, 3, 15.0, SHARES, (100_000, 1_000_000), RATES),
    Size.L: Scale(
        1_000_000,
        1_000_000,
        1_000_000,
        1_000_000,
        10_000_000,
        3,
        120.0,
        SHARES,
        (100_000, 1_000_000, 10_000_000),
        RATES,
    ),
}


def parts(scale: Scale) -> dict[str, Callable[[Stage], Iterator[Figure]]]:
    """What can be measured, in the order in which it is. Those with tables of their own come last."""
    rows, changes, records, times = scale.rows, scale.changes, scale.records, scale.times
    return {
        "rebuild": lambda stage: live.rebuilding(stage, scale.bulk),
        "capture": lambda stage: cases.capture(stage, rows, scale.bulk, times),
        "decode": lambda stage: cases.reading(stage, 1),
        "redis": lambda stage: cases.apply_redis(stage, records, times),
        "elasticsearch": lambda stage: cases.apply_elasticsearch(stage, records, times),
        "changes": lambda stage: cases.apply_changes(stage, records, times),
        "mixed": lambda stage: paths.drain(stage, scale.backlog, times, paths.MIXED),
        "single": lambda stage: paths.drain(stage, changes, 1, paths.HOT, paths.BULK),
        "latency": lambda stage: latency.latency(stage, changes, scale.shares, scale.seconds),
        "idle": lambda stage: live.idle(stage, changes, scale.seconds),
        "oltp": lambda stage: paths.oltp(stage, rows, changes),
        "replay": lambda stage: replayed.replayed(stage, scale.rates, scale.seconds / 2),
        "growth": lambda stage: growth.growth(stage, scale.sizes, min(50_000, scale.sizes[0] // 2), times),
    }


def main(
    size: Annotated[Size, typer.Option(help="S: minutes; M: some twenty; L: hours.")] = Size.M,
    only: Annotated[list[str] | None, typer.Option(help="Only this part; may be given again.")] = None,
    out: Annotated[Path, typer.Option(help="Where the figures go.")] = Path("bench/results"),
) -> None:
    """Measure limits, rival and this pipeline in one run on the same data."""
    chosen = parts(SCALES[size])
    if unknown := set(only or ()) - chosen.keys():
        raise typer.BadParameter(f"no part {', '.join(sorted(unknown))}; there are {', '.join(chosen)}")
    folder = Path(tempfile.mkdtemp(prefix="cdc-bench-"))
    folder.chmod(0o755)
    figures: list[Figure] = []
    took_s: dict[str, float] = {}
    try:
        servers = Servers(folder)
        try:
            stage = Stage(servers, "bench", ["public.bench"], lambda data: data.fill(SCALES[size].rows))
            for name, part in chosen.items():
                if only and name not in only:
                    continue
                began = time.monotonic()
                for figure in part(stage):
                    figures.append(figure)
                    typer.echo(report.told(figure))
                took_s[name] = round(time.monotonic() - began, 1)
        finally:
            servers.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        # What was measured before a part failed isn't lost.
        if figures:
            out.mkdir(parents=True, exist_ok=True)
            report.write(out / f"{size}.json", {"size": size, **asdict(SCALES[size]), "took_s": took_s}, figures)
            plots.draw(out, size, figures)
            typer.echo(report.tables(figures))


if __name__ == "__main__":
    typer.run(main)
