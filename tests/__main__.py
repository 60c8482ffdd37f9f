"""Every test, in two halves side by side: one alone keeps a core waiting. `make test`.

Words go to both pytests. Ctrl-C reaches them as well, and is waited for: they stop their servers.
"""

import subprocess
import sys
import threading
from contextlib import suppress

MOVED = ("tests/scenarios/test_types.py",)
"""Scenarios of the first half, so that both end at about the same time."""
HALVES = {
    "servers": ("tests/unit", "tests/spark", "tests/contract", "tests/integration", *MOVED),
    "scenarios": ("tests/scenarios", *(f"--ignore={path}" for path in MOVED)),
}


def main() -> int:
    runs = {
        name: subprocess.Popen(
            [sys.executable, "-m", "pytest", *words, *sys.argv[1:]],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name, words in HALVES.items()
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
    return int(any(run.returncode for run in runs.values()))


def _pass_on(name: str, run: "subprocess.Popen[str]") -> None:
    """Print whole lines, so that the halves don't mix within one."""
    assert run.stdout
    for line in run.stdout:
        sys.stdout.write(f"{name:<9} {line}")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
