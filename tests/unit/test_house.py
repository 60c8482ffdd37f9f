"""The rules of the house that no linter has: events of logs have names, verbs start quickly."""

import ast
import re
import subprocess
import sys

from tests.support.pages import ROOT

LEVELS = ("debug", "info", "warning", "error", "exception")


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
