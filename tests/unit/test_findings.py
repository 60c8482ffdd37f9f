"""Codes of findings: each has a page, a command to run, and a place on one screen."""

import io
import json
import re
import shlex
from dataclasses import replace

import jsonschema  # type: ignore[import-untyped]
import pytest
from rich.console import Console

from cdc.cli.status import draw_status
from cdc.errors import CdcError
from cdc.model.finding import (
    Finding,
    Severity,
    exit_code,
    find,
    find_error,
    find_setting,
    folded,
    is_command,
    only_looks,
    verdict,
    worst_first,
)
from cdc.model.finding_codes import CODES, KINDS, SETTINGS
from cdc.observe.diagnosis import diagnose, document, slow_hop
from cdc.observe.status import SinkStatus, Status, ViewStatus
from docs.generate import FOLDER
from tests.support.pages import ROOT, refusal

RUNBOOKS = FOLDER / "operate" / "runbooks"
PARTS_OF_CODE = ("cdc", "sinks", "connectors", "compose")


def test_every_code_has_a_page_and_every_page_a_code() -> None:
    pages = {page.stem for page in RUNBOOKS.glob("*.md")} - {"index"}
    assert pages == set(CODES)
    listed = re.findall(r"^\| \[([a-z-]+)\]", (RUNBOOKS / "index.md").read_text(), re.MULTILINE)
    assert listed == list(CODES)


@pytest.mark.parametrize("key", SETTINGS)
def test_the_page_of_settings_has_each_with_what_comes_of_it(key: str) -> None:
    setting = key.removeprefix("setting-differs/").partition("=")[0]
    kind = KINDS[key]
    rows = (RUNBOOKS / "setting-differs.md").read_text().splitlines()
    (row,) = [row for row in rows if row.startswith(f"| `{setting}`") and kind.why in row]
    assert f"| {kind.severity} |" in row


def test_a_finding_has_the_severity_and_the_consequence_of_its_code() -> None:
    fix = "cdc -p FILE run --sink cache"
    finding = find("sink-failed", "cache", "It is full.", fix, sink="cache")
    assert (finding.severity, finding.hop, finding.exit_code) == ("down", "Kafka -> cache", 7)
    assert finding.why
    cause = CdcError("Other.", hint="cdc -p FILE register")
    error = find_error("another-server", "Postgres", cause)
    assert (error.message, error.fix, error.exit_code) == ("Other.", "cdc -p FILE register", 1)


HINTS = {
    "cdc -p FILE migrate": ("", "cdc -p FILE migrate"),
    "SELECT 1, 2;": ("", "SELECT 1, 2;"),
    "cdc -p FILE migrate, then cdc -p FILE register": (
        "",
        "cdc -p FILE migrate && cdc -p FILE register",
    ),
    "cdc -p FILE migrate, then cdc -p FILE register: it sends all rows again": (
        " It sends all rows again.",
        "cdc -p FILE migrate && cdc -p FILE register",
    ),
    "check `kafka` in the file; the local stack is started by: cdc -p FILE up": (
        " Check `kafka` in the file; the local stack is started by: cdc -p FILE up.",
        "cdc -p FILE up",
    ),
    "look at the broker's log, then: cdc -p FILE topics": (
        " Look at the broker's log, then: cdc -p FILE topics.",
        "cdc -p FILE topics",
    ),
    "is the server up? it is tried again": (" Is the server up? it is tried again.", None),
    "ALTER TABLE t ADD PRIMARY KEY (...), or name a key": (
        " ALTER TABLE t ADD PRIMARY KEY (...), or name a key.",
        None,
    ),
    "": ("", None),
}


@pytest.mark.parametrize("key", KINDS)
def test_the_fix_of_every_case_is_a_command_whatever_the_hint(key: str) -> None:
    """The sentence of a hint is in the message: a page copies `fix`, a webhook passes it on."""
    for hint, (sentence, command) in HINTS.items():
        made = find_error(key, "t", CdcError("It is full.", hint=hint))
        assert is_command(made.fix), hint
        decision = KINDS[key].decision if only_looks(made.fix) and not sentence else ""
        assert made.message == f"It is full.{sentence} {decision}".rstrip()
        assert command in (None, made.fix)


def test_a_hint_that_begins_with_a_command_says_where_it_ends() -> None:
    """The command line itself parses what would be pasted."""
    paths = [path for part in PARTS_OF_CODE for path in (ROOT / part).rglob("*.py")]
    hints = [
        re.sub(r"\{[^}]*\}", "NAME", hint)
        for path in paths
        for hint in re.findall(
            r'(?:hint|fix|following)=?\s?=?\s?f?"(cdc -p FILE [^"]*)"', path.read_text()
        )
    ]
    # Where the verb itself is chosen at run time, each choice is elsewhere.
    hints = [hint for hint in hints if not hint.startswith("cdc -p FILE NAME")]
    assert len(hints) > 10
    fixes = [find("sink-failed", "cache", "No.", hint).fix for hint in hints]
    commands = [command for fix in fixes for command in fix.split(" && ")]
    assert [text for command in commands if (text := refusal(shlex.split(command)[1:]))] == []


def finding(severity: Severity, code: str = "sink-behind", table: str = "t") -> Finding:
    return replace(find(code, table, f"{table} is late.", "cdc -p FILE status"), severity=severity)


def test_the_worst_decides() -> None:
    severities = (Severity.INFO, Severity.WARNING, Severity.DOWN)
    info, warning, down = map(finding, severities)
    assert worst_first([info, down, warning]) == (down, warning, info)
    assert (verdict([down, info]), exit_code([down, info])) == ("down", 7)
    assert (verdict([info]), exit_code([info])) == ("ok", 0)
    assert (verdict([]), exit_code([])) == ("ok", 0)


def test_findings_that_are_alike_are_one_line() -> None:
    many = [finding(Severity.DEGRADED, "view-stopped", f"t{number}") for number in range(40)]
    (line, second_line) = folded([*many, finding(Severity.DEGRADED)])
    assert line.count == 40
    assert "39 more like it" in line.message
    assert second_line.code == "sink-behind"


def test_settings_are_alike_only_where_the_same_comes_of_them() -> None:
    names = ("delete.retention.ms", "min.compaction.lag.ms", "delete.retention.ms")
    lines = folded([find_setting(name, "It is off.", "cdc -p FILE topics") for name in names])
    assert [line.count for line in lines] == [2, 1]


def wide_status() -> Status:
    """A status of 500 tables in two sinks, each with records in quarantine."""
    views = tuple(
        ViewStatus(f"public.t{number}", number, number * 0.1, 9, 5.0, quarantined=1)
        for number in range(500)
    )
    return diagnose(Status("shop", sinks=(SinkStatus("cache", views=views),)))


def test_500_tables_are_one_screen_of_80_columns_with_the_worst() -> None:
    status = wide_status()
    console = Console(file=io.StringIO(), width=80)
    console.print(draw_status(status, slow_hop(status)))
    text = str(console.file.getvalue())  # type: ignore[attr-defined]
    assert len(text.splitlines()) < 40
    assert max(map(len, text.splitlines())) <= 80
    assert "public.t499" in text
    assert "499 more like it" in " ".join(text.split())
    assert "and 488 more, none worse" in text


def test_the_documents_are_as_the_schema_says() -> None:
    schema = json.loads((FOLDER / "reference" / "status.schema.json").read_text())
    output = json.loads(json.dumps(document(wide_status())))
    jsonschema.validate(output, schema)
    assert len(output["findings"]) == 501
    del output["findings"][0]["fix"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(output, schema)
