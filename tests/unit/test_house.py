"""The rules of the house that no linter has: events of logs have names, verbs start quickly."""

import ast
import re
import subprocess
import sys
import tomllib

import pytest

from tests.__main__ import CONTAINER_TESTS, PARTS
from tests.support.pages import ROOT

LEVELS = ("debug", "info", "warning", "error", "exception")
OF_SINKS = {"codec", "config", "errors", "model", "sink", "documents", "redis"}
"""The rooms that a destination may know."""


def test_every_test_file_is_in_one_part() -> None:
    for path in (ROOT / "tests").rglob("test_*.py"):
        file = str(path.relative_to(ROOT))
        parts = [
            words
            for words in PARTS.values()
            if f"--ignore={file}" not in words
            and any(file == word or file.startswith(f"{word}/") for word in words)
        ]
        # Tests that need a Docker engine run on demand alone.
        assert len(parts) == (not file.startswith(f"{CONTAINER_TESTS}/")), (file, parts)


@pytest.mark.parametrize(
    ("contract", "known"),
    [("connectors, compose, migrations", {"errors", "model"}), ("A sink knows the contract", OF_SINKS)],
)  # fmt: skip
def test_a_contract_forbids_every_room_but_those_that_may_be_known(
    contract: str, known: set[str]
) -> None:
    """A room that is in neither list could be imported unnoticed."""
    rules = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (terms,) = (rule for rule in rules["contracts"] if rule["name"].startswith(contract))
    paths = [path for path in (ROOT / "cdc").iterdir() if path.is_dir() or path.suffix == ".py"]
    rooms = {f"cdc.{path.stem}" for path in paths if not path.stem.startswith("_")}
    own = {".".join(module.split(".")[:2]) for module in terms["source_modules"]}
    allowed = own | {f"cdc.{room}" for room in known}
    assert rooms - allowed - set(terms["forbidden_modules"]) == set()


def test_log_events_have_constant_names() -> None:
    """So that a log can be filtered by them, and none quotes a value."""
    names = [
        ast.unparse(node.args[0])
        for part in ("cdc", "sinks", "compose", "migrations", "sample")
        for path in (ROOT / part).rglob("*.py")
        if "log." in (text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "log"
        and node.func.attr in LEVELS
    ]
    assert len(names) > 20
    assert [name for name in names if not re.fullmatch(r"'[a-z]+(_[a-z]+)+'", name)] == []


def test_verbs_that_need_no_spark_start_without_it() -> None:
    names = "cdc.cli.verbs, cdc.observe.collection, cdc.verify.barrier, cdc.compose.stack"
    names += ", cdc.cli.run, cdc.cli.status"
    names += ", cdc.capture.connector, cdc.migrations, cdc.sinks"
    names += ", cdc.compose.docker, cdc.serve.server, cdc.cli.health"
    names += ", cdc.sinks.redis.sink, cdc.sinks.elasticsearch.sink, cdc.sinks.delta.sink"
    code = f"import {names}, sys; sys.exit('pyspark' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT).returncode == 0


def test_types_are_prepared_when_a_module_is_loaded() -> None:
    """Threads that decode a dataclass for the first time at the same time crash msgspec 0.22: one meets what the
    other has made half. `Decoder(...)` on a module's level is made by one thread.
    """
    calls = [
        ast.unparse(node)
        for part in ("cdc", "sinks", "compose", "migrations", "sample")
        for path in (ROOT / part).rglob("*.py")
        if "msgspec" in (text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("msgspec.json.decode", "msgspec.convert")
    ]
    builtin = {"msgspec.json.decode(value, type=str)", "msgspec.convert(value, type_)"}
    assert set(calls) - builtin == set()
