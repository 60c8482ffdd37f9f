"""The rules of the house: who may import whom, how long things may get."""

import ast
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("cdc", "sinks", "connectors", "compose", "migrations", "sample", "bench")
OURS = {*PACKAGES, "tests"}
LEVELS = ("debug", "info", "warning", "error", "exception")
MODULE_LINES, FUNCTION_LINES, MEDIAN_LINES = 410, 40, 12


def modules() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def imports(source: str) -> Iterator[str]:
    """Every imported name, wherever in the file: `from cdc import tree` is cdc.verify.bucket_hashes."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def forbidden(module: str, name: str) -> bool:
    """Whether a module may not import a name: DESIGN section 2."""
    top, ours = name.split(".", maxsplit=1)[0], name.split(".", maxsplit=1)[0] in OURS
    if module in ("cdc.model.position", "cdc.errors"):
        return top not in sys.stdlib_module_names
    package = module.split(".", maxsplit=1)[0]
    if package == "sinks" and module != "sinks":
        own = ".".join(module.split(".")[:2]).split("_", maxsplit=1)[0]
        plain = (
            "cdc.model.address",
            "cdc.model.causes",
            "cdc.model",
            "cdc.codec",
            "cdc.errors",
            "cdc.verify.lossless_json",
            "cdc.sink.lane",
            "cdc.sink.lane_run",
            "cdc.sink.lane_task",
            "cdc.codec.decode_options",
            "cdc.sink.rejection",
            "cdc.model.pg_types",
        )
        allowed = (*plain, "cdc.sink", own)
        return ours and not any(name == one or name.startswith((f"{one}.", f"{own}_")) for one in allowed)
    if package == "cdc" and module not in ("cdc.cli.verbs", "cdc.runtime"):
        return top in ("sinks", "sample", "tests", "compose")
    if package in ("connectors", "compose", "migrations"):
        return top in ("pyspark", "sinks", "sample", "tests")
    return top == "tests"


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_imports_go_one_way(path: Path) -> None:
    wrong = [name for name in imports(path.read_text()) if forbidden(name_of(path), name)]
    assert not wrong


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("cdc.model.position", "import pyspark"),
        ("sinks.redis", "from sinks import memory"),
        ("sinks.delta.sink", "def f():\n    from cdc.apply.stream import Stream"),
        ("cdc.apply.stream", "from sinks.redis.sink import Redis"),
        ("compose.stack", "from pyspark.sql import SparkSession"),
    ],
)
def test_a_wrong_import_is_found(module: str, source: str) -> None:
    assert any(forbidden(module, name) for name in imports(source))


def test_verbs_that_need_no_spark_start_without_it() -> None:
    names = "cdc.cli.verbs, cdc.observe.status, cdc.cli.render, cdc.verify.barrier, compose.stack"
    names += ", cdc.capture.connector, migrations, sinks"
    names += ", sinks.redis.sink, sinks.elasticsearch.sink, sinks.delta.sink"
    code = f"import {names}, sys; sys.exit('pyspark' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT).returncode == 0


def functions(path: Path) -> list[tuple[str, int]]:
    found = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [(node.name, (node.end_lineno or node.lineno) - node.lineno + 1) for node in found]


def test_nothing_grows_too_long() -> None:
    lengths = {path: functions(path) for path in modules()}
    long = [f"{name_of(p)}: {n} lines" for p in lengths if (n := len(p.read_text().splitlines())) > MODULE_LINES]
    long += [
        f"{name_of(p)}.{name}: {n} lines" for p, found in lengths.items() for name, n in found if n > FUNCTION_LINES
    ]
    assert not long
    assert statistics.median(n for found in lengths.values() for _, n in found) < MEDIAN_LINES


def events(source: str) -> Iterator[str]:
    """The first argument of every call of `log`, as it is written."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            of = node.func.value
            if isinstance(of, ast.Name) and of.id == "log" and node.func.attr in LEVELS:
                yield ast.unparse(node.args[0])


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_events_have_stable_names(path: Path) -> None:
    assert [event for event in events(path.read_text()) if not re.fullmatch(r"'[a-z]+(_[a-z]+)+'", event)] == []
