"""`cdc quarantine`: look at records that could not be applied, have them tried again, or give them up."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cdc.cli.console import Json, out, print_json
from cdc.errors import SettingsError

if TYPE_CHECKING:
    from cdc.kafka.topics import Topics
    from cdc.quarantine.log import QuarantinedRecord, QuarantineLog

WAIT_S = 30.0
app = typer.Typer(help="Records that could not be applied.", no_args_is_help=True, rich_markup_mode=None)
Place = Annotated[str, typer.Argument(help="sink/topic/partition/offset, as `list` shows it.")]
Places = Annotated[list[str] | None, typer.Argument(help="sink/topic/partition/offset; all when left out.")]


@app.command("list")
def list_(context: typer.Context, as_json: Json = False) -> None:
    """What is in quarantine, and why. Shows no values."""
    with _ledger(context) as (_, ledger):
        found = _entries(ledger)
    if as_json:
        return print_json({"quarantine": [_told(one) for one in found]})
    from cdc.cli import render

    out.print(render.quarantine(found) if found else "nothing is in quarantine")
    return None


@app.command()
def show(context: typer.Context, place: Place, as_json: Json = False) -> None:
    """One record with its key and value, as the topic has them."""
    with _ledger(context) as (_, ledger):
        (one,) = _chosen(_entries(ledger), [place])
        record = ledger.read_record(one)
    key, value = (None if raw is None else raw.decode("utf-8", "backslashreplace") for raw in record)
    if as_json:
        return print_json({**_told(one), "key": key, "value": value})
    for name, text in {**_told(one), "key": key, "value": value}.items():
        out.print(f"{name}: {text}", markup=False, highlight=False, soft_wrap=True)
    return None


@app.command()
def redrive(context: typer.Context, places: Places = None, as_json: Json = False) -> None:
    """Have `cdc run` try records again; it can't overwrite a newer state of their rows."""
    from cdc.quarantine.log import request_redrive

    with _ledger(context) as (kafka, ledger):
        entries = {one.entry for one in _chosen(_entries(ledger), places)}
        request_redrive(kafka, context.obj.pipeline, entries)
        deadline, left = time.monotonic() + WAIT_S, entries
        while entries and time.monotonic() < deadline:
            found = {one.entry for one in ledger.read()}
            left = entries & found
            if not any(entry.redrive for entry in found):
                break
            time.sleep(0.5)
        waiting = any(one.entry.redrive for one in ledger.read())
    if as_json:
        return print_json({"asked": len(entries), "left": sorted(entry.place for entry in left), "waiting": waiting})
    if waiting:
        out.print(f"asked for {len(entries)}; no cdc run has taken it up yet, its next start will", highlight=False)
    else:
        out.print(f"{len(entries) - len(left)} of {len(entries)} could be applied", highlight=False)
    return None


@app.command()
def discard(context: typer.Context, places: Annotated[list[str], typer.Argument(help="As `list` shows them.")]) -> None:
    """Give records up: their rows stay as they are until a newer change, or a rebuild."""
    from cdc.quarantine.log import settle_entries

    with _ledger(context) as (kafka, ledger):
        chosen = _chosen(_entries(ledger), places)
        settle_entries(kafka, context.obj.pipeline, [one.entry for one in chosen])
    out.print(f"discarded {len(chosen)}", highlight=False)


@contextmanager
def _ledger(context: typer.Context) -> "Iterator[tuple[Topics, QuarantineLog]]":
    from cdc.kafka.topics import Topics
    from cdc.quarantine.log import QuarantineLog

    with Topics(context.obj.pipeline.kafka) as kafka:
        yield kafka, QuarantineLog(kafka, context.obj.pipeline)


def _entries(ledger: "QuarantineLog") -> "list[QuarantinedRecord]":
    entries = (one for one in ledger.read() if not one.entry.redrive)
    return sorted(entries, key=lambda held: held.entry.order)


def _chosen(found: "list[QuarantinedRecord]", places: list[str] | None) -> "list[QuarantinedRecord]":
    by_place = {one.entry.place: one for one in found}
    if unknown := [place for place in places or () if place not in by_place]:
        raise SettingsError(f"{unknown[0]} isn't in quarantine.", hint="cdc -p FILE quarantine list")
    return [by_place[place] for place in (places or by_place)]


def _told(one: "QuarantinedRecord") -> dict[str, Any]:
    entry = one.entry
    return {
        "place": entry.place,
        "sink": entry.sink,
        "topic": entry.topic,
        "partition": entry.partition,
        "offset": entry.offset,
        "id": entry.id,
        "reason": one.reason,
        "at": one.at,
    }
