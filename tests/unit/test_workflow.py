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


def test_every_verb_is_listed_once() -> None:
    command: Any = typer.main.get_command(app)
    listed = [verb for verbs in sections().values() for verb in verbs]
    assert sorted(listed) == sorted(command.commands)


def test_a_verb_of_no_section_is_listed_last(monkeypatch: pytest.MonkeyPatch) -> None:
    headings = {verb: heading for verb, heading in workflow.HEADING.items() if verb != "up"}
    monkeypatch.setattr(workflow, "HEADING", headings)
    assert list(sections().items())[-1] == ("Other", ["up"])
