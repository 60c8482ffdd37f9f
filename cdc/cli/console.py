"""How every verb speaks: documents and tables on standard output, everything else on standard error.

With `--json` standard output is one document, whatever happens: a verb that fails before it has printed its own prints
`{"error": {"message", "hint", "exit_code"}}`. Nothing is folded at a number of columns: what is read by another program
is found by it, and a terminal folds by itself what can then be copied as it is.
"""

import json
import re
import shlex
import sys
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Annotated, Any

import structlog
import typer
from rich.console import Console

from cdc.errors import CdcError

WIDE = 100_000
out = Console(width=WIDE, height=25)
# On a terminal a display that is kept up to date has to know where its lines end.
err = Console(stderr=True) if sys.stderr.isatty() else Console(stderr=True, width=WIDE, height=25)
Json = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]

Master = Annotated[str, typer.Option(help="Any Spark master.", envvar="CDC_MASTER")]
VERBS = "up|down|init|plan|migrate|register|run|status|verify|rebuild|rollback|generations|topics|quarantine"
COMMAND = re.compile(rf"\bcdc(?: -p FILE(?:\.yaml)?)?(?= (--state|(?:{VERBS})\b))")
"""A command of this program as hints have it: without the file that only the caller knows."""
LOG = "the worker's log"
COMMAND_FIELDS = ("hint", "aside", "slow_hop")
"""The fields of documents that name commands."""


class Documents:
    """Counts the documents of this program's standard output."""

    printed = 0

    def print(self, document: Any) -> None:
        """Print one. What has no JSON is a bug: a TypeError or ValueError, never a text that only Python reads."""
        print(json.dumps(document, default=_plain, ensure_ascii=False, allow_nan=False), flush=True)
        self.printed += 1


class Call:
    """How this program was called, so that the commands it names can be run as they are."""

    file: Path | None = None
    state: Path | None = None
    worker_log: Path | None = None
    """Connect's, where it is one of the local stack."""

    def set_worker_log(self, path: Path | None) -> None:
        self.worker_log = path

    def complete_commands(self, text: str) -> str:
        """A hint with the file, and the state if that was given, in each command; with the log that it speaks of."""
        if self.worker_log:
            text = text.replace(LOG, f"{LOG} ({self.worker_log})")
        if self.file is None:
            return text
        short = f"cdc -p {shlex.quote(str(self.file))}"
        full = f"{short} --state {shlex.quote(str(self.state))}" if self.state else short
        return COMMAND.sub(lambda match: short if match[1] == "--state" else full, text)

    def complete_document(self, node: Any, within: bool = False) -> Any:
        """A document with its hints so named."""
        if isinstance(node, dict):
            return {key: self.complete_document(value, within or key in COMMAND_FIELDS) for key, value in node.items()}
        if isinstance(node, list | tuple):
            return [self.complete_document(value, within) for value in node]
        return self.complete_commands(node) if within and isinstance(node, str) else node


documents, call = Documents(), Call()


def _plain(node: object) -> Any:
    if is_dataclass(node) and not isinstance(node, type):
        return asdict(node)
    raise TypeError(f"{type(node).__name__} has no JSON")


def configure_logging() -> None:
    """Events on standard error: lines for people on a terminal, JSON elsewhere. Events are names, facts are fields."""
    people = sys.stderr.isatty()
    renderer = structlog.dev.ConsoleRenderer() if people else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=not people),
            lambda _, __, event: call.complete_document(event),
            renderer,
        ],
        # Asked for anew with each event: on a terminal rich puts its own stream in this place for a while.
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
        cache_logger_on_first_use=False,
    )


def say(line: str) -> None:
    err.print(line, highlight=False, markup=False, soft_wrap=True)


def print_json(document: Any) -> None:
    documents.print(call.complete_document(document))


def print_error(error: CdcError) -> None:
    err.print(f"[bold red]error:[/] {_escaped(error.message)}", highlight=False, soft_wrap=True)
    err.print(f"[bold]hint:[/] {_escaped(call.complete_commands(error.hint))}", highlight=False, soft_wrap=True)


def print_failure(error: CdcError) -> None:
    """The document of a verb that has failed, unless it has printed its own."""
    if not documents.printed:
        print_json({"error": {"message": error.message, "hint": error.hint, "exit_code": error.exit_code}})


def _escaped(text: str) -> str:
    return text.replace("[", "\\[")
