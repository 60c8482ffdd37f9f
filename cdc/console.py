"""How every verb speaks: documents and tables on standard output, everything else on standard error.

With `--json` standard output is one document, whatever happens: a verb that fails before it has printed its own prints
`{"error": {"message", "hint", "exit_code"}}`.
"""

import json
import sys
from dataclasses import asdict, is_dataclass
from typing import Annotated, Any

import structlog
import typer
from rich.console import Console

from cdc.errors import CdcError

out, err = Console(), Console(stderr=True)
Json = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]

Master = Annotated[str, typer.Option(help="Any Spark master.", envvar="CDC_MASTER")]


class Documents:
    """Counts the documents of this program's standard output."""

    printed = 0

    def print(self, document: Any) -> None:
        """Print one. What has no JSON is a bug: a TypeError or ValueError, never a text that only Python reads."""
        print(json.dumps(document, default=_plain, ensure_ascii=False, allow_nan=False), flush=True)
        self.printed += 1


documents = Documents()


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
            renderer,
        ],
        # Asked for anew with each event: on a terminal rich puts its own stream in this place for a while.
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
        cache_logger_on_first_use=False,
    )


def say(line: str) -> None:
    err.print(line, highlight=False, markup=False)


def print_json(document: Any) -> None:
    documents.print(document)


def print_error(error: CdcError) -> None:
    err.print(f"[bold red]error:[/] {_escaped(error.message)}", highlight=False, soft_wrap=False)
    err.print(f"[bold]hint:[/] {_escaped(error.hint)}", highlight=False)


def print_failure(error: CdcError) -> None:
    """The document of a verb that has failed, unless it has printed its own."""
    if not documents.printed:
        print_json({"error": {"message": error.message, "hint": error.hint, "exit_code": error.exit_code}})


def _escaped(text: str) -> str:
    return text.replace("[", "\\[")
