"""Errors that are findings: each code is one of the catalogue, and programs get the finding."""

import ast
import json
from collections.abc import Iterator

import pytest

from cdc.cli.console import call, print_error, print_failure
from cdc.errors import CdcError, KafkaUnavailable, SourceError, SourceUnavailable
from cdc.model.finding_codes import KINDS
from tests.support.pages import ROOT

MISSING = SourceError(
    "There is no publication shop.",
    hint="cdc -p FILE migrate",
    finding_key="publication-differs/missing",
    publication="shop",
)


def keys_of_errors() -> Iterator[str]:
    """Every key that is written down beside an error or a fault of a source."""
    for folder in ("cdc", "connectors", "migrations", "sinks"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                match node:
                    case ast.keyword(arg="finding_key", value=value):
                        parts = [*ast.walk(value)]
                    case ast.Call(func=ast.Name(id="Fault"), args=[key, *_]):
                        parts = [key]
                    case _:
                        continue
                values = [part.value for part in parts if isinstance(part, ast.Constant)]
                yield from (str(value) for value in values if value)


def test_every_key_of_an_error_is_in_the_catalogue() -> None:
    codes = set(keys_of_errors())
    assert {"publication-differs/missing", "topic-unfit/policy", "row-security"} <= codes
    assert codes - set(KINDS) == set()
    classes: list[type[CdcError]] = [CdcError, *_below(CdcError)]
    assert {cls.finding_key for cls in classes if cls.finding_key} <= set(KINDS)


def _below(cls: type[CdcError]) -> Iterator[type[CdcError]]:
    for below in cls.__subclasses__():
        yield below
        yield from _below(below)


def test_a_class_has_the_key_of_its_errors() -> None:
    assert SourceUnavailable("Away.", hint="wait").finding_key == "source-unreachable"
    assert KafkaUnavailable("Away.", hint="wait").finding_key == "kafka-unreachable"
    assert SourceError("Odd.", hint="look").finding_key is None


@pytest.fixture(autouse=True)
def unanswered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call, "answered", False)


def test_people_and_programs_get_the_finding(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(MISSING)
    # The code without its case.
    assert "There is no publication shop. (publication-differs)" in capsys.readouterr().err
    print_failure(MISSING)
    document = json.loads(capsys.readouterr().out)
    assert document["error"]["exit_code"] == 4
    expected = {"code": "publication-differs", "subject": "shop", "severity": "down"}
    assert expected.items() <= document["finding"].items()
    assert document["finding"]["why"]


def test_an_error_without_a_code_is_no_finding(capsys: pytest.CaptureFixture[str]) -> None:
    print_failure(SourceError("Odd.", hint="look"))
    assert set(json.loads(capsys.readouterr().out)) == {"error"}
