"""The units and the container recipe that come with the project. Of the container only text is
checked: no image is built here, and no linter is at hand.
"""

import json
import re
import shlex
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support import pages

FOLDER = pages.ROOT / "compose" / "service"
RECIPE = (FOLDER / "Dockerfile").read_text()
UNITS = sorted(FOLDER.glob("*.service"))
PROGRAM = "/opt/cdc/bin/cdc"
VOLUME = re.compile(r"\w[\w-]+")
"""The name of a volume, no path."""
ANALYZE = shutil.which("systemd-analyze")


@pytest.mark.skipif(ANALYZE is None, reason="no systemd-analyze: apt install systemd")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_takes_the_unit(unit: Path, tmp_path: Path) -> None:
    assert verified(unit.read_text(), tmp_path / unit.name.replace("@", "@shop")) == ""


def verified(text: str, path: Path) -> str:
    """What systemd says of a unit whose program is the one that is installed here."""
    path.write_text(text.replace(PROGRAM, str(Path(sys.executable).with_name("cdc"))))
    command = ["systemd-analyze", "verify", "--man=no", str(path)]
    return subprocess.run(command, check=False, capture_output=True, text=True).stderr


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_the_command_of_a_unit_is_one_that_there_is(unit: Path) -> None:
    (line,) = re.findall(rf"^ExecStart={PROGRAM} (.*)$", unit.read_text(), re.MULTILINE)
    assert pages.refusal(line.replace("%i", "shop").split()) is None


def test_the_recipe_opens_the_ports_that_are_served() -> None:
    assert "EXPOSE 9104 8350\n" in RECIPE


def test_the_recipe_is_pinned_and_runs_as_nobody_special() -> None:
    images = re.findall(r"^FROM (\S+)", RECIPE, re.MULTILINE)
    assert [image for image in images if ":" not in image or image.endswith(":latest")] == []
    user, entry = RECIPE.index("USER 10001"), RECIPE.index("ENTRYPOINT")
    assert user < entry
    assert "--require-hashes" in RECIPE
    copied = re.findall(r"^COPY (?:--from=\w+ )?(\S+)", RECIPE, re.MULTILINE)
    assert copied == [".", "/opt/cdc"]


def test_a_run_that_is_stopped_ends_cleanly_and_a_mistake_is_not_tried_again() -> None:
    (unit,) = (unit for unit in UNITS if "run" in unit.name)
    text = unit.read_text()
    assert "KillMode=mixed" in text
    assert "RestartPreventExitStatus=2 3" in text


def array(instruction: str) -> list[str]:
    """What the recipe has for an instruction, as JSON."""
    (text,) = re.findall(rf"^{instruction} (\[.*\])$", RECIPE, re.MULTILINE)
    return list(json.loads(text))


def faults(line: str) -> list[str]:
    """What is wrong with a documented `docker run` of the image."""
    words = shlex.split(line)
    image = words.index("cdc")
    options, command = words[:image], words[image + 1 :] or array("CMD")
    values = [(name, value) for name, value in pairwise(options) if name.startswith("-")]
    volumes = {value.split(":")[1]: value.split(":")[0] for name, value in values if name == "-v"}
    ports = [value.rpartition(":")[2] for name, value in values if name == "-p"]
    port_option, address_option, default_port = (
        ("--port", "--address", "8350")
        if "serve" in command
        else ("--metrics", "--metrics-address", "none")
    )
    served = dict(pairwise(command))
    checks = {
        "/tmp isn't exec": ("--tmpfs", "/tmp:exec") in values,
        "the port isn't published": ports == [served.get(port_option, default_port)],
        "only the container reaches it": served.get(address_option) == "0.0.0.0",
        pages.refusal(command) or "": pages.refusal(command) is None,
    }
    checks |= {
        f"{place} has no volume with a name": bool(VOLUME.fullmatch(volumes.get(place, "")))
        for place in array("VOLUME")
        if place != "/tmp"
    }
    return [fault for fault, is_right in checks.items() if not is_right]


def documented_runs() -> list[str]:
    text = (pages.ROOT / "docs" / "start" / "service.md").read_text()
    return re.findall(r"^docker run .*$", text, re.MULTILINE)


def test_the_documented_containers_keep_the_warehouse_and_are_reached() -> None:
    assert len(documented_runs()) == 2
    assert [faults(line) for line in documented_runs()] == [[], []]
