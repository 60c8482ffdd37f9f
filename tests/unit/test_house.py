"""The rules of the house: who may import whom, what a test may reach into."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("cdc", "sinks", "connectors", "compose", "migrations", "sample", "bench")
LEVELS = ("debug", "info", "warning", "error", "exception")


def modules() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """Check the contracts of pyproject.toml over the packages in a folder."""
    program = str(Path(sys.executable).with_name("lint-imports"))
    command = [program, str(ROOT / "pyproject.toml"), "--no-cache", "--no-logo"]
    return subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True)


def test_imports_go_one_way() -> None:
    result = lint(ROOT)
    assert result.returncode == 0, result.stdout


ROOMS, PLAIN = "The rooms of cdc", "connectors, compose, migrations"
OF_SINKS = ("codec", "config", "errors", "model", "sink", "views")
"""The rooms that a destination may know."""
WRONG_IMPORTS = [
    ("cdc.model.table -> pyspark", "import pyspark", "Plain data and the codec"),
    ("cdc.kafka.tail -> cdc.apply.stream", "from cdc.apply.stream import Stream", ROOMS),
    (
        "cdc.apply.stream -> cdc.sinks.redis.sink",
        "from cdc.sinks.redis.sink import Redis",
        "No room knows a destination",
    ),
    (
        "cdc.cli.verbs -> cdc.compose.docker",
        "from cdc.compose import docker",
        "Only cdc.runtime knows",
    ),
    ("cdc.model.table -> cdc.compose.versions", "from cdc.compose import versions", ROOMS),
    (
        "cdc.sinks.redis.sink -> cdc.sinks.memory",
        "from cdc.sinks import memory",
        "A sink knows no other sink",
    ),
    (
        "cdc.sinks.delta.sink -> cdc.apply.stream",
        "def late():\n    from cdc.apply.stream import Stream",
        "A sink knows the contract",
    ),
    ("cdc.compose.stack -> pyspark", "from pyspark.sql import SparkSession", PLAIN),
    ("cdc.migrations.runner -> cdc.postgres.source", "from cdc.postgres import source", PLAIN),
    ("cdc.sample.load -> tests", "from tests.support import wait", "Nothing that is delivered"),
]
"""A wrong import as it is reported, the line that is added to its module, and the contract that it
breaks.
"""


@pytest.fixture(scope="module")
def broken_contracts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What is reported of each broken contract, by its name, once all wrong imports and a room
    without a layer are planted in a copy of the packages.
    """
    folder = tmp_path_factory.mktemp("planted")
    for package in PACKAGES:
        ignore = shutil.ignore_patterns("__pycache__", "results")
        shutil.copytree(ROOT / package, folder / package, symlinks=True, ignore=ignore)
    for reported, line, _ in WRONG_IMPORTS:
        module = folder / reported.partition(" ")[0].replace(".", "/")
        with module.with_suffix(".py").open("a") as source:
            source.write(f"\n{line}\n")
    (folder / "cdc/attic").mkdir()
    (folder / "cdc/attic/__init__.py").touch()
    result = lint(folder)
    assert result.returncode == 1
    _, *parts = re.split(r"^(.+)\n-{3,}\n", result.stdout, flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def report(broken_contracts: dict[str, str], contract: str) -> str:
    (text,) = (text for name, text in broken_contracts.items() if name.startswith(contract))
    return text


@pytest.mark.parametrize(("reported", "line", "contract"), WRONG_IMPORTS)
def test_a_wrong_import_is_found(
    broken_contracts: dict[str, str], reported: str, line: str, contract: str
) -> None:
    """The report of the contract names this import, whatever else breaks the contract."""
    assert f"{reported} " in report(broken_contracts, contract)


def test_a_room_without_a_layer_is_found(broken_contracts: dict[str, str]) -> None:
    assert re.search(r"\battic\b", report(broken_contracts, ROOMS))


@pytest.mark.parametrize(
    ("contract", "known"),
    [
        (PLAIN, {"cdc.errors", "cdc.model"}),
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


def test_the_package_has_its_two_modules_alone() -> None:
    names = sorted(path.name for path in (ROOT / "cdc").glob("*.py"))
    assert names == ["__init__.py", "entry.py", "errors.py"]


def test_verbs_that_need_no_spark_start_without_it() -> None:
    names = "cdc.cli.verbs, cdc.observe.collection, cdc.verify.barrier, cdc.compose.stack"
    names += ", cdc.cli.run, cdc.cli.status"
    names += ", cdc.capture.connector, cdc.migrations, cdc.sinks"
    names += ", cdc.sinks.redis.sink, cdc.sinks.elasticsearch.sink, cdc.sinks.delta.sink"
    code = f"import {names}, sys; sys.exit('pyspark' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT).returncode == 0


NAMED_TUPLE = {"_replace", "_asdict", "_fields", "_make"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in NAMED_TUPLE


def own_names(tree: ast.AST) -> set[str]:
    """The private names that code defines itself."""
    return {
        name
        for node in ast.walk(tree)
        for name in [
            node.name
            if isinstance(node, ast.FunctionDef | ast.ClassDef)
            else node.attr
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            else ""
        ]
        if is_private(name)
    }


def private_uses(tree: ast.AST) -> Iterator[str]:
    """The private names that code uses of others: as attributes, imported, or to replace them."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                continue
            case ast.Attribute(attr=name):
                yield name
            case ast.ImportFrom(names=aliases):
                yield from (alias.name for alias in aliases)
            case ast.Call(func=ast.Name(id="getattr" | "setattr" | "hasattr"), args=[_, *words]):
                yield from texts(words)
            case ast.Call(func=ast.Attribute(attr="setattr" | "object" | "patch"), args=words):
                yield from texts(words[:2])


def texts(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """The last name of each dotted text."""
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value.rpartition(".")[2]


def private_names(code: str) -> set[str]:
    tree = ast.parse(code)
    return {name for name in private_uses(tree) if is_private(name)} - own_names(tree)


def test_tests_use_interfaces_only() -> None:
    """What a test reaches into can't be changed without it, however well it works."""
    paths = sorted((ROOT / "tests").rglob("*.py"))
    names = {str(path.relative_to(ROOT)): private_names(path.read_text()) for path in paths}
    assert {path: private for path, private in names.items() if private} == {}


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("stream._query.stop()", {"_query"}),
        ("from cdc.apply.stream import _restart", {"_restart"}),
        ('monkeypatch.setattr(stream, "_restart", None)', {"_restart"}),
        ('mock.patch("cdc.apply.stream._restart")', {"_restart"}),
        ('getattr(stream, "_query")', {"_query"}),
        ("self._own = self._other; row._replace(a=1); row.__class__; row['_cdc_id']", set()),
        ("class One:\n    def _own(self): pass\nother._own()", set()),
    ],
)
def test_a_private_name_is_found(code: str, names: set[str]) -> None:
    assert private_names(code) == names


def test_properties_run_every_test_that_takes_more_examples() -> None:
    scaling = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"^from tests\.support\.budget import", path.read_text(), re.MULTILINE)
    }
    listed = re.search(r"^PROPERTIES := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert listed is not None
    assert scaling - set(listed[1].split()) == set()
    assert "tests/integration/test_document_state.py" in scaling


def events(source: str) -> Iterator[str]:
    """The first argument of every call of `log`, as it is written."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            base = node.func.value
            if isinstance(base, ast.Name) and base.id == "log" and node.func.attr in LEVELS:
                yield ast.unparse(node.args[0])


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_events_have_stable_names(path: Path) -> None:
    assert [
        event
        for event in events(path.read_text())
        if not re.fullmatch(r"'[a-z]+(_[a-z]+)+'", event)
    ] == []
