"""`cdc --help` lists the verbs as a pipeline's life needs them."""

import re
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from cdc.cli import workflow
from cdc.cli.verbs import app


def sections() -> dict[str, list[str]]:
    """The verbs of each section, as they are printed."""
    text = CliRunner().invoke(app, ["--help"]).stdout
    listed: dict[str, list[str]] = {}
    for heading, body in re.findall(r"^(\S.*):\n((?:  .+\n)+)", text, re.MULTILINE):
        listed[heading] = re.findall(r"^  ([a-z]+) ", body, re.MULTILINE)
    listed.pop("Options")
    return listed


def test_the_verbs_are_listed_in_the_order_of_the_workflow() -> None:
    listed = sections()
    assert list(listed) == ["Set up", "Run", "Look", "Rebuild", "Repair", "Take away"]
    assert listed["Set up"] == ["init", "up", "plan", "migrate", "register", "down"]
    assert listed["Run"] == ["run", "pause", "resume"]
    assert listed["Look"][0] == "status"
    assert listed["Rebuild"] == ["rebuild", "generations", "rollback"]
    assert listed["Repair"] == ["quarantine", "topics"]
    assert listed["Take away"] == ["destroy"]


def test_every_verb_is_listed_once() -> None:
    command: Any = typer.main.get_command(app)
    listed = [verb for verbs in sections().values() for verb in verbs]
    assert sorted(listed) == sorted(command.commands)


def test_a_verb_of_no_section_is_listed_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(workflow.HEADING, "up")
    assert list(sections().items())[-1] == ("Other", ["up"])
