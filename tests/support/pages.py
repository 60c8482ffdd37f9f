"""Things in pages of the documentation that can be looked up: commands, links, paths, targets."""

import re
import shlex
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer

from cdc.cli.verbs import app, hoist_global_options

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
BLOCK = re.compile(r"^```(\w*)( title=[^\n]*)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
PATH = re.compile(
    r"(?<![\w/.{}<>-])(?:cdc|sinks|connectors|compose|migrations|sample|bench|tests|docs)/[\w./*-]+"
)
MODULE = re.compile(r"python -m ([a-z_]+(?:\.[a-z_]+)*)")
TARGET = re.compile(r"\bmake ([a-z]+)\b")
COMMAND = re.compile(r"^(\$ )?(.*[;|] *)?(\w+=\S+ )*(\.venv/bin/)?cdc ")
BRACKETED = re.compile(r"\w\[\w+\]$")
SYMBOLS = {";", "|", "||", "&", "&&", ">", ">>", "<"}


@cache
def root_command() -> Any:
    """The command line, made once: making it takes as long as parsing a hundred commands."""
    return typer.main.get_command(app)


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield each fenced block: its language and its text."""
    for language, _, body in BLOCK.findall(text):
        yield language, body


def prose(text: str) -> str:
    """Return the text outside of fenced blocks."""
    return BLOCK.sub("", text)


def commands(text: str) -> Iterator[list[str]]:
    """Yield each `cdc` command of the fenced blocks, as arguments, without the brackets around optional words."""
    for language, body in blocks(text):
        if language in ("", "sh", "console"):
            shown = (
                line for line in body.splitlines() if language != "console" or line.startswith("$ ")
            )
            for line in filter(COMMAND.match, shown):
                yield from _of_line(line.removeprefix("$ "))


def _of_line(line: str) -> Iterator[list[str]]:
    words = shlex.shlex(line, posix=True, punctuation_chars=True)
    words.whitespace_split = True
    parts: list[list[str]] = [[]]
    for word in words:
        if word in SYMBOLS:
            parts.append([])
        else:
            parts[-1].append(word)
    for part in parts:
        while part and re.match(r"\w+=", part[0]):
            part.pop(0)
        if part and Path(part[0]).name == "cdc":
            # Brackets around optional words; those of `local[8]` are a word's own.
            plain = (word if BRACKETED.search(word) else word.strip("[]") for word in part[1:])
            yield [word for word in plain if word != "..."]


def refusal(words: list[str]) -> str | None:
    """Why the command line doesn't take these arguments; None when it does. Nothing is run."""
    command = root_command()
    context, arguments = None, hoist_global_options(words)
    if "--version" in arguments:
        return None
    try:
        while True:
            context = command.make_context(command.name or "cdc", [*arguments], parent=context)
            _, arguments, _ = command.make_parser(context).parse_args([*arguments])
            if not hasattr(command, "commands") or not arguments:
                return None
            _, command, arguments = command.resolve_command(context, arguments)
    except Exception as error:
        return f"cdc {' '.join(words)}: {error}"


def unknown_words(text: str) -> Iterator[str]:
    """Yield the words of commands within sentences that the command line doesn't have: a verb, an option."""
    root = root_command()
    for span in SPAN.findall(prose(text)):
        first, *tail = span.split()
        words = (
            tail if first == "cdc" else [first, *tail] if first in root.commands and tail else []
        )
        command, options = root, set(_options(root))
        for word in (word.strip("[],.;:()") for word in words):
            if word in getattr(command, "commands", {}):
                command = command.commands[word]
                options |= set(_options(command))
            elif word.startswith("--") and word not in options:
                yield f"`{span}`: {word}"
        if first == "cdc" and words and command is root and not words[0].startswith("-"):
            yield f"`{span}`: {words[0]}"


def _options(command: Any) -> Iterator[str]:
    yield "--help"
    for parameter in command.params:
        yield from (*parameter.opts, *parameter.secondary_opts)


def broken_links(page: Path, text: str) -> Iterator[str]:
    """Relative links that lead nowhere."""
    for target in LINK.findall(text):
        path, _, _ = target.partition("#")
        if path and "://" not in path and not (page.parent / path).exists():
            yield target


def lost_paths(text: str) -> Iterator[str]:
    """Files, modules and targets that are named and that there aren't. A word in capitals is any name."""
    for reference in PATH.findall(text):
        path = re.sub(r"\b[A-Z]{3,}\b(?!\.)", "*", reference.rstrip("./"))
        if not any(ROOT.glob(path)):
            yield reference
    for module in MODULE.findall(text):
        if find_spec(module) is None:
            yield module
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    code = "\n".join(
        [*SPAN.findall(prose(text)), *(body for language, body in blocks(text) if not language)]
    )
    yield from (f"make {target}" for target in TARGET.findall(code) if target not in targets)
