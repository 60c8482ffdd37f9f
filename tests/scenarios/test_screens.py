"""What the verbs say while signals come: at once, no more than is known, to a clean end. What they say
of servers that hang: `test_outages.py`.
"""

import os
import re
import signal
import subprocess
import termios
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import psutil

from tests.support.wait import wait_until

if TYPE_CHECKING:
    from tests.scenarios.conftest import World


def begin(world: "World") -> None:
    world.write_file("public.items")
    world.sql("CREATE TABLE items (id int PRIMARY KEY, v int)", "INSERT INTO items VALUES (1, 1)")
    world.cdc("migrate")


def ended_by(
    world: "World",
    ready: Callable[[psutil.Process, str], bool],
    end: Callable[[psutil.Process], None],
) -> str:
    """Return the output of a `cdc run` that is ended as soon as it is `ready`; its end must be clean."""
    with (world.folder / "run.log").open("w+") as log:
        process = subprocess.Popen(
            world.command("run"), stdout=log, stderr=log, start_new_session=True
        )
        watched = psutil.Process(process.pid)
        try:
            wait_until(
                lambda: ready(watched, output(world)),
                180,
                lambda: f"the run to be ready: {output(world)}",
            )
            end(watched)
            process.wait(300)
        finally:
            process.kill()
            process.wait()
    assert (process.returncode, "Traceback" in output(world)) == (0, False), output(world)
    return output(world)


def output(world: "World") -> str:
    return (world.folder / "run.log").read_text()


def end_group(process: psutil.Process) -> None:
    """End the group of processes, as a terminal does."""
    os.killpg(process.pid, signal.SIGINT)


def end_all(process: psutil.Process) -> None:
    """End all processes of the command, as a service's manager does."""
    for member in (process, *process.children(recursive=True)):
        # Spark's start scripts call programs that end at once.
        with suppress(psutil.NoSuchProcess):
            member.send_signal(signal.SIGTERM)


def importing(process: psutil.Process, _: str) -> bool:
    """Python has started, and reads the parts of the command."""
    return process.cpu_times().user > 0.2


def starting(_: psutil.Process, text: str) -> bool:
    return "starting Spark" in text


def at_work(_: psutil.Process, text: str) -> bool:
    """Spark's workers, too, have had something to do."""
    return (
        all(f"{sink} running: " in text for sink in ("search", "cache", "warehouse"))
        and "1 changes" in text
    )


def assert_watched(world: "World") -> None:
    """Assert that `status --watch` redraws its screen on a terminal, and that Ctrl-C ends it."""
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (50, 80))
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        os.set_blocking(ours, False)
        process = subprocess.Popen(
            world.command("status", "--watch"), stdout=theirs, stderr=theirs, env=environment
        )
        text = ""

        def looked() -> bool:
            nonlocal text
            text += (terminal.read(100_000) or b"").decode(errors="replace")
            return len(set(re.findall(r"as of (\S+);", text))) >= 2

        try:
            wait_until(looked, 60, lambda: f"two looks: {text}")
            process.send_signal(signal.SIGINT)
            assert process.wait(120) == 0
            looked()
        finally:
            process.kill()
            process.wait()
            os.close(theirs)
    # The cursor goes up to where the screen began.
    assert "\x1b[1A" in text
    assert ("search" in text, "Traceback" in text) == (True, False)


def test_verify_says_at_once_and_a_run_ends_cleanly(world: "World") -> None:
    """One pipeline for all of it, because making one takes the longest."""
    begin(world)
    failed = world.cdc("verify", code=5).stderr
    assert "There is no connector" in failed
    assert "cdc -p FILE register" in failed
    assert "Spark" not in failed
    world.cdc("register")
    assert_watched(world)
    ended_by(world, importing, end_group)
    assert "stopping" in ended_by(world, starting, end_all)
    lines = ended_by(world, at_work, end_all)
    assert lines.count("stopping") == 1
    assert "search stopped: " in lines
    # Nobody knew yet what there was to do, or knew that there was something.
    assert not re.search("starting: .* waiting: 0", lines)
