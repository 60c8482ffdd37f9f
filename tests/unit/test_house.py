"""The rules of the house that no linter has: contracts of imports leave no room out, verbs start quickly."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


OF_SINKS = ("codec", "config", "errors", "model", "sink", "views")
"""The rooms that a destination may know."""


@pytest.mark.parametrize(
    ("contract", "known"),
    [
        ("connectors, compose, migrations", {"cdc.errors", "cdc.model"}),
        ("A sink knows the contract", {f"cdc.{room}" for room in OF_SINKS}),
    ],
)
def test_a_contract_forbids_every_room_but_those_that_may_be_known(
    contract: str, known: set[str]
) -> None:
    """A room that is in neither list could be imported unnoticed."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (terms,) = (
        candidate for candidate in contracts["contracts"] if candidate["name"].startswith(contract)
    )
    paths = [path for path in (ROOT / "cdc").iterdir() if path.is_dir() or path.suffix == ".py"]
    rooms = {f"cdc.{path.stem}" for path in paths if not path.stem.startswith("_")}
    assert {"cdc.postgres", "cdc.errors", "cdc.sinks"} <= rooms
    own = {".".join(module.split(".")[:2]) for module in terms["source_modules"]}
    assert rooms - own - known - set(terms["forbidden_modules"]) == set()


def test_verbs_that_need_no_spark_start_without_it() -> None:
    names = "cdc.cli.verbs, cdc.observe.collection, cdc.verify.barrier, cdc.compose.stack"
    names += ", cdc.cli.run, cdc.cli.status"
    names += ", cdc.capture.connector, cdc.migrations, cdc.sinks"
    names += ", cdc.compose.docker, cdc.serve.app, cdc.serve.server, cdc.cli.serve"
    names += ", cdc.sinks.redis.sink, cdc.sinks.elasticsearch.sink, cdc.sinks.delta.sink"
    code = f"import {names}, sys; sys.exit('pyspark' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT).returncode == 0
