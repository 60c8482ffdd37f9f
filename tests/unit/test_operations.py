"""Which verbs write to the operation log, and what they write."""

from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from cdc.cli.verbs import app
from cdc.control import operations
from cdc.control.operations import Operation, recording
from cdc.errors import SinkRejected
from tests.support.pipelines import pipeline, unreachable_file

SHOP = pipeline("shop", "", "public.orders")
CHANGING = {
    "migrate", "register", "rebuild", "rollback", "generations", "verify", "chaos", "pause", "resume",
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


@pytest.mark.parametrize(
    ("words", "recorded"),
    [
        ("pause cache --json", [{"sink": "cache"}]),
        ("rebuild cache", [{"sink": "cache", "keep": 1.0}]),
        ("generations --clean", [{"clean": True}]),
        ("generations", []),
        ("migrate", [{}]),
        ("migrate --dry-run", []),
    ],
)
def test_a_verb_notes_what_was_said_if_it_changes_something(
    words: str, recorded: list[dict[str, Any]], log_entries: list[Operation], tmp_path: Path
) -> None:
    file = unreachable_file(tmp_path, "public.orders")
    assert CliRunner().invoke(app, ["-p", str(file), *words.split()]).exit_code
    assert [entry.arguments for entry in log_entries] == recorded


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
