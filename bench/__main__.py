"""`python -m bench`: run it, print the table, store the figures."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from bench import cases, live, plots, report
from bench.figure import Figure
from bench.stage import Stage


class Size(StrEnum):
    S = "S"
    M = "M"
    L = "L"


ROWS = {Size.S: 5_000, Size.M: 200_000, Size.L: 2_000_000}
CHANGES = {Size.S: 3_000, Size.M: 100_000, Size.L: 1_000_000}
SECONDS = {Size.S: 10.0, Size.M: 60.0, Size.L: 600.0}
TIMES = {Size.S: 1, Size.M: 3, Size.L: 3}


def main(
    size: Annotated[Size, typer.Option(help="S: two minutes; M: under twenty; L: hours.")] = Size.M,
    only: Annotated[list[str] | None, typer.Option(help="Only this part; may be given again.")] = None,
    out: Annotated[Path, typer.Option(help="Where the figures go.")] = Path("bench/results"),
) -> None:
    """Measure limits, rival and this pipeline in one run on the same data."""
    rows, changes, times = ROWS[size], CHANGES[size], TIMES[size]
    parts: dict[str, Callable[[Stage], Iterator[Figure]]] = {
        "capture": lambda stage: cases.capture(stage, changes, times),
        "decode": lambda stage: cases.reading(stage, times),
        "redis": lambda stage: cases.apply_redis(stage, times),
        "elasticsearch": lambda stage: cases.apply_elasticsearch(stage, times),
        "changes": lambda stage: cases.apply_changes(stage, times),
        "merge": lambda stage: cases.merge(stage, min(100_000, rows // 3), times),
        "rebuild": lambda stage: live.rebuilding(stage, times),
        "verify": lambda stage: live.verifying(stage, times),
        "latency": lambda stage: live.latency(stage, 200.0, SECONDS[size]),
        "idle": lambda stage: live.idle(stage, SECONDS[size]),
    }
    folder = Path(tempfile.mkdtemp(prefix="cdc-bench-"))
    folder.chmod(0o755)
    figures: list[Figure] = []
    try:
        stage = Stage(folder, rows)
        try:
            for name, part in parts.items():
                if only and name not in only:
                    continue
                for figure in part(stage):
                    figures.append(figure)
                    typer.echo(report.table([figure]).splitlines()[-1])
        finally:
            stage.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    report.write(out / f"{size}.json", size, figures)
    plots.draw(out, size, figures)
    typer.echo(report.table(figures))


if __name__ == "__main__":
    typer.run(main)
