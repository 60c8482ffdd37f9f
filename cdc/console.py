"""How every verb speaks: documents and tables on standard output, everything else on standard error."""

import json
from typing import Annotated, Any

import typer
from rich.console import Console

from cdc.errors import CdcError

out, err = Console(), Console(stderr=True)
Json = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]

Master = Annotated[str, typer.Option(help="Any Spark master.", envvar="CDC_MASTER")]


def say(line: str) -> None:
    err.print(line, highlight=False, markup=False)


def print_json(document: Any) -> None:
    print(json.dumps(document, default=str, ensure_ascii=False))


def print_error(error: CdcError) -> None:
    err.print(f"[bold red]error:[/] {_plain(error.message)}", highlight=False, soft_wrap=False)
    err.print(f"[bold]hint:[/] {_plain(error.hint)}", highlight=False)


def _plain(text: str) -> str:
    return text.replace("[", "\\[")
