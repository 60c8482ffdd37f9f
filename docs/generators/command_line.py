"""reference/cli.md: every verb of `cdc` with its arguments and options, as typer has them."""

from collections.abc import Iterator
from typing import Any

import typer

from cdc.cli.verbs import app

HEAD = """\
# The command line

Every verb and its options. Made from the code by `python -m docs.generate`; a test compares them.
[Exit codes](../operate/exit-codes.md) are the same for all verbs. `-p` and `--state` may stand before or behind the
verb.
"""
WORDS = {"str": "text", "int": "whole number", "float": "number", "Path": "path"}
MASTER = "as many task slots as suit the machine"


def page() -> str:
    """Return the whole text."""
    return HEAD + "".join(f"\n{part}\n" for part in _verb(typer.main.get_command(app), ("cdc",)))


def _verb(command: Any, words: tuple[str, ...]) -> Iterator[str]:
    """Yield what stands about a verb, then about the verbs below it."""
    yield f"## {' '.join(words)}" if len(words) > 1 else "## For all verbs"
    if len(words) > 1 and command.help:
        yield "\n\n".join(" ".join(paragraph.split()) for paragraph in command.help.split("\n\n"))
    if rows := [_row(parameter) for parameter in command.params if "--help" not in parameter.opts]:
        yield "\n".join(["| | what it does | without it |", "|---|---|---|", *rows])
    for name, verb in getattr(command, "commands", {}).items():
        yield from _verb(verb, (*words, name))


def _row(parameter: Any) -> str:
    argument = parameter.param_type_name == "argument"
    names = (
        f"`{parameter.name.upper()}`"
        if argument
        else ", ".join(f"`{name}`" for name in parameter.opts)
    )
    takes = "" if argument or getattr(parameter, "is_flag", False) else f" {_kind(parameter)}"
    default = "required" if parameter.required else _default(parameter)
    return f"| {names}{takes} | {' '.join((parameter.help or '').split())} | {default} |"


def _kind(parameter: Any) -> str:
    return WORDS[parameter.bare_type().removeprefix("list[").partition(" ")[0].rstrip("]")]


def _default(parameter: Any) -> str:
    if parameter.name == "master":
        return MASTER
    default = parameter.default
    if default is None or default is False or callable(default) or default in ([], (), ""):
        return ""
    return f"`{default:g}`" if isinstance(default, float) else f"`{default}`"
