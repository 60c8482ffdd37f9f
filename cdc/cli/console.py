"""Output of every verb: documents and tables on standard output, everything else on standard error.

With `--json` standard output is one document, whatever happens: a verb that fails before it has
printed its own document prints `{"error": {"message", "hint", "exit_code"}}`, with a `"finding"`
where `doctor` or `status` has a code for it. Lines are never wrapped at a number of columns: another
program can search them, and what a terminal wraps can still be copied as it is. Only the cells of a
table are folded, to the width of the terminal.
"""

import json
import re
import shlex
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import structlog
import typer
from rich.console import Console, RenderableType
from rich.text import Text

from cdc.cli.workflow import ORDER
from cdc.errors import CdcError, SettingsError
from cdc.model.finding import find_error
from cdc.model.finding_codes import code_of
from cdc.model.wording import completed_document

WIDE = 100_000


def _console(terminal: bool, **options: Any) -> Console:
    """Make a console that prints texts as they are, and that is wide where it is no terminal."""
    size: dict[str, Any] = {} if terminal else {"width": WIDE, "height": 25}
    return Console(highlight=False, markup=False, emoji=False, **options, **size)


out = _console(sys.stdout.isatty(), soft_wrap=True)
# On a terminal the live display has to know the width, because it redraws its own lines.
err = _console(sys.stderr.isatty(), stderr=True)
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]
SinkName = Annotated[str, typer.Argument(help="A sink of the pipeline file.")]
SinkNames = Annotated[list[str] | None, typer.Option("--sink", help="Only this sink. Repeatable.")]
TableName = Annotated[str | None, typer.Option("--table", help="Only this table, as schema.table.")]
Master = Annotated[
    str,
    typer.Option(help="Spark master, such as local[4] or spark://host:7077.", envvar="CDC_MASTER"),
]
VERBS = "|".join(ORDER)
COMMAND = re.compile(rf"\bcdc(?: -p FILE(?:\.yaml)?)?(?= (--state|(?:{VERBS})\b))")
"""Matches a command of this program in a hint, where the pipeline file is still called FILE or is
left out.
"""
LOG = "the worker's log"


class Call:
    """The options this program was called with, so that the commands in its hints can be copied and
    run.
    """

    file: Path | None = None
    state: Path | None = None
    find_worker_log: Callable[[], Path | None] = staticmethod(lambda: None)
    """Finds the log of Kafka Connect's worker, where that is a server of the local stack."""
    answered = False
    """Whether it has printed its JSON document."""

    def complete_commands(self, text: str) -> str:
        """Complete a hint: each command gets the pipeline file, and the state folder if one was
        given.
        """
        if LOG in text and (path := self.find_worker_log()):
            text = text.replace(LOG, f"{LOG} ({path})")
        if self.file is None:
            return text
        short = f"cdc -p {shlex.quote(str(self.file))}"
        full = f"{short} --state {shlex.quote(str(self.state))}" if self.state else short
        return COMMAND.sub(lambda match: short if match[1] == "--state" else full, text)


call = Call()


def configure_logging() -> None:
    """Send log events to standard error: as lines on a terminal, as JSON elsewhere."""
    people = sys.stderr.isatty()
    renderer = structlog.dev.ConsoleRenderer() if people else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=not people),
            lambda _, __, event: completed_document(event, call.complete_commands),
            renderer,
        ],
        # Looked up again for each event: on a terminal rich replaces sys.stderr while its live
        # display runs.
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
        cache_logger_on_first_use=False,
    )


def say(line: str) -> None:
    """Print a line for people on standard error."""
    err.print(line, soft_wrap=True)


def print_lines(lines: Iterable[str]) -> None:
    """Print lines on standard output."""
    for line in lines:
        out.print(line)


def print_json(document: Any) -> None:
    """Print the document of a verb, with complete commands in its hints.

    Raises:
        TypeError, ValueError: the document holds something that has no JSON form, which is a bug.
    """
    completed = completed_document(document, call.complete_commands)
    print(json.dumps(completed, ensure_ascii=False, allow_nan=False), flush=True)
    call.answered = True


def answer(as_json: bool, document: Any, screen: RenderableType) -> None:
    """Print the result of a verb: a document for programs, or a screen for people."""
    if as_json:
        print_json(document)
    else:
        out.print(screen)


def print_error(error: CdcError) -> None:
    """Print an error and its hint on standard error, as a paragraph without a traceback."""
    code = f" ({code_of(error.finding_key)})" if error.finding_key else ""
    hint = call.complete_commands(error.hint)
    err.print(Text.assemble(("error:", "bold red"), f" {error.message}{code}"), soft_wrap=True)
    err.print(Text.assemble(("hint:", "bold"), f" {hint}"), soft_wrap=True)


def print_failure(error: CdcError) -> None:
    """Print the JSON document of a failure, unless the verb has printed a document already."""
    if not call.answered:
        failure = {"message": error.message, "hint": error.hint, "exit_code": error.exit_code}
        document: dict[str, Any] = {"error": failure}
        if error.finding_key is not None:
            # What `doctor` or `status` would say of it.
            table = error.details.get("table")
            subject = str(next(iter(error.details.values()), "the pipeline"))
            finding = find_error(error.finding_key, subject, error)
            document["finding"] = replace(finding, table=str(table) if table else None)
        print_json(document)


def require_consent(warning: str, word: str, *, yes: bool) -> None:
    """Have a person type a word, unless `yes` was given on the command line.

    Raises:
        SettingsError: another word was typed, or there is no terminal to ask at.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise SettingsError(
            f"{warning}, and there is no terminal to ask at.", hint="add --yes to the command"
        )
    if typer.prompt(f"{warning}. Type {word} to go on", err=True) != word:
        raise SettingsError(f"That isn't {word}: nothing was removed.", hint="the same command")
