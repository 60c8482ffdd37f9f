"""Every test, `make test`: in three parts side by side, because one alone keeps a core waiting.

Ctrl-C reaches all of them, and is waited for: they stop their servers.
"""

import re
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress

SECOND = tuple(
    f"tests/scenarios/test_{name}.py"
    for name in (
        "audit",
        "bench",
        "brokers",
        "bucket",
        "client",
        "cluster",
        "compaction",
        "document_cases_of_sinks",
        "document_engine",
        "document_failures",
        "documented_commands",
        "documents",
        "exact",
        "examples",
        "failures",
        "first_hour",
        "names",
        "new_snapshot",
        "types",
        "verify",
    )
)
"""Scenarios of the third part, so that both parts with scenarios end at about the same time."""
PARTS: Mapping[str, Sequence[str]] = {
    "servers": (
        "tests/unit",
        "tests/browser",
        "tests/spark",
        "tests/contract",
        "tests/integration",
    ),
    "scenarios": ("tests/scenarios", *(f"--ignore={path}" for path in SECOND)),
    "second": SECOND,
}
"""Words of pytest by the name that stands before its lines."""
RESULT = re.compile(r"(FAILED|ERROR) |=+ .*\b(passed|failed|errors?)\b.* =+$")
"""Lines of pytest's that say how it went."""
CONTAINER_TESTS = "tests/containers"
"""Tests that need a Docker engine: in no part, collected with `--stack containers` only."""


def main(parts: Mapping[str, Sequence[str]]) -> int:
    runs = {name: _pytest(words) for name, words in parts.items()}
    results: list[str] = []
    threads = [threading.Thread(target=_pass_on, args=(*run, results)) for run in runs.items()]
    for thread in threads:
        thread.start()
    while any(run.returncode is None for run in runs.values()):
        with suppress(KeyboardInterrupt):
            for run in runs.values():
                run.wait()
    for thread in threads:
        thread.join()
    # Once more and last: between them the other parts may have printed thousands of lines.
    print(*results, sep="\n", flush=True)
    return int(any(run.returncode for run in runs.values()))


def _pytest(words: Sequence[str]) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "pytest", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _pass_on(name: str, run: "subprocess.Popen[str]", results: list[str]) -> None:
    """Print whole lines, so that the parts don't mix within one; note what failed and how many
    tests passed.
    """
    assert run.stdout
    with run.stdout:
        for line in run.stdout:
            sys.stdout.write(f"{name:<9} {line}")
            sys.stdout.flush()
            if RESULT.match(line):
                results.append(f"{name:<9} {line.rstrip()}")


if __name__ == "__main__":
    sys.exit(main(PARTS))
