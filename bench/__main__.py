"""`python -m bench`: run it, print the table, store the figures."""

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer

from bench import cases, growth, latency, live, paths, replayed
from bench.documents import drains, flights, time_views
from bench.output import plots, report
from bench.output.figure import Figure
from bench.stage import Servers, Stage


class Size(StrEnum):
    S = "S"
    M = "M"
    L = "L"


SHARES, RATES = (0.5, 0.8), (300, 1000, 2000)


@dataclass(frozen=True)
class Scale:
    """Sizes of the measurements.

    rows     of the table that most parts share; `sizes` are the compared tables' rows
    distinct rows of a table whose snapshot is applied
    changes  of a workload; `backlog` for W1, which has to be long, because a sink's pauses between
             batches count; `bulk` for what the connector drains and a rebuild reads: several
             batches of a stream
    records  that a sink is behind, where it alone is measured
    flights  of the tables whose documents are kept, from the smallest on
    timed    of a small and a large table, for each kind of views of time
    times    for repeats of what has a ratio to reach; the rest is measured once
    seconds  of a load at a rate: at `shares` of the sustained one, or at `rates` in transactions a
             second
    """

    rows: int
    distinct: int
    changes: int
    backlog: int
    bulk: int
    records: int
    times: int
    seconds: float
    shares: tuple[float, ...]
    sizes: tuple[int, ...]
    flights: tuple[int, ...]
    timed: tuple[int, int]
    rates: tuple[float, ...]


SCALES = {
    Size.S: Scale(
        5_000,
        10_000,
        3_000,
        3_000,
        3_000,
        10_000,
        1,
        5.0,
        (0.5,),
        (5_000, 20_000),
        (1_000, 10_000),
        (2_000, 20_000),
        (100,),
    ),
    Size.M: Scale(
        rows=40_000,
        distinct=200_000,
        changes=30_000,
        backlog=60_000,
        bulk=150_000,
        records=500_000,
        times=3,
        seconds=15.0,
        shares=SHARES,
        sizes=(100_000, 1_000_000),
        flights=(20_000, 200_000),
        timed=(10_000, 100_000),
        rates=RATES,
    ),
    Size.L: Scale(
        rows=1_000_000,
        distinct=3_000_000,
        changes=1_000_000,
        backlog=1_000_000,
        bulk=1_000_000,
        records=10_000_000,
        times=3,
        seconds=120.0,
        shares=SHARES,
        sizes=(100_000, 1_000_000, 10_000_000),
        flights=(100_000, 1_000_000, 10_000_000),
        timed=(100_000, 1_000_000),
        rates=RATES,
    ),
}


@dataclass(frozen=True)
class Part:
    """A part of the benchmark that can be measured alone, at a place: a pipeline that it shares
    with its neighbours.
    """

    name: str
    measure: Callable[[Stage], Iterator[Figure]]
    place: str = "bench"


def places(scale: Scale, stage: Stage) -> dict[str, Callable[[], AbstractContextManager[Stage]]]:
    """The pipelines that parts are measured at; `stage` is the first of them, and stands still for
    the others.
    """
    grown = [f"public.grown_{rows}" for rows in scale.sizes]
    return {
        "bench": lambda: nullcontext(stage),
        cases.DISTINCT: lambda: stage.extra_stage(
            cases.DISTINCT, ["public.distinct_rows"], lambda data: data.fill(scale.distinct)
        ),
        "oltp": lambda: stage.extra_stage(
            "oltp", [*paths.OLTP, *paths.WIDE], lambda data: paths.make_oltp(data, scale.rows)
        ),
        "growth": lambda: stage.extra_stage(
            "growth", grown, lambda data: growth.make(data, scale.sizes)
        ),
        "documents": lambda: stage.extra_stage(
            "documents",
            flights.names(scale.flights),
            lambda data: flights.make(data, [*scale.flights, scale.flights[0]]),
            flights.views(stage.dsn, scale.flights),
        ),
        "time": lambda: stage.extra_stage(
            "time",
            time_views.names(scale.timed),
            lambda data: time_views.make(data, scale.timed),
            time_views.views(stage.dsn, scale.timed),
        ),
    }


def parts(scale: Scale) -> list[Part]:
    """Return the parts in the order in which they are measured. Parts with tables of their own come
    last.
    """
    changes, records, times, sizes = scale.changes, scale.records, scale.times, scale.sizes
    # A round takes a minute, and its ratio is to be no more than one.
    rounds = min(2, times)
    merged, grown = min(100_000, sizes[-1] // 10), min(50_000, sizes[0] // 2)
    return [
        Part("rebuild", lambda stage: live.rebuilding(stage, scale.bulk)),
        Part("capture", lambda stage: cases.capture(stage, scale.rows, scale.bulk, times)),
        Part("decode", lambda stage: cases.decoding(stage, scale.distinct // 10, times)),
        # It empties Redis: before what runs for longer.
        Part(
            "distinct", lambda stage: cases.distinct(stage, scale.distinct, times), cases.DISTINCT
        ),
        # With folding, which the rival has less of; once, nothing is asked of them any more.
        Part("redis", lambda stage: cases.apply_redis(stage, records, 1)),
        Part("elasticsearch", lambda stage: cases.apply_elasticsearch(stage, records, 1)),
        Part("changes", lambda stage: cases.apply_changes(stage, records, 1)),
        Part("mixed", lambda stage: paths.contest(stage, scale.backlog, times, paths.MIXED)),
        Part("apart", lambda stage: paths.apart(stage, 2 * scale.backlog, 2)),
        Part("single", lambda stage: paths.drain(stage, changes, 1, paths.HOT, paths.BULK)),
        Part("latency", lambda stage: latency.latency(stage, changes, scale.shares, scale.seconds)),
        Part("process", lambda stage: live.process(stage, changes, scale.seconds)),
        Part("oltp", lambda stage: paths.oltp(stage, changes), "oltp"),
        Part("replay", lambda stage: replayed.replayed(stage, scale.rates, scale.seconds / 2)),
        Part("snapshot", lambda stage: growth.snapshot(stage, sum(sizes)), "growth"),
        Part("growth", lambda stage: growth.growth(stage, sizes, grown, rounds), "growth"),
        Part("merge", lambda stage: cases.merge(stage, merged, times), "growth"),
        Part("memory", lambda stage: live.growing(stage, sizes), "growth"),
        Part(
            "views",
            lambda stage: drains.documents(stage, scale.flights, changes, scale.seconds),
            "documents",
        ),
        Part(
            "time",
            lambda stage: time_views.views_of_time(stage, scale.timed, times, scale.seconds),
            "time",
        ),
    ]


def main(
    size: Annotated[Size, typer.Option(help="S: minutes; M: some twenty; L: hours.")] = Size.M,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Only this part, in files of its own; may be given again."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Where the figures go.")] = Path("bench/results"),
) -> None:
    """Measure limits, rival and this pipeline in one run on the same data."""
    scale = SCALES[size]
    names = [part.name for part in parts(scale)]
    if unknown := set(only or ()) - set(names):
        raise typer.BadParameter(
            f"no part {', '.join(sorted(unknown))}; there are {', '.join(names)}"
        )
    chosen = [part for part in parts(scale) if not only or part.name in only]
    folder = Path(tempfile.mkdtemp(prefix="cdc-bench-"))
    folder.chmod(0o755)
    figures: list[Figure] = []
    took_s: dict[str, float] = {}
    try:
        servers = Servers(folder)
        try:
            stage = Stage(servers, "bench", ["public.bench"], lambda data: data.fill(scale.rows))
            for place, neighbours in groupby(chosen, key=lambda part: part.place):
                with places(scale, stage)[place]() as place_stage:
                    for part in neighbours:
                        began = time.monotonic()
                        for figure in part.measure(place_stage):
                            figure.part = part.name
                            figures.append(figure)
                            typer.echo(report.describe(figure))
                        took_s[part.name] = round(time.monotonic() - began, 1)
        finally:
            servers.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        # What was measured before a part failed isn't lost.
        if figures:
            out.mkdir(parents=True, exist_ok=True)
            name = "-".join([size, *(only or ())])
            report.write(
                out / f"{name}.json", {"size": size, **asdict(scale), "took_s": took_s}, figures
            )
            plots.draw(out, name, figures)
            typer.echo(report.tables(figures))


if __name__ == "__main__":
    typer.run(main)
