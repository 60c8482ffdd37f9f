"""Which verbs write to the operation log, and what they write."""

from contextlib import nullcontext
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from cdc.cli.operations import recorded
from cdc.cli.verbs import app
from cdc.control import operations
from cdc.control.operations import Operation, recording
from cdc.errors import SinkRejected
from tests.support.pipelines import pipeline

SHOP = pipeline("shop", "", "public.orders")
CHANGING = {
    "migrate", "register", "rebuild", "rollback", "generations", "verify", "pause", "resume",
    "quarantine redrive", "quarantine discard", "topics renew",
}  # fmt: skip


@pytest.fixture
def log_entries(monkeypatch: pytest.MonkeyPatch) -> list[Operation]:
    entries: list[Operation] = []
    monkeypatch.setattr(operations, "write", lambda _, operation: entries.append(operation))
    return entries


def test_the_outcome_is_written_whatever_it_is(log_entries: list[Operation]) -> None:
    with recording(SHOP, "rebuild", {"sink": "cache"}, "ann@host"):
        pass
    refusal = SinkRejected("It is full.", hint="make room")
    for error in (refusal, ValueError("a value of a row"), KeyboardInterrupt()):
        with pytest.raises(type(error)), recording(SHOP, "rollback", {}, "ann@host"):
            raise error
    assert [(entry.verb, entry.result, entry.exit_code) for entry in log_entries] == [
        ("rebuild", "done", 0),
        ("rollback", "It is full.", 7),
        ("rollback", "ValueError", 1),
        ("rollback", "interrupted", 130),
    ]
    assert log_entries[0].arguments == {"sink": "cache"}


def test_a_log_that_can_not_be_written_ends_nothing() -> None:
    """Kafka is nowhere here."""
    with recording(SHOP, "pause", {"sink": "cache"}, "ann@host"):
        pass


def test_a_recorded_verb_has_its_options_and_writes_what_was_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []

    def note(_: object, verb: str, arguments: dict[str, Any], __: str) -> nullcontext[None]:
        calls.append((verb, arguments))
        return nullcontext()

    monkeypatch.setattr(operations, "recording", note)
    toy = typer.Typer()

    class Loaded:
        def load(self) -> object:
            return SHOP

    @toy.callback()
    def options(context: typer.Context) -> None:
        context.obj = Loaded()

    @toy.command()
    @recorded("change", lambda arguments: not arguments["dry_run"])
    def change(
        context: typer.Context,
        sink: str,
        table: str | None = None,
        dry_run: bool = False,
        as_json: bool = False,
    ) -> None:
        assert context.obj
        assert sink == "cache"

    run = CliRunner().invoke
    assert run(toy, ["change", "cache", "--dry-run"]).exit_code == 0
    assert calls == []
    assert run(toy, ["change", "cache", "--table", "public.t", "--as-json"]).exit_code == 0
    assert calls == [("change", {"sink": "cache", "table": "public.t"})]


def test_every_changing_verb_is_recorded() -> None:
    command: Any = typer.main.get_command(app)
    verbs = {
        f"{group} {name}".strip(): verb
        for group, commands in [("", command.commands)]
        + [(name, getattr(verb, "commands", {})) for name, verb in command.commands.items()]
        for name, verb in commands.items()
    }
    marked = {name for name, verb in verbs.items() if _is_recorded(verb.callback)}
    assert marked == CHANGING


def _is_recorded(callback: Any) -> bool:
    while callback is not None:
        if getattr(callback, "is_recorded", False):
            return True
        callback = getattr(callback, "__wrapped__", None)
    return False
