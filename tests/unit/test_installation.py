"""What installs this project is this project: `cdc` on PyPI is a stranger's."""

import json
import re
import sys
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from cdc.cli.verbs import missing_extra
from cdc.model.installation import install_command
from tests.support.pages import ROOT

FROM_AN_INDEX = re.compile(r"""\bpip3? install [^\n;|&]*?(?<![/.\w-])['"]?cdc\b(?![-\w]*\.whl)""")
PIP = f"{sys.executable} -m pip install "


def record(patch: pytest.MonkeyPatch, folder: Path, origin: dict[str, Any] | None) -> None:
    """Have an installation whose record of its origin, as pip writes it, is this one."""
    if origin is not None:
        (folder / "direct_url.json").write_text(json.dumps(origin))
    patch.setattr(Distribution, "from_name", lambda _: Distribution.at(folder))


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        ({"url": "file://CLONE", "dir_info": {}}, "'CLONE[spark]'"),
        ({"url": "file://CLONE", "dir_info": {"editable": True}}, "-e 'CLONE[spark]'"),
        ({"url": "file://CLONE/cdc.whl", "archive_info": {}}, "'CLONE/cdc.whl[spark]'"),
        ({"url": "https://h/cdc.whl", "archive_info": {}}, "'cdc[spark] @ https://h/cdc.whl'"),
        ({"url": "https://h/c", "vcs_info": {"vcs": "git"}}, "'cdc[spark] @ git+https://h/c'"),
        ({"url": "file:///no/longer/there", "dir_info": {}}, "'.[spark]'"),
        (None, "'.[spark]'"),
    ],
)
def test_an_extra_comes_from_where_the_package_came_from(
    origin: dict[str, Any] | None,
    command: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    (tmp_path / "cdc.whl").touch()
    placed = json.loads(json.dumps(origin).replace("CLONE", str(tmp_path)))
    record(monkeypatch, tmp_path, placed)
    assert install_command("spark") == PIP + command.replace("CLONE", str(tmp_path))


def test_a_requirement_of_an_origin_is_one_that_pip_reads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    record(monkeypatch, tmp_path, {"url": "https://h/c", "vcs_info": {"vcs": "git"}})
    requirement = Requirement(install_command("serve").split("'")[1])
    assert (requirement.extras, requirement.url) == ({"serve"}, "git+https://h/c")


def test_a_verb_without_its_extra_names_the_command() -> None:
    error = missing_extra(ModuleNotFoundError(name="uvicorn.config"))
    assert error is not None
    assert error.hint == install_command("serve")


def test_nothing_that_can_be_pasted_installs_a_stranger() -> None:
    folders = ("cdc", "sinks", "connectors", "compose", "docs", "sample", "examples")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    paths += [*ROOT.glob("*.md"), ROOT / "Makefile"]
    text_kinds = {".py", ".md", ".sh", ".yml", ".yaml", ".service", ".html", ""}
    lines = {
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in paths
        if path.suffix in text_kinds
        for match in FROM_AN_INDEX.finditer(path.read_text())
    }
    assert lines == set()
