"""A page of the documentation as a script: what it shows is run, and what it says is printed must
be.

A fenced block with a title is a file. A block of the language `console` has commands, each behind
`$ `, and below them what they print: each line there must be part of a line of the output, in this
order; `...` alone stands for lines that are left out, within a line for what differs from run to
run. `(exit code N)` says how a command ends, if not with 0.
"""

import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

FENCE = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
EXIT = re.compile(r"^\(exit code (\d+)\)$")


@dataclass
class Step:
    """A step of a page: one command, or one file."""

    text: str
    file: str = ""
    printed: list[str] = field(default_factory=list)
    code: int = 0


def steps(page: str) -> Iterator[Step]:
    """Yield the steps that a page tells its reader to do, in order."""
    for language, title, body in FENCE.findall(page):
        if title:
            yield Step(body, file=title)
        elif language == "console":
            yield from _commands(body)


def _commands(body: str) -> Iterator[Step]:
    step = Step("")
    for line in body.splitlines():
        if line.startswith("$ "):
            if step.text:
                yield step
            step = Step(line.removeprefix("$ "))
        elif ending := EXIT.match(line):
            step.code = int(ending[1])
        elif step.text.endswith("\\"):
            step.text += f"\n{line}"
        elif line.strip() not in ("", "..."):
            step.printed.append(line)
    yield step


def follow(
    page: Path, folder: Path, environment: Mapping[str, str], timeout_s: float = 300
) -> None:
    """Do what a page says in a folder. Raises AssertionError at the first step that doesn't go as it says."""
    for step in steps(page.read_text()):
        if step.file:
            (folder / step.file).write_text(step.text)
            continue
        process = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", step.text],
            cwd=folder,
            env=dict(environment),
            check=False,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        output = process.stdout + process.stderr
        shown = f"$ {step.text}\n{output}\n(exit code {process.returncode})"
        assert process.returncode == step.code, f"{page.name} says exit code {step.code}:\n{shown}"
        if missing := lacking(step.printed, output):
            raise AssertionError(f"{page.name} says that this prints {missing!r}:\n{shown}")


def lacking(lines: list[str], output: str) -> str | None:
    """The first of some lines that isn't printed after those before it; None when all are."""
    printed_lines = [_plain(line) for line in output.splitlines()]
    for line in lines:
        pattern = re.compile(".*".join(re.escape(part) for part in _plain(line).split("...")))
        places = (place for place, printed in enumerate(printed_lines) if pattern.search(printed))
        place = next(places, None)
        if place is None:
            return line
        printed_lines = printed_lines[place + 1 :]
    return None


def _plain(line: str) -> str:
    return " ".join(line.split())
