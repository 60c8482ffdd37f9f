"""Verbs of `cdc quarantine`: list, show, retry or discard the records that can't be applied."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType

from cdc.cli.console import Json, answer, out
from cdc.cli.operations import recorded
from cdc.cli.screen import Grid, age
from cdc.errors import SettingsError
from cdc.model.wording import UNKNOWN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cdc.kafka.topics import Topics
    from cdc.quarantine.log import QuarantinedRecord, QuarantineLog

WAIT_S = 30.0
"""Seconds that `redrive` waits for a `cdc run` to try the records again."""
app = typer.Typer(
    help="List, show, retry or discard records that can't be applied.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
Place = Annotated[
    str, typer.Argument(help="The record, as `list` shows it: sink/topic/partition/offset.")
]
Places = Annotated[
    list[str] | None, typer.Argument(help="Records, as `list` shows them. Default: all.")
]


@app.command("list")
def list_(context: typer.Context, as_json: Json = False) -> None:
    """List the records in quarantine, and why they are there.

    Row values are not shown.
    """
    with _open_log(context) as (_, quarantine_log):
        records = _read_records(quarantine_log)
    document = {"quarantine": [_to_row(record) for record in records]}
    answer(as_json, document, draw_quarantine(records) if records else "nothing is in quarantine")


@app.command()
def show(context: typer.Context, place: Place, as_json: Json = False) -> None:
    """Show one record with its key and value.

    They are printed as the topic has them, row values included.
    """
    with _open_log(context) as (_, quarantine_log):
        (entry_record,) = _select(_read_records(quarantine_log), [place])
        record = quarantine_log.read_record(entry_record)
    key, value = (
        None if raw is None else raw.decode("utf-8", "backslashreplace") for raw in record
    )
    document = {**_to_row(entry_record), "key": key, "value": value}
    answer(as_json, document, "\n".join(f"{name}: {text}" for name, text in document.items()))


@app.command()
@recorded("quarantine redrive")
def redrive(context: typer.Context, places: Places = None, as_json: Json = False) -> None:
    """Have `cdc run` try records again.

    A newer state of their rows is never overwritten.
    """
    from cdc.quarantine.log import request_redrive

    with _open_log(context) as (kafka, quarantine_log):
        entries = {record.entry for record in _select(_read_records(quarantine_log), places)}
        request_redrive(kafka, context.obj.pipeline, entries)
        deadline = time.monotonic() + WAIT_S
        remaining = entries
        untried = entries
        while untried and time.monotonic() < deadline:
            time.sleep(0.5)
            keys = {record.entry for record in quarantine_log.read()}
            remaining = entries & keys
            # Requests of others may be for a sink that isn't run.
            untried = {entry for entry in remaining if replace(entry, redrive=True) in keys}
    document = {
        "asked": len(entries),
        "left": sorted(entry.place for entry in remaining),
        "waiting": bool(untried),
    }
    outcome = f"{len(entries) - len(remaining)} of {len(entries)} could be applied"
    if untried:
        outcome = f"requested {len(entries)}; no cdc run has tried {len(untried)} of them yet, the next one will"
    answer(as_json, document, outcome)


@app.command()
@recorded("quarantine discard")
def discard(
    context: typer.Context,
    places: Annotated[list[str], typer.Argument(help="Records, as `list` shows them.")],
) -> None:
    """Remove records from quarantine without applying them.

    Their rows stay as they are until a newer change, or a rebuild.
    """
    from cdc.quarantine.log import settle_entries

    with _open_log(context) as (kafka, quarantine_log):
        chosen = _select(_read_records(quarantine_log), places)
        settle_entries(kafka, context.obj.pipeline, [record.entry for record in chosen])
    out.print(f"discarded {len(chosen)}")


@contextmanager
def _open_log(context: typer.Context) -> "Iterator[tuple[Topics, QuarantineLog]]":
    from cdc.kafka.topics import Topics
    from cdc.quarantine.log import QuarantineLog

    with Topics(context.obj.pipeline.kafka) as kafka:
        yield kafka, QuarantineLog(kafka, context.obj.pipeline)


def _read_records(quarantine_log: "QuarantineLog") -> "list[QuarantinedRecord]":
    entries = (record for record in quarantine_log.read() if not record.entry.redrive)
    return sorted(entries, key=lambda record: record.entry.order)


def _select(
    records: "list[QuarantinedRecord]", places: list[str] | None
) -> "list[QuarantinedRecord]":
    by_place = {record.entry.place: record for record in records}
    if unknown := [place for place in places or () if place not in by_place]:
        raise SettingsError(
            f"{unknown[0]} isn't in quarantine.", hint="cdc -p FILE quarantine list"
        )
    return [by_place[place] for place in (places or by_place)]


def _to_row(record: "QuarantinedRecord") -> dict[str, Any]:
    entry = record.entry
    return {
        "place": entry.place,
        "sink": entry.sink,
        "topic": entry.topic,
        "partition": entry.partition,
        "offset": entry.offset,
        "id": entry.id,
        "reason": record.reason,
        "at": record.at,
    }


def draw_quarantine(records: "Sequence[QuarantinedRecord]") -> RenderableType:
    """Draw the records in quarantine, without row values."""
    grid = Grid("place", "row", "since", "reason")
    for record in records:
        grid.add_row(record.entry.place, record.entry.id or UNKNOWN, age(record.at), record.reason)
    return grid
