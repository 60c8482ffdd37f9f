"""`make test` runs every test file once, fails when one of them does, and leaves none behind on
Ctrl-C.
"""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.__main__ import CONTAINER_TESTS, HALVES, main

TESTS = Path(__file__).parents[1]


def test_every_file_is_in_one_half() -> None:
    for path in TESTS.rglob("test_*.py"):
        name = str(path.relative_to(TESTS.parent))
        taking = [
            words
            for words in HALVES.values()
            if f"--ignore={name}" not in words
            and any(name == word or name.startswith(f"{word}/") for word in words)
        ]
        # Those that need a Docker engine run on demand alone.
        expected_count = 0 if name.startswith(f"{CONTAINER_TESTS}/") else 1
        assert len(taking) == expected_count, (name, taking)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    # Loading all plugins that are installed takes longer than these tests.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\naddopts = -s -p tests.conftest -p pytest_timeout\n"
    )
    # In many short waits: a signal that arrives just before a wait is heeded after it.
    slow = "import time; print('begun', flush=True); [time.sleep(0.1) for _ in range({})]; print('done', flush=True)"
    bodies = {
        "good": "pass",
        "bad": "assert False",
        "endless": slow.format(600),
        "slow": slow.format(30),
    }
    for name, body in bodies.items():
        (tmp_path / f"test_{name}.py").write_text(f"def test(): {body}\n")
    return {path.stem.removeprefix("test_"): str(path) for path in tmp_path.glob("test_*.py")}


def test_one_that_fails_is_told(files: dict[str, str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main({"good": [files["good"]]}) == 0
    assert main({"bad": [files["bad"]], "good": [files["good"]]}) == 1
    assert "bad       " in capfd.readouterr().out


def test_what_failed_is_printed_last(
    files: dict[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main({"bad": [files["bad"]], "slow": [files["slow"], files["good"]]}) == 1
    *_, failure, passed = sorted(capfd.readouterr().out.splitlines()[-3:])
    assert failure.startswith("bad       FAILED ")
    assert "2 passed" in passed


def test_an_interrupt_is_waited_for(files: dict[str, str]) -> None:
    # A shell starts what it puts in the background with interrupts ignored, and every process after
    # it inherits that.
    heeds = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    script = f"from tests.__main__ import main; main(dict(endless=[{files['endless']!r}], good=[{files['good']!r}]))"
    with subprocess.Popen(
        [sys.executable, "-c", f"{heeds}; {script}"],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=TESTS.parent,
    ) as run:
        assert run.stdout
        try:
            while "begun" not in run.stdout.readline():
                pass
            os.killpg(run.pid, signal.SIGINT)
            printed, _ = run.communicate(timeout=120)
            assert "KeyboardInterrupt" in printed
            with pytest.raises(ProcessLookupError):
                os.killpg(run.pid, 0)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
