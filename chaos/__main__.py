"""`make chaos MINUTES=30 SEED=7`: break the running pipeline on purpose, and check that it is right again."""

import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from chaos import checks
from chaos.faults import DISK, FAULTS, schedule, small_file_system
from chaos.links import links
from chaos.scene import History, Scene, Violated
from chaos.stack import LINKS

QUIET_EVERY_S = 150.0
REST_S = 1.0
OUT = Path("build/chaos")
WAREHOUSE_MIB = 512


class Nemesis:
    """Fires the steps of a seed until the time is over."""

    def __init__(self, scene: Scene, names: list[str]) -> None:
        self.scene = scene
        self.steps = schedule(scene.seed, names)
        self.fired: Counter[str] = Counter()
        self.recoveries: dict[str, list[float]] = defaultdict(list)
        self.checked = 0

    def play(self, seconds: float) -> None:
        """Fire faults for this long. Quiet points aren't included."""
        while seconds > 0:
            began = time.monotonic()
            while time.monotonic() < began + min(seconds, QUIET_EVERY_S):
                self.fire(*next(self.steps))
            seconds -= time.monotonic() - began
            self.scene.check()
            self.checked += 1
            typer.echo(f"{self.scene.history.seconds:6.0f} s  quiet: every view is equal")

    def fire(self, names: tuple[str, ...], hold_s: float) -> None:
        """Fire these faults together, and end them after `hold_s` seconds."""
        typer.echo(f"{self.scene.history.seconds:6.0f} s  {' and '.join(names)}", nl=False)
        with ExitStack() as faults:
            for name in names:
                self.scene.history.note("fault", fault=name, hold_s=hold_s)
                faults.enter_context(FAULTS[name](self.scene))
                self.fired[name] += 1
            time.sleep(hold_s)
        self.scene.history.note("healed", faults=names)
        took_s = self.scene.recover()
        self.scene.history.note("recovered", faults=names, recovery_s=took_s)
        # After two faults at once it isn't known which one took the time.
        if len(names) == 1:
            self.recoveries[names[0]].append(max(took_s.values()))
        typer.echo(f": {hold_s:g} s, recovered after {max(took_s.values()):.1f} s")
        time.sleep(REST_S)

    def table(self) -> str:
        """The recovery times by fault."""
        lines = [f"{'fault':<34}{'times':>6}{'median':>10}{'longest':>10}"]
        for name in FAULTS:
            if times := self.recoveries.get(name):
                median = statistics.median(times)
                longest = max(times)
                lines.append(f"{name:<34}{len(times):>6}{median:>8.1f} s{longest:>8.1f} s")
        return "\n".join(lines)


def main(
    minutes: Annotated[float, typer.Option(help="For how long faults are fired.")] = 30,
    seed: Annotated[
        int, typer.Option(help="The same seed fires the same faults in the same order.")
    ] = 1,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Only faults whose name has this in it; may be given again."),
    ] = None,
) -> None:
    """Break the running pipeline on purpose, and check that every view is right again."""
    names = [name for name in FAULTS if not only or any(word in name for word in only)]
    if not names:
        raise typer.BadParameter(f"no such fault; there are: {', '.join(FAULTS)}")
    # SIGTERM stops the servers as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    folder = Path(tempfile.mkdtemp(prefix="cdc-chaos-"))
    folder.chmod(0o755)
    with ExitStack() as ending:
        (folder / "warehouse").mkdir()
        if not ending.enter_context(small_file_system(folder / "warehouse", WAREHOUSE_MIB)):
            typer.echo("no small file system can be mounted here: the disk won't be full")
            names = [name for name in names if name not in DISK]
        history = History(OUT / f"seed-{seed}.jsonl")
        scene = Scene(folder, seed, ending.enter_context(links(LINKS, seed)), history)
        ending.callback(scene.stack.close)
        violations = run(scene, Nemesis(scene, names), minutes)
    if violations:
        typer.echo(f"servers' logs and data: {folder}")
        raise typer.Exit(1)
    shutil.rmtree(folder)


def run(scene: Scene, nemesis: Nemesis, minutes: float) -> list[str]:
    """Play one run, and print its verdict; return the violations."""
    typer.echo("starting servers, pipeline, writer and readers")
    violations: list[str] = []
    try:
        scene.start()
        nemesis.play(minutes * 60)
        violations = checks.too_little(
            scene.history.seconds,
            nemesis.fired.total(),
            scene.writer.acknowledged,
            {sink: watch.polls for sink, watch in scene.watches.items()},
        )
    except Violated as violated:
        violations = violated.violations
    finally:
        scene.close()
    scene.history.note("verdict", violations=violations, seed=scene.seed)
    typer.echo(f"\n{nemesis.table()}\n")
    for line in violations[1:]:
        typer.echo(f"also: {line}")
    verdict = f"NOT EQUAL: {violations[0]}" if violations else "equal"
    typer.echo(
        f"chaos: {verdict} · seed {scene.seed}"
        f" · {nemesis.fired.total()} faults of {len(nemesis.fired)} kinds"
        f" · {scene.writer.acknowledged:,} acknowledged writes"
        f" · {nemesis.checked} quiet points · history {scene.history.path}"
    )
    return violations


if __name__ == "__main__":
    typer.run(main)
