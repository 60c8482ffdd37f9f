"""A standalone Spark cluster as the documentation describes it: a master, and nodes that share with the
driver no environment, no folder but those that the documentation names, and no Python packages.
"""

import os
import sysconfig
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pyspark

from cdc.compose import host, process
from cdc.spark.python_worker import DAEMON
from tests.support.wait import wait_until

SPARK_HOME = Path(str(pyspark.__file__)).parent
START_S = 60
DEFAULTS = """\
spark.cores.max 2
spark.executor.cores 1
spark.executor.memory 512m
"""
"""What the documentation has users write into `spark-defaults.conf`, for two nodes with two slots each."""


def make_environment(folder: Path) -> None:
    """Make an environment of Python with what is installed in this one, but for `cdc`, which the driver
    sends, and for Spark, which every node has.
    """
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/*/site-packages")
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if "cdc" not in path.name and path.name != "pyspark":
            (packages / path.name).symlink_to(path)


class Node:
    """A worker of the cluster, with two slots and the folders of another host."""

    def __init__(self, folder: Path, master: str) -> None:
        self.folder = folder
        self._master = master

    def start(self) -> None:
        (self.folder / "tmp").mkdir(parents=True, exist_ok=True)
        self._process = _start(
            self.folder,
            "org.apache.spark.deploy.worker.Worker",
            *("--cores", "2", "--memory", "1100m", "--work-dir", str(self.folder / "work")),
            self._master,
        )

    def kill(self) -> None:
        """Kill the worker; what it has started is left alone."""
        if running := self._process.find():
            running.kill()
            running.wait(30)

    def executors(self) -> list[psutil.Process]:
        """The executors that run in the node's folder."""
        return [
            running
            for running in psutil.process_iter()
            if _is_below(running, self.folder) and "CoarseGrainedExecutorBackend" in _words(running)
        ]


class Cluster:
    def __init__(self, folder: Path) -> None:
        ports = host.choose_ports(["master", "page"])
        self.url = f"spark://127.0.0.1:{ports['master']}"
        self._page = f"http://127.0.0.1:{ports['page']}"
        self._folder = folder / "master"
        self._ports = ports
        self.nodes = [Node(folder / f"node-{number}", self.url) for number in (1, 2)]
        environment = folder / "environment"
        make_environment(environment)
        conf = folder / "conf"
        conf.mkdir()
        (conf / "spark-defaults.conf").write_text(DEFAULTS)
        self.environment = {
            "SPARK_CONF_DIR": str(conf),
            "PYSPARK_PYTHON": str(environment / "bin/python"),
            "SPARK_LOCAL_IP": "127.0.0.1",
        }
        """Of a driver."""

    def start(self) -> None:
        self._folder.mkdir()
        self._master = _start(
            self._folder,
            "org.apache.spark.deploy.master.Master",
            *("--host", "127.0.0.1", "--port", str(self._ports["master"])),
            *("--webui-port", str(self._ports["page"])),
        )
        for node in self.nodes:
            node.start()
        wait_until(lambda: self.alive_workers() == 2, START_S, "the workers to register")

    def alive_workers(self) -> int:
        try:
            return int(self._state()["aliveworkers"])
        except (httpx.HTTPError, ValueError):
            return 0

    def _state(self) -> dict[str, Any]:
        return dict(httpx.get(f"{self._page}/json/", timeout=60).json())

    def stop(self) -> None:
        for node in self.nodes:
            process.kill(node._process)
        process.kill(self._master)


def daemons(executor: psutil.Process) -> list[psutil.Process]:
    """The daemon of an executor's Python workers, which are its children."""
    return [child for child in executor.children() if DAEMON in _words(child)]


def _start(folder: Path, *words: str) -> process.Process:
    return process.spawn(
        [SPARK_HOME / "bin/spark-class", *words],
        home=folder,
        log=folder / "log",
        env={
            "PATH": os.environ["PATH"],
            "JAVA_HOME": str(host.java().parents[1]),
            "JAVA_TOOL_OPTIONS": os.environ["JAVA_TOOL_OPTIONS"],
            "HOME": str(folder),
            "TMPDIR": str(folder / "tmp"),
            "SPARK_HOME": str(SPARK_HOME),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_LOCAL_DIRS": str(folder / "tmp"),
            "SPARK_DAEMON_MEMORY": "128m",
        },
        user=None,
    )


def _words(running: psutil.Process) -> str:
    try:
        return " ".join(running.cmdline())
    except psutil.Error:
        return ""


def _is_below(running: psutil.Process, folder: Path) -> bool:
    try:
        return Path(running.cwd()).is_relative_to(folder)
    except psutil.Error:
        return False


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    made = Cluster(folder)
    try:
        made.start()
        yield made
    finally:
        made.stop()
