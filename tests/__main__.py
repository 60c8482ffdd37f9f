"""Every test, `make test`: two halves side by side, for one alone keeps a core waiting; then those that measure.

The latter only if the rest passes. Ctrl-C reaches every pytest, and is waited for: they stop their servers.
"""

import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress

MEASURING = ("tests/scenarios/test_rebuild.py", "tests/scenarios/test_verify.py")
"""What readers see under load, and how long it takes: right only when nothing else runs."""
MOVED = ("tests/scenarios/test_audit.py", "tests/scenarios/test_types.py")
"""Scenarios of the first half, so that both end at about the same time."""
Stage = Mapping[str, Sequence[str]]
"""What runs side by side: pytest's words by the name that stands before its lines."""
STAGES: Sequence[Stage] = (
    {
        "servers": ("tests/unit", "tests/spark", "tests/contract", "tests/integration", *MOVED),
        "scenarios": ("tests/scenarios", *(f"--ignore={path}" for path in (*MOVED, *MEASURING))),
    },
    {"measuring": MEASURING},
)


def main(stages: Sequence[Stage]) -> int:
    return int(any(_side_by_side(stage) for stage in stages))


def _side_by_side(stage: Stage) -> bool:
    """Whether any of them has failed."""
    runs = {
        name: subprocess.Popen(
            [sys.executable, "-m", "pytest", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for name, words in stage.items()
    }
    threads = [threading.Thread(target=_pass_on, args=item) for item in runs.items()]
    for thread in threads:
        thread.start()
    while any(run.returncode is None for run in runs.values()):
        with suppress(KeyboardInterrupt):
            for run in runs.values():
                run.wait()
    for thread in threads:
        thread.join()
    return any(run.returncode for run in runs.values())


def _pass_on(name: str, run: "subprocess.Popen[str]") -> None:
    """Print whole lines, so that the halves don't mix within one."""
    assert run.stdout
    with run.stdout:
        for line in run.stdout:
            sys.stdout.write(f"{name:<9} {line}")
            sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(STAGES))
