"""The units, the recipe of the image, and the chart that come with the project. Of the image only
text is checked: `make image` builds it, which takes minutes.
"""

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, requires
from itertools import pairwise
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from packaging.requirements import Requirement

from tests.support import pages

FOLDER = pages.ROOT / "compose" / "service"
RECIPE = (FOLDER / "Dockerfile").read_text()
UNITS = sorted(FOLDER.glob("*.service"))
PROGRAM = "/opt/cdc/bin/cdc"
VOLUME = re.compile(r"\w[\w-]+")
"""The name of a volume, no path."""
ANALYZE = shutil.which("systemd-analyze")
PLACES = ("/warehouse",)
"""Folders of a container that have to outlive it."""
CHART = FOLDER / "chart"
VALUES = Path(__file__).with_name("chart_values.yaml")
RENDERED = Path(__file__).with_name("chart.yaml")
EARLIEST = {"python_version": "3.11", "python_full_version": "3.11.0"}
KUBERNETES = ("1.30", "1.37")


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
    (base,) = re.findall(r"^ARG BASE=(\S+)$", RECIPE, re.MULTILINE)
    assert ":" in base
    assert not base.endswith(":latest")
    stages = re.findall(r"^FROM (\S+)(?: AS (\w+))?$", RECIPE, re.MULTILINE)
    assert stages == [("${BASE}", "base"), ("base", "build"), ("base", "")]
    assert RECIPE.index("USER 10001:10001") < RECIPE.index("ENTRYPOINT")
    copied = re.findall(r"^COPY (?:--from=(\w+) )?(\S+) ", RECIPE, re.MULTILINE)
    of_the_checkout = [path for stage, path in copied if not stage]
    assert of_the_checkout == ["requirements-run.lock", "."]
    assert [path for path in of_the_checkout if not (pages.ROOT / path).exists()] == []
    # Nothing but the environment and Spark's jars leaves the stage with the checkout.
    assert [path for stage, path in copied if stage] == ["/opt/cdc", "/opt/cache"]


def locked(name: str) -> dict[str, str]:
    """Each package of a lock: its version and its hashes."""
    text = re.sub(r"^ *#.*\n", "", (pages.ROOT / name).read_text(), flags=re.MULTILINE)
    return dict(re.findall(r"^([a-z0-9-]+)==((?:.*\\\n)*.*)$", text, re.MULTILINE))


def test_the_image_installs_a_part_of_the_lock_with_neither_servers_nor_tools() -> None:
    assert "--require-hashes -r requirements-run.lock" in RECIPE
    whole = locked("requirements.lock")
    part = locked("requirements-run.lock")
    assert part.items() <= whole.items()
    assert [name for name, pin in part.items() if "--hash=sha256:" not in pin] == []
    project = tomllib.loads((pages.ROOT / "pyproject.toml").read_text())["project"]
    extras = {name: named(texts) for name, texts in project["optional-dependencies"].items()}
    needed = named(project["dependencies"]) | extras["spark"] | extras["serve"]
    assert needed <= part.keys()
    assert not (extras["local"] | extras["sample"] | extras["dev"]) - needed & part.keys()


def named(requirements: list[str]) -> set[str]:
    return {Requirement(text).name.lower() for text in requirements}


def test_a_lock_is_whole_for_the_earliest_python() -> None:
    # The one of Debian 12, of which the image is made, is 3.11.2: with hashes a package that is
    # needed only there has to be in the lock.
    assert {name: missing(name) for name in ("requirements.lock", "requirements-run.lock")} == {
        "requirements.lock": set(),
        "requirements-run.lock": set(),
    }


def missing(lock: str) -> set[str]:
    """What packages of a lock require on the earliest Python, and the lock doesn't have."""
    names = locked(lock).keys()
    wanted = set()
    for name in names:
        try:
            texts = requires(name) or []
        except PackageNotFoundError:  # for another system than this one
            continue
        for requirement in map(Requirement, texts):
            marker = requirement.marker
            if marker is None or marker.evaluate({**EARLIEST, "extra": ""}):
                wanted.add(re.sub(r"[-_.]+", "-", requirement.name).lower())
    return wanted - names


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
        for place in PLACES
    }
    return [fault for fault, is_right in checks.items() if not is_right]


def documented_runs() -> list[str]:
    text = (pages.ROOT / "docs" / "start" / "service.md").read_text()
    return re.findall(r"^docker run .*$", text, re.MULTILINE)


def test_the_documented_containers_keep_the_warehouse_and_are_reached() -> None:
    assert len(documented_runs()) == 2
    assert [faults(line) for line in documented_runs()] == [[], []]


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run helm on the chart."""
    if shutil.which("helm") is None:
        pytest.skip("there is no helm: go install helm.sh/helm/v3/cmd/helm@latest")
    command = ["helm", arguments[0], "shop", str(CHART), *arguments[1:]]
    return subprocess.run(command, check=False, capture_output=True, text=True)


def test_the_rendered_chart_is_current() -> None:
    # When it isn't: helm template shop compose/service/chart --values tests/unit/chart_values.yaml
    # > tests/unit/chart.yaml
    rendered = helm("template", "--values", str(VALUES))
    assert (rendered.stdout, rendered.stderr) == (RENDERED.read_text(), "")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ("secret=shop", "at '/pipeline': minLength"),
        ("pipeline=shop", "at '/secret': minLength"),
        ("pipeline=shop,secret=shop,warehouse=shop", "'warehouse' not allowed"),
    ],
)
def test_the_chart_refuses_a_value_that_is_missing_or_unknown(settings: str, says: str) -> None:
    refused = helm("template", "--set", settings)
    assert refused.returncode != 0
    assert says in refused.stderr


def objects() -> dict[str, Any]:
    """The objects of the rendered chart, by kind and name."""
    documents = yaml.safe_load_all(RENDERED.read_text())
    return {f"{found['kind']}/{found['metadata']['name']}": found for found in documents}


def api_refusal(found: dict[str, Any], version: str) -> str | None:
    """What the schemas of Kubernetes' API say against an object; None when they take it."""
    try:
        kubernetes_validate.validate(found, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return str(error.message)
    return None


@pytest.mark.parametrize("version", KUBERNETES)
def test_the_api_of_kubernetes_takes_what_is_rendered(version: str) -> None:
    rendered = objects()
    assert {name: api_refusal(found, version) for name, found in rendered.items()} == {
        "ConfigMap/shop-pipeline": None,
        "Deployment/shop-run": None,
        "Deployment/shop-page": None,
        "Service/shop-page": None,
    }
    planted = rendered["Deployment/shop-run"]
    planted["spec"]["replicaz"] = planted["spec"].pop("replicas")
    assert "replicaz" in (api_refusal(planted, version) or "")


def pod(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The pod of a deployment, and its only container."""
    spec = objects()[f"Deployment/{name}"]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    return spec, container


@pytest.mark.parametrize("name", ["shop-run", "shop-page"])
def test_a_pod_fits_the_image(name: str) -> None:
    spec, container = pod(name)
    assert pages.refusal(container["args"]) is None
    assert spec["securityContext"]["runAsUser"] == 10001
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert {volume["name"] for volume in spec["volumes"]} == mounts.keys()
    assert {"/tmp", *PLACES} <= set(mounts.values())
    assert array("CMD")[1].startswith(mounts["pipeline"])
    assert container["args"][:2] == array("CMD")[:2]
    (port,) = container["ports"]
    assert str(port["containerPort"]) in re.findall(r"^EXPOSE (.*)$", RECIPE, re.MULTILINE)[0]
    probes = {key: value for key, value in container.items() if key.endswith("Probe")}
    assert {probe["httpGet"]["port"] for probe in probes.values()} == {port["name"]}
    assert probes["livenessProbe"]["httpGet"]["path"] == "/livez"
    assert probes["readinessProbe"]["httpGet"]["path"] == "/readyz"


def test_a_run_has_one_pod_that_ends_before_the_next_begins() -> None:
    deployment = objects()["Deployment/shop-run"]["spec"]
    assert (deployment["replicas"], deployment["strategy"]) == (1, {"type": "Recreate"})
    stopped_after = re.findall(r"--stop-timeout (\d+)", documented_runs()[0])
    spec, _ = pod("shop-run")
    assert [str(spec["terminationGracePeriodSeconds"])] == stopped_after


def test_a_changed_pipeline_file_starts_new_pods() -> None:
    original = helm("template", "--values", str(VALUES)).stdout
    changed = helm("template", "--values", str(VALUES), "--set", "pipeline=other").stdout
    sums = [re.findall(r"checksum/pipeline: (\w+)", text) for text in (original, changed)]
    assert [len(found) for found in sums] == [2, 2]
    assert not set(sums[0]) & set(sums[1])
