"""What is printed where: documents on standard output, everything else on standard error."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cdc.cli import console
from cdc.model.outcome import Applied
from tests.support.pages import ROOT


def spoken(code: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT
    )


def test_logs_go_to_standard_error_as_json_lines() -> None:
    code = (
        "from cdc.cli.console import configure_logging; configure_logging(); "
        "import structlog; structlog.get_logger().warning('sink_waiting', sink='cache')"
    )
    process = spoken(code)
    assert process.stdout == ""
    (line,) = process.stderr.splitlines()
    event = json.loads(line)
    assert (event["event"], event["level"], event["sink"]) == ("sink_waiting", "warning", "cache")


def test_a_document_holds_objects_not_pythons_text_for_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    console.print_json({"applied": Applied(read=3)})
    assert json.loads(capsys.readouterr().out)["applied"]["read"] == 3


def test_a_text_is_printed_as_it_is() -> None:
    text = "of [bold] rows, :smile: and 12"
    process = spoken(
        f"from cdc.cli import console; console.out.print({text!r}); console.say({text!r})"
    )
    assert (process.stdout, process.stderr) == (f"{text}\n", f"{text}\n")


@pytest.mark.parametrize("odd", [object(), {1, 2}, float("nan"), Path()])
def test_what_has_no_json_is_a_bug_not_a_text(odd: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        console.print_json({"x": odd})


def test_a_verb_that_fails_prints_a_document_as_well(tmp_path: Path) -> None:
    words = ["-p", str(tmp_path / "none.yaml"), "status", "--json"]
    command = [sys.executable, "-m", "cdc.entry", *words]
    process = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT)
    assert process.returncode == 2
    error = json.loads(process.stdout)["error"]
    assert "none.yaml" in error["message"]
    assert (error["exit_code"], bool(error["hint"])) == (2, True)
    assert "hint:" in process.stderr
