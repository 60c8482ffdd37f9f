"""The units and the container recipe that come with the project."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import pages

FOLDER = Path(__file__).parents[2] / "compose" / "service"
UNITS = sorted(FOLDER.glob("*.service"))
PROGRAM = "/opt/cdc/bin/cdc"
ANALYZE = shutil.which("systemd-analyze")


@pytest.mark.skipif(ANALYZE is None, reason="no systemd-analyze: apt install systemd")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_takes_the_unit(unit: Path, tmp_path: Path) -> None:
    assert verified(unit.read_text(), tmp_path / unit.name.replace("@", "@shop")) == ""


@pytest.mark.skipif(ANALYZE is None, reason="no systemd-analyze: apt install systemd")
def test_planted_a_setting_that_systemd_does_not_know(tmp_path: Path) -> None:
    text = UNITS[0].read_text().replace("KillMode=mixed", "KillMood=mixed")
    assert "KillMood" in verified(text, tmp_path / "cdc-run@shop.service")


def verified(text: str, path: Path) -> str:
    """What systemd says of a unit whose program is the one that is installed here."""
    path.write_text(text.replace(PROGRAM, str(Path(sys.executable).with_name("cdc"))))
    command = ["systemd-analyze", "verify", "--man=no", str(path)]
    return subprocess.run(command, check=False, capture_output=True, text=True).stderr


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_the_command_of_a_unit_is_one_that_there_is(unit: Path) -> None:
    (line,) = re.findall(rf"^ExecStart={PROGRAM} (.*)$", unit.read_text(), re.MULTILINE)
    assert pages.refusal(line.replace("%i", "shop").split()) is None


def test_a_run_that_is_stopped_ends_cleanly_and_a_mistake_is_not_tried_again() -> None:
    (unit,) = (unit for unit in UNITS if "run" in unit.name)
    text = unit.read_text()
    assert "KillMode=mixed" in text
    assert "RestartPreventExitStatus=2 3" in text


def test_the_recipe_is_pinned_and_runs_as_nobody_special() -> None:
    text = (FOLDER / "Dockerfile").read_text()
    images = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    assert [image for image in images if ":" not in image or image.endswith(":latest")] == []
    user, entry = text.index("USER 10001"), text.index("ENTRYPOINT")
    assert user < entry
    assert "--require-hashes" in text
    copied = re.findall(r"^COPY (?:--from=\w+ )?(\S+)", text, re.MULTILINE)
    assert copied == [".", "/opt/cdc"]
